"""The commands of a GPU's user, from the engine to an answer over HTTP, on a stand-in for the GPU.

The builder is TensorRT-RTX's, under both names; driver and runtime are those of `stand_in`, which run the engine's
graph in FP32 on ONNX Runtime. So what comes out can be held against ONNX Runtime itself.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8q.core.run import Run
from fp8q.export.engine.targets import MODULES, Runtime
from fp8q.validate.accuracy.document import load_accuracy, load_divergences, load_token_losses
from tests.noise import check_one_model, mean_noise, root_mean_square
from tests.serve.web.started_server import in_thread

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")

from tests.stand_in import runtime as stand_in
from tests.stand_in.driver import Driver
from tests.stand_in.runtime import Machine, machine

pytestmark = pytest.mark.slow

Fp8q = Callable[..., Any]
PROMPT = "def read_file(path):\n    "


@pytest.fixture
def on_gpu() -> Iterator[Machine]:
    """A machine with an Ada GPU of a gigabyte, and both runtimes."""
    with machine(Driver(), *MODULES.values()) as found:
        yield found


@pytest.fixture
def run(demo_run: Run, tmp_path: Path) -> Run:
    """The demo, without engines."""
    copied = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    shutil.rmtree(copied.engines)
    return copied


@pytest.mark.parametrize("runtime", MODULES)
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
def test_a_gpus_user_builds_validates_and_serves(fp8q: Fp8q, on_gpu: Machine, run: Run, runtime: Runtime) -> None:
    sizes = ("--max-batch", "2", "--max-seq-len", "256", "--max-prompt", "96")  # a window of 128 is two chunks
    built = fp8q("build-engine", run.root, "--runtime", runtime, *sizes)
    assert built.code == 0, built.err
    on_gpu.knows(run.engines / "sm89.plan", run.onnx_fp32)
    record = json.loads((run.engines / "sm89.json").read_text())
    assert (record["runtime"], record["fp8_products"], record["wide_products"]) == (runtime, 28, [])
    assert record["evidence"] == ("inspector" if runtime == "tensorrt" else "plan")
    assert (run.engines / "sm89.layers.json").exists() == (runtime == "tensorrt")

    looked = fp8q("engine", run.root, "--json")
    (view,) = json.loads(looked.out)["engines"]
    assert (looked.code, view["fp8_products"], view["untold"]) == (0, 28, [])

    words = ("--runtimes", f"bf16,onnxruntime,{runtime}", "--context", "128")
    for served in ((), ("--as-served", "96")):
        validated = fp8q("validate", run.root, *words, *served)
        assert validated.code == 0, validated.err
        found = load_accuracy(run).runtimes
        ours, theirs = found[runtime], found["onnxruntime"]
        check_one_model(load_token_losses(run), runtime, "onnxruntime")
        kl = load_divergences(run)
        noise = mean_noise(*root_mean_square(kl[runtime], kl["onnxruntime"]))
        assert ours.kl_mean_nats == pytest.approx(theirs.kl_mean_nats, abs=noise)
        assert ours.top1_agreement == pytest.approx(theirs.top1_agreement, abs=0.01)
    on_gpu.driver.cuStreamSynchronize(0)  # memory is freed in the stream's order
    assert on_gpu.driver.held == {}, "validating gave all memory back"

    expected = json.loads(fp8q("generate", run.root, "--prompt", PROMPT, "--max-tokens", "12", "--json").out)
    with in_thread(run.root, runtime=runtime, max_batch=2) as server:
        answer = server.post(prompt=PROMPT, max_tokens=12, temperature=0).json()
    assert answer["choices"][0]["text"] == expected["text"]
    captured = on_gpu.driver.launches > 2 * len(on_gpu.driver.modules)  # those of the kernels' example
    assert captured == (runtime == "tensorrt"), "TensorRT-RTX captures graphs by itself"


def test_bench_of_fp8_alone_says_what_to_put_beside_it(fp8q: Fp8q, on_gpu: Machine, run: Run) -> None:
    built = fp8q("build-engine", run.root, "--runtime", "tensorrt-rtx", "--max-batch", "2", "--max-seq-len", "64")
    assert built.code == 0, built.err
    on_gpu.knows(run.engines / "sm89.plan", run.onnx_fp32)
    words = ("--runtime", "tensorrt-rtx", "--prompt-lengths", "8", "--tokens", "3", "--rounds", "1", "--json")
    found = fp8q("bench", run.root, *words)
    assert found.code == 0, found.err
    assert (
        f"fp8: was measured alone, so no improvement is told; `fp8q export {run.root} --precision bf16` and "
        f"`fp8q build-engine {run.root} --precision bf16 --runtime tensorrt-rtx` put BF16 beside it"
    ) in found.err
    told = json.loads(found.out)
    assert {row["improvement"] for row in told["rows"]} == {None}
    assert [row["variant"] for row in told["capacity"]] == ["bf16", "fp8"]
    assert 1.5 < told["capacity"][1]["improvement"] < 2


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_engines_of_other_precisions_are_validated_beside_their_graphs(
    fp8q: Fp8q, on_gpu: Machine, run: Run, keeping_graphs: Callable[..., Any], precision: str
) -> None:
    with keeping_graphs():
        exported = fp8q("export", run.root, "--precision", precision)
    assert exported.code == 0, exported.err
    words = ("--runtime", "tensorrt-rtx", "--precision", precision, "--max-batch", "2", "--max-seq-len", "256")
    built = fp8q("build-engine", run.root, *words)
    assert built.code == 0, built.err
    on_gpu.knows(run.engines / precision / "sm89.plan", run.baselines / precision / "model.fp32.onnx")
    names = (f"onnxruntime-{precision}", f"tensorrt-rtx-{precision}")
    validated = fp8q("validate", run.root, "--runtimes", ",".join(("bf16", *names)), "--context", "256")
    assert validated.code == 0, validated.err
    theirs, ours = (load_accuracy(run).runtimes[name] for name in names)
    check_one_model(load_token_losses(run), *names)
    kl = load_divergences(run)
    noise = mean_noise(*root_mean_square(*(kl[name] for name in names)))
    assert ours.kl_mean_nats == pytest.approx(theirs.kl_mean_nats, abs=noise)


def test_an_engine_of_too_few_positions_is_named_and_nothing_is_left(fp8q: Fp8q, on_gpu: Machine, run: Run) -> None:
    built = fp8q("build-engine", run.root, "--runtime", "tensorrt-rtx", "--max-batch", "2", "--max-seq-len", "64")
    assert built.code == 0, built.err
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    line = fp8q("validate", run.root, "--runtimes", "bf16,tensorrt-rtx", "--context", "128").complaint(2)
    assert line == (
        "--runtimes tensorrt-rtx: its engine has room for 64 positions, and a window has 128; give --context 64, or "
        "build it with --max-seq-len 128"
    )
    assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == before


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
def test_the_other_form_of_the_scales_is_kept_with_what_the_inspector_says_of_it(
    fp8q: Fp8q, on_gpu: Machine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inspector that shows weights in BF16 until their scales stand behind the GEMM."""
    told = stand_in.inspected

    def wide_but_for_mul(plan: bytes) -> str:
        said = told(plan)
        return said if b"matmul.rescale" in plan else said.replace('"Datatype": "FP8"', '"Datatype": "BFloat16"')

    monkeypatch.setattr(stand_in, "inspected", wide_but_for_mul)
    built = fp8q("build-engine", run.root, "--runtime", "tensorrt", "--max-batch", "2", "--max-seq-len", "64")
    assert built.code == 0, built.err
    note = "sm89: with --apply-scales dq 28 of 28 GEMMs are not FP8 on both sides, 0 with mul; the second is kept"
    assert note in built.err
    record = json.loads((run.engines / "sm89.json").read_text())
    assert (record["weight_scale"], record["fp8_products"], record["evidence"]) == ("mul", 28, "inspector")
    kept = {path.name for path in run.engines.iterdir() if not path.is_symlink()}
    assert kept == {f"sm89{ending}" for ending in (".plan", ".json", ".layers.json", ".sh", ".onnx", ".timings")}
    (view,) = json.loads(fp8q("engine", run.root, "--json").out)["engines"]
    assert (view["fp8_products"], view["untold"]) == (28, [])


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
def test_what_the_inspector_does_not_tell_is_noted_and_passes_where_no_share_was_asked_for(
    fp8q: Fp8q, on_gpu: Machine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stand_in.inspected
    monkeypatch.setattr(stand_in, "inspected", lambda plan: told(plan).replace('"Constants"', '"Constant inputs"'))
    words = ("build-engine", run.root, "--runtime", "tensorrt", "--max-batch", "2", "--max-seq-len", "64")
    built = fp8q(*words)
    assert built.code == 0, built.err
    assert "sm89: whether 28 of 28 expected GEMMs are FP8 on both sides cannot be told (as model." in built.err
    record = json.loads((run.engines / "sm89.json").read_text())
    assert (record["evidence"], record["wide_products"], len(record["unknown_products"])) == ("unknown", [], 28)
    asked = fp8q(*words, "--min-fp8-share", "1")
    refused = f"fp8q: sm89: what the engine of TensorRT {stand_in.VERSION} runs cannot be told from it"
    assert (asked.code, asked.err.startswith(refused)) == (3, True), asked.err
