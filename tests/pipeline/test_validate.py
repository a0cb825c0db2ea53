"""`fp8q validate` on the finished demo: runtimes by name, one that fails half-way, numbers that stop being any."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8q import api
from fp8q.core.errors import UnfinishedError
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages import run as run_command
from fp8q.validate.accuracy import compare, runtimes
from fp8q.validate.accuracy.document import load_accuracy, load_token_losses, save_accuracy

from ..conftest import has_gpu

pytestmark = pytest.mark.slow

SHORT = ("bf16", "reference", "onnxruntime")


@pytest.fixture
def run(demo_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy of the demo, evaluated in batches of eight windows of 64."""
    monkeypatch.setattr(compare, "LOGITS_BYTES", 8 * 64 * 2048 * 4)
    return Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))


@pytest.fixture
def text(demo_texts: Any, tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:5000], encoding="utf-8")
    return str(path)


def options(*names: str, **more: Any) -> api.ValidateOptions:
    return api.ValidateOptions(names, context=64, **more)


def test_fp32_and_the_checkpoints_own_type_run_by_name(run: Run, text: str) -> None:
    found = api.validate(run.root, text, options("reference", "fp32", "bf16", "original")).runtimes
    assert list(found) == ["reference", "fp32", "bf16", "original"]
    assert found["original"].perplexity == found["bf16"].perplexity  # the demo is stored in BF16
    assert (found["original"].kl_mean_nats, found["original"].top1_agreement) == (0, 1)
    own, fp8 = found["bf16"].kl_fp32_nats, found["reference"].kl_fp32_nats
    assert own is not None
    assert fp8 is not None
    assert 0 < own < fp8 / 5
    assert found["fp32"].kl_mean_nats == pytest.approx(own, rel=0.2)  # small divergences are the same either way
    assert found["fp32"].kl_fp32_nats is None


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
@pytest.mark.parametrize("runtime", ["tensorrt", "tensorrt-rtx"])
def test_an_engine_without_a_gpu_is_refused_before_torch_is_imported(demo_run: Run, runtime: str) -> None:
    """Importing torch and transformers takes ten times as long as all that comes before it."""
    script = "import sys; from fp8q.cli.main import command; print(command(), 'torch' in sys.modules)"
    asked = [sys.executable, "-c", script, "validate", str(demo_run.root), "--runtimes", f"bf16,{runtime}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "4 False\n"
    assert done.stderr == f"fp8q: {runtime}: runs engines on an NVIDIA GPU, and there is none here; use onnxruntime\n"


def broken(after: int) -> Callable[..., Any]:
    """`OnnxRuntimeSession.forward` that dies at the call `after`."""
    whole, calls = OnnxRuntimeSession.forward, list[int]()

    def forward(self: OnnxRuntimeSession, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == after:
            raise OSError("bad allocation")
        return whole(self, *given)

    return forward


def test_a_runtime_that_fails_leaves_the_others_numbers_and_is_tried_again(
    run: Run, text: str, fp8q: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("validate", run.root, "--data", text, "--context", "64", "--runtimes", ",".join(SHORT))
    with monkeypatch.context() as patch:
        patch.setattr(OnnxRuntimeSession, "forward", broken(after=2))
        found = fp8q(*asked)
    assert found.code == 4
    assert found.err.splitlines()[-1] == (
        "fp8q: onnxruntime: failed at window 9 to 16 of 22 (OSError: bad allocation); what bf16, reference gave is "
        "written, and the same command tries onnxruntime again: free memory or give a smaller --context, or leave "
        "onnxruntime out of --runtimes"
    )
    assert "reference" in found.out
    written = load_accuracy(run).runtimes
    assert list(written) == ["bf16", "reference"]
    assert load_token_losses(run).keys() == {"bf16", "reference"}
    assert run.record().stages["validate"].unfinished == ("onnxruntime",)

    loaded = list[Run]()
    monkeypatch.setattr(runtimes, "reference", lambda run, device: loaded.append(run))
    again = api.validate(run.root, text, options(*SHORT)).runtimes
    assert list(again) == list(SHORT)
    assert {name: again[name] for name in written} == written
    assert loaded == []  # what the reference gave was kept
    assert run.record().stages["validate"].unfinished is None
    assert not [path for path in run.root.iterdir() if path.name.startswith(".validate")]


def test_where_all_fail_nothing_is_written_over(run: Run, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run.accuracy.read_bytes()
    monkeypatch.setattr(OnnxRuntimeSession, "forward", broken(after=1))
    with pytest.raises(
        api.Fp8qError, match=r"^onnxruntime: failed at window 1 to 8 of 22 \(OSError: bad allocation\)$"
    ):
        api.validate(run.root, text, options("onnxruntime"))
    assert run.accuracy.read_bytes() == before
    api.report_tables(run.root)


def test_a_whole_run_ends_its_other_stages_when_a_runtime_fails(
    run: Run, demo_checkpoint: Path, demo_texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = list[str]()
    for name in ("build_engine", "triton", "report"):
        monkeypatch.setattr(run_command, name, lambda *_, name=name: stages.append(name))
    monkeypatch.setattr(run_command, "calibrate", lambda *given: run)
    monkeypatch.setattr(OnnxRuntimeSession, "forward", broken(after=1))
    with pytest.raises(UnfinishedError, match=r"^onnxruntime: failed at window 1 to 8 of \d+ "):
        api.run(
            str(demo_checkpoint),
            str(demo_texts.calibration),
            run.root,
            options=api.RunOptions(validate=options(*SHORT)),
        )
    assert stages == ["build_engine", "triton", "report"]


def spoiled(load: Callable[..., Any], module: str, model_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """`load`, with NaN in what `module` gives from the tenth position on."""

    def loaded(*given: Any) -> Any:
        found = load(*given)

        def spoil(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, 9:] = torch.nan
            return output

        model_of(found).get_submodule(module).register_forward_hook(spoil)
        return found

    return loaded


def test_numbers_that_fp8_alone_loses_are_its_fault_by_module_and_place(
    run: Run, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "model.layers.2.mlp.up_proj"
    monkeypatch.setattr(runtimes, "load_reference", spoiled(load_reference, module, lambda found: found.model))
    with pytest.raises(api.GateError) as error:
        api.validate(run.root, text, options("bf16", "reference"))
    said = f"first at position 9 of window 0 (from 0), by the output of {module}, and BF16's is a number; "
    assert said in str(error.value)
    place = load_accuracy(run).runtimes["reference"].not_finite
    assert place is not None
    assert (place.window, place.position, place.module, place.bf16) == (0, 9, module, False)
    with pytest.raises(api.GateError) as again:  # nothing is run for it
        api.validate(run.root, text, options("bf16", "reference"))
    assert str(again.value) == str(error.value)
    with pytest.raises(api.GateError, match=f"by the output of {module}, and BF16's is a number; "):
        api.validate(run.root, text, options("reference"))  # BF16 did not run, and is asked


@pytest.mark.parametrize("names", [("bf16", "reference"), ("reference",)])
def test_numbers_that_bf16_loses_too_are_the_models_fault(
    run: Run, text: str, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    module = "model.layers.1.post_attention_layernorm"
    for name, model_of in (("load_model", lambda model: model), ("load_reference", lambda found: found.model)):
        monkeypatch.setattr(runtimes, name, spoiled(getattr(runtimes, name), module, model_of))
    with pytest.raises(api.InputError) as error:
        api.validate(run.root, text, options(*names))
    assert str(error.value) == (
        f"{names[0]}: perplexity is nan on {text}, first at position 9 of window 0 (from 0), by the output of "
        f"{module}: the model gives no finite numbers before anything is quantized; check its config.json and its "
        "weights"
    )


def test_an_accuracy_of_before_is_read(run: Run) -> None:
    """`source` was what `original` is called now; the fields of today were not there."""
    accuracy, nll = load_accuracy(run), load_token_losses(run)
    old = {"source": accuracy.runtimes["bf16"].model_copy(update={"by_frequency": None}), **accuracy.runtimes}
    with RunWriter(run).stage("validate", {}, {"context": 64}) as log:
        log.outputs += save_accuracy(run, accuracy.model_copy(update={"runtimes": old}), nll | {"source": nll["bf16"]})
    assert list(load_accuracy(run).runtimes) == ["original", *accuracy.runtimes]
    np.testing.assert_array_equal(load_token_losses(run)["original"], nll["bf16"])
    api.report_tables(run.root)
