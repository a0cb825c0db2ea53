"""Checkpoints of the hub: downloaded once, and refused in a line."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fp8q.calibrate.model.source import Source, open_source

from ..model.damage import demo_files, refusal

if TYPE_CHECKING:
    from tests.calibrate.conftest import Hub


def test_a_hub_model_is_downloaded_once(
    hub: "Hub", demo: Source, demo_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add(
        "acme/tiny",
        demo_files(demo_checkpoint)
        | {"pytorch_model.bin": b"never asked for", "original/model.safetensors": b"nor this", "run.py": b"nor this"},
    )
    source = open_source("acme/tiny")
    assert (source.name, source.revision, source.fingerprint) == (
        "acme/tiny",
        "0123456789abcdef0123456789abcdef01234567",
        demo.fingerprint,
    )
    assert sorted(file.name for file in source.path.iterdir()) == sorted(demo_files(demo_checkpoint))
    assert [
        request for request in hub.asked if request.startswith("GET") and request.endswith("model.safetensors")
    ] == [f"GET /acme/tiny/resolve/{source.revision}/model.safetensors"]
    hub.asked.clear()
    assert open_source("acme/tiny", revision=source.revision).fingerprint == demo.fingerprint
    assert not [request for request in hub.asked if "/resolve/" in request]
    assert capfd.readouterr() == ("", "")


def test_a_hub_model_in_the_cache_needs_no_network(
    hub: "Hub", demo: Source, demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", demo_files(demo_checkpoint))
    open_source("acme/tiny")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert open_source("acme/tiny").fingerprint == demo.fingerprint


def test_without_a_network_a_hub_name_is_an_error_with_a_remedy(hub: "Hub", monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = (
        "acme/tiny: there is no such file or directory, and the hub cannot be reached to look for a model of that "
        "name; "
        "connect, or download it elsewhere and give the directory as MODEL"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal("acme/tiny") == unreachable
    assert hub.asked == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert refusal("acme/tiny") == unreachable


def test_names_and_revisions_that_the_hub_does_not_have(hub: "Hub", demo_checkpoint: Path) -> None:
    hub.add("acme/tiny", demo_files(demo_checkpoint))
    assert refusal("acme/tyni") == (
        "acme/tyni: there is no such file or directory, and no model of that name on the hub; check the spelling, "
        "or `hf auth login` if it is private"
    )
    assert (
        refusal("acme/tiny", revision="v9")
        == "acme/tiny: has no revision v9 on the hub; name a branch, tag or commit that it has with --revision"
    )


def test_a_gated_hub_model(hub: "Hub", demo_checkpoint: Path) -> None:
    hub.add("acme/tiny", demo_files(demo_checkpoint))
    hub.gated.add("acme/tiny")
    assert (
        refusal("acme/tiny")
        == "acme/tiny: the model is gated on the hub; accept its terms there and log in with `hf auth login`"
    )


def test_a_hub_model_with_pickled_weights_only(hub: "Hub", demo_checkpoint: Path) -> None:
    files = demo_files(demo_checkpoint)
    hub.add("acme/tiny", files | {"pytorch_model.bin": files.pop("model.safetensors")})
    assert refusal("acme/tiny") == (
        "acme/tiny: has no safetensors weights: neither model.safetensors nor model.safetensors.index.json, and "
        "pickled ones are not read; save the model with save_pretrained"
    )
    assert not [request for request in hub.asked if request.endswith("pytorch_model.bin")]
