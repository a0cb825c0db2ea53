"""`fp8q compare` on the finished demo: `fp8q serve` is the model that was validated, the original is not."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from tests.serve.web.started_server import Thread, in_thread

WINDOWS = 4


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy, to write in."""
    return Run(Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("compare") / "run")))


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[Thread]:
    with in_thread(run.root) as found:
        yield found


def test_fp8q_serve_is_the_validated_model_and_no_torch_is_needed(
    run: Run, server: Thread, base_install: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """It is ONNX Runtime's own arithmetic, so its distance from that runtime is nearly nothing."""
    url = f"{server.client.base_url}".rstrip("/") + "/v1"
    done = base_install("compare", run.root, "--url", url, "--windows", str(WINDOWS), "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["verdict"], shown["form"], shown["requests"]) == ("validated", "prompt_logprobs", WINDOWS + 1)
    first = shown["runtimes"][0]
    assert (first["runtime"], first["validated"]) == ("onnxruntime", True)
    assert first["kl_nats"]["mean"] < 0.01 * shown["runtimes"][1]["kl_nats"]["mean"]
    assert shown["perplexity"]["mean"] == pytest.approx(first["perplexity"], rel=1e-3)
    assert json.loads(run.comparison.read_text(encoding="utf-8")) == shown
    assert run.record().stages["compare"].outputs.keys() == {"compare.json"}


def test_the_source_is_told_as_bf16_by_exit_code_3(run: Run, demo_checkpoint: Path, fp8q: Callable[..., Any]) -> None:
    found = fp8q("compare", run.root, "--model", demo_checkpoint, "--windows", WINDOWS)
    assert found.code == 3
    assert found.err.splitlines()[-1].startswith(f"fp8q: {demo_checkpoint}: the model, but in BF16: ")
    assert "distance from the run's runtimes" in found.out


def test_the_checkpoint_through_transformers_is_the_validated_model(run: Run) -> None:
    """transformers keeps the cache of this run in BF16, so it is another implementation, and no nearer than that."""
    found = api.compare(run.root, api.CompareOptions(model=run.model, windows=WINDOWS))
    assert found.runtimes[-1].runtime == "bf16"
    assert found.verdict in ("validated", "undecided", "other-arithmetic")
    assert (found.form, found.requests) == ("transformers", 0)


BOTH = "--url http://a and --model b: give one of them, a server's address or a checkpoint's directory"


@pytest.mark.parametrize(("fields", "told"), [
    ({}, "neither --url nor --model: give one of them, a server's address or a checkpoint's directory"),
    ({"url": "http://a", "model": Path("b")}, BOTH),
    ({"model": Path("nowhere")}, "--model nowhere: there is no such directory; give that of a checkpoint"),
])  # fmt: skip
def test_one_of_a_server_and_a_checkpoint_is_named(run: Run, fields: dict[str, object], told: str) -> None:
    with pytest.raises(InputError) as refused:
        api.compare(run.root, api.CompareOptions(**fields))  # type: ignore[arg-type]
    assert str(refused.value) == told
