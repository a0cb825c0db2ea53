"""Every command that loads `RUN/model` refuses a checkpoint that its stages did not write, and leaves nothing."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q.core.run import Run

Fp8q = Callable[..., Any]
#: Commands that load the checkpoint in torch, with options that make them short.
COMMANDS = (
    ("sensitivity", "--windows", "1"),
    ("sensitivity", "--windows", "1", "--stream"),
    ("tune", "--max-kl", "0.1", "--windows", "3"),
    ("doctor", "--windows", "1"),
    ("validate", "--runtimes", "reference"),
    ("export",),
    ("compare", "--url", "http://127.0.0.1:9"),
    ("evaluate", "--tasks", "hellaswag"),
    ("generate", "--runtime", "reference", "--prompt", "x"),
)


@pytest.fixture(autouse=True)
def with_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `evaluate` look at the run where lm-eval is not installed: it refuses before it imports it."""
    monkeypatch.setattr("fp8q.stages.evaluate.HARNESS_MODULES", ())


@pytest.fixture
def copied(demo_run: Run, tmp_path: Path) -> Run:
    """The demo's run, to damage."""
    return Run(
        Path(shutil.copytree(demo_run.root, tmp_path / "run", ignore=shutil.ignore_patterns("engines", "triton")))
    )


def eight_times_the_scale(model: Path) -> Path:
    """Multiply the weight scales of one GEMM by 8: a checkpoint that loads, and is another model."""
    shard = next(model.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    begin, end = header["model.layers.0.mlp.down_proj.weight_scale"]["data_offsets"]
    scale = np.frombuffer(content, "<f4", (end - begin) // 4, 8 + length + begin)
    scale *= 8
    shard.write_bytes(content)
    return shard


def empty_configuration(model: Path) -> Path:
    (model / "config.json").write_text("{}")
    return model / "config.json"


def no_configuration(model: Path) -> Path:
    (model / "config.json").unlink()
    return model / "config.json"


def refused_by_all(fp8q: Fp8q, run: Run, message: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    for command, *words in COMMANDS:
        found = fp8q(command, run.root, *words)
        assert (command, found.complaint()) == (command, message)
    after = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    assert {path for path in after.keys() ^ before.keys() if path.name != ".lock"} == set()


@pytest.mark.parametrize("damage", [eight_times_the_scale, empty_configuration])
def test_a_changed_checkpoint_is_refused_by_all_that_load_it(
    fp8q: Fp8q, copied: Run, damage: Callable[[Path], Path]
) -> None:
    refused_by_all(
        fp8q,
        copied,
        f"{damage(copied.model)}: is not the file that `fp8q calibrate` wrote (its SHA-256 differs from run.json); "
        "restore it, or delete it and run `fp8q calibrate` again",
    )


def test_a_missing_configuration_is_refused_by_all_that_load_it(fp8q: Fp8q, copied: Run) -> None:
    path = no_configuration(copied.model)
    refused_by_all(fp8q, copied, f"{path}: is missing; `fp8q calibrate` writes it, run that first")


@pytest.mark.parametrize("name", ["attention.safetensors", "chat_template.jinja", "special_tokens_map.json"])
def test_what_no_stage_wrote_is_refused_by_all_that_load_the_model(fp8q: Fp8q, copied: Run, name: str) -> None:
    (copied.model / name).write_text("{}")
    refused_by_all(
        fp8q,
        copied,
        f"{copied.model / name}: no stage of this run wrote it, and loaders read such a file; delete it (generate "
        "and serve take a chat template with --template)",
    )


def test_a_licence_beside_the_weights_is_nobodys_business(fp8q: Fp8q, copied: Run) -> None:
    (copied.model / "LICENSE.md").write_text("free")
    assert fp8q("doctor", copied.root, "--windows", "1").code == 0
