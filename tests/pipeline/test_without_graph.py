"""A checkpoint need not be exportable to be quantized: what no ONNX graph can be made of is calibrated, validated by
the reference, and written; whatever needs the graph says why there is none.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.core.run import Run
from fp8q.export.graph.trace import UntraceableError
from fp8q.validate.accuracy.document import load_accuracy

from ..command_result import Result
from ..conftest import MadeOnce, Texts

pytestmark = pytest.mark.slow

Fp8q = Callable[..., Result]

GROUPED = {"num_key_value_heads": 2, "pad_token_id": 0}
#: A mask of its own; a cache that compressed-tensors has no place for; a cache whose layers cannot be told apart.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "DogeConfig": (GROUPED, "fp8", "DogeForCausalLM computes an attention mask of its own (DogeAttention)"),
    "MptConfig": (
        {"d_model": 128, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
        "fp8",
        "MptForCausalLM has an attention that transformers does not let be replaced",
    ),
    "GPTNeoConfig": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "pad_token_id": 0},
        "off",
        "GPTNeoForCausalLM has an attention that transformers does not let be replaced",
    ),
}


def checkpoint(random_checkpoint: Callable[..., Path], path: Path, config: str) -> Path:
    """A tiny random one of `CASES`."""
    return random_checkpoint(path, config, CASES[config][0])


@pytest.fixture(scope="module")
def models(random_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {config: checkpoint(random_checkpoint, folder / config, config) for config in CASES}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, demo_texts: Texts) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=CASES)
def run(
    request: pytest.FixtureRequest, made_once: MadeOnce, random_checkpoint: Callable[..., Path], text: Path
) -> tuple[Run, str]:
    """One of them, calibrated and validated, and why it has no graph."""
    config: str = request.param
    _, cache, reason = CASES[config]

    def make(folder: Path) -> None:
        options = api.CalibrateOptions(samples=4, seq_len=48, kv_cache=cache)  # type: ignore[arg-type]
        model = checkpoint(random_checkpoint, folder / "model", config)
        api.calibrate(str(model), str(text), folder / "run", options=options)
        api.validate(folder / "run")

    return Run(made_once(f"without-graph-{config}", make) / "run"), reason


def why(run: Run, reason: str) -> str:
    return (
        f"{run.root}: has no ONNX graph, since {reason}; `fp8q generate {run.root} --runtime reference` runs its "
        f"checkpoint, and {run.root}/model/README.md says what else does"
    )


def test_the_checkpoint_is_whole(run: tuple[Run, str]) -> None:
    """It is recorded why there is no graph, the reference is measured, and transformers loads every key."""
    found, reason = run
    exported = found.record().stages["export"]
    assert (exported.refused, exported.outputs) == (reason, {})
    assert not found.onnx.exists()
    assert set(load_accuracy(found).runtimes) == {"bf16", "reference"}
    assert f"There is no ONNX graph: {reason}." in (found.model / "README.md").read_text(encoding="utf-8")
    loaded: Any = AutoModelForCausalLM.from_pretrained(found.model, output_loading_info=True)
    assert not any(loaded[1].values())


def test_what_needs_the_graph_says_why_there_is_none(fp8q: Fp8q, run: tuple[Run, str]) -> None:
    found, reason = run
    for command in ("export", "lint", "build-engine", "triton", "engine"):
        assert fp8q(command, found.root).complaint() == why(found, reason)
    assert fp8q("export", found.root, "--precision", "int8").complaint() == why(found, reason)
    assert fp8q("generate", found.root, "--prompt", "Once").complaint() == why(found, reason)
    assert fp8q("serve", found.root).complaint() == why(found, reason)
    assert (
        fp8q("validate", found.root, "--runtimes", "bf16,onnxruntime")
        .complaint()
        .startswith(
            f"--runtimes onnxruntime: runs an ONNX graph, and {found.root} has none, since {reason}; choose from "
            "bf16, reference, fp32, original, one-term"
        )
    )


def test_what_needs_none_works(fp8q: Fp8q, run: tuple[Run, str]) -> None:
    found, _ = run
    told = fp8q("validate", found.root, "--json")
    assert told.code == 0
    assert {row["runtime"] for row in json.loads(told.out)["accuracy"]} == {"bf16", "reference"}
    assert f"onnxruntime: left out, since {found.root} has no ONNX graph" in told.err
    assert fp8q("generate", found.root, "--prompt", "Once", "--runtime", "reference", "--max-tokens", "2").code == 0
    assert fp8q("sensitivity", found.root, "--windows", "1", "--measure", "0").code == 0


def test_run_goes_on_past_what_needs_the_graph(fp8q: Fp8q, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """With the reason before anything is measured, and a line for each stage that is left out."""
    model, out = models["DogeConfig"], tmp_path / "run"
    reason = CASES["DogeConfig"][2]
    common = (model, "--data", text, "--out", out, "--samples", "4", "--seq-len", "48")
    assert (
        fp8q("run", *common, "--runtimes", "reference,onnxruntime")
        .complaint()
        .startswith(
            f"--runtimes onnxruntime: runs an ONNX graph, and {out} has none, since {reason}; choose from bf16, "
            "reference, fp32, original, one-term"
        )
    )
    assert not out.exists()
    told = fp8q("run", *common)
    assert told.code == 0
    first, *_ = told.err.splitlines()
    assert first == f"{reason}: no ONNX graph can be made of it, and what is written is the checkpoint, model/"
    for stage in ("build-engine", "triton"):
        assert f"{stage}: left out, since {out} has no ONNX graph" in told.err.splitlines()
    assert (out / "report.html").is_file()
    assert not (out / "triton").exists()


def test_a_cache_that_cannot_be_told_apart_takes_no_scales(
    fp8q: Fp8q, models: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    model, out = models["GPTNeoConfig"], tmp_path / "run"
    assert fp8q("calibrate", model, "--data", text, "--out", out, "--kv-cache", "fp8").complaint() == (
        "--kv-cache fp8: GPTNeoForCausalLM writes its cache where it cannot be told which layer it is, so that no "
        "scale has a place; leave it out"
    )
    assert not out.exists()


def test_what_torch_cannot_trace_ends_well_too(
    fp8q: Fp8q, random_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8q.export.graph import trace

    reason = "torch 0.0 cannot export LlamaForCausalLM to ONNX (it said so)"

    def export_graphs(*_: object) -> list[Path]:
        raise UntraceableError(reason)

    monkeypatch.setattr(trace, "export_graphs", export_graphs)
    model, out = random_checkpoint(tmp_path / "model", "LlamaConfig", GROUPED), tmp_path / "run"
    told = fp8q("calibrate", model, "--data", text, "--out", out, "--samples", "4", "--seq-len", "48")
    assert told.code == 0
    assert why(Run(out), reason) in told.err
    assert Run(out).record().stages["export"].refused == reason
    assert fp8q("export", out).complaint(4) == f"{reason}; `model/` is complete without the graph"
