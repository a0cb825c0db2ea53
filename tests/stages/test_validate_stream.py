"""`fp8q validate --stream`: one decoder layer of each runtime in memory, and the losses of the whole models, bit for
bit on a CPU.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8q import api
from fp8q.calibrate.model.decoder import NoChainError
from fp8q.calibrate.model.memory import weight_bytes
from fp8q.core.errors import InputError
from fp8q.core.output_folder import WorkFolder
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.reference.layer_chain import ReferenceChain
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared.sources import source_of
from fp8q.stages.validate import validate
from fp8q.validate.accuracy.document import load_token_losses
from fp8q.validate.accuracy.runtimes import layer_chain
from fp8q.validate.pair.streamed import PairStream

from ..conftest import MadeOnce

STORY = "Once upon a time there was a little girl who had a red ball. " * 40
IN_MEMORY = ("bf16", "fp32", "reference")
#: Options of scales: an FP8 cache, two codes an activation with groups beside them, weights alone.
FORMS: dict[str, dict[str, Any]] = {
    "llama": {"kv_cache": "fp8", "form": ("two", "*.down_proj=dynamic")},
    "mixtral": {},
    "gemma": {"form": ("bf16",), "kv_cache": "fp8", "kv_scale": "head"},
    "qwen2": {"weight_scale": "tensor"},
    "opt": {"kv_cache": "fp8"},
}


class Killed(BaseException):
    """A process that ends here."""


@pytest.fixture
def calibrated(shared_checkpoint: Callable[[str], Path], made_once: MadeOnce, tmp_path: Path) -> Callable[[str], Run]:
    """`calibrated("llama")`: a run of that checkpoint without a graph, in its form of `FORMS`, made once and copied."""

    def copied(name: str) -> Run:
        checkpoint = str(shared_checkpoint(name))

        def make(folder: Path) -> None:
            (text := folder / "text.txt").write_text(STORY, encoding="utf-8")
            options = api.CalibrateOptions(samples=4, seq_len=32, allow_overlap=True, **FORMS[name])
            api.calibrate(checkpoint, str(text), folder / "run", str(text), options, api.ExportOptions(graph=False))

        return Run(Path(shutil.copytree(made_once(f"validate-stream {name}", make) / "run", tmp_path / name)))

    return copied


@pytest.fixture
def report() -> Notes:
    """A reporter that keeps its notes."""
    return Notes(SILENT)


def losses(run: Run, adapter: str | None = None, **options: Any) -> dict[str, Any]:
    """The losses of all tokens of `run`, evaluated once more on windows of 32 tokens, with that adapter on."""
    other = Run(Path(shutil.copytree(run.root, run.root.with_name(f"{run.root.name} {len(options)}"))))
    api.validate(other.root, options=api.ValidateOptions(context=32, allow_overlap=True, max_tokens=600, **options))
    return load_token_losses(other, adapter)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in FORMS if name != "llama")]
)
def test_the_losses_are_those_of_the_models_in_memory(name: str, calibrated: Callable[[str], Run]) -> None:
    run = calibrated(name)
    one_term = ("one-term",) if name == "llama" else ()
    whole = losses(run, runtimes=(*IN_MEMORY, *one_term), stream=False, max_kl=99.0)
    streamed = losses(run, runtimes=(*IN_MEMORY, *one_term), stream=True)
    assert whole.keys() == streamed.keys() == {*IN_MEMORY, *one_term}
    assert all(np.array_equal(whole[name], streamed[name], equal_nan=True) for name in whole)
    assert not np.array_equal(whole["bf16"], whole["reference"], equal_nan=True)


def test_the_float_model_goes_through_its_layers_once_for_two_forms(
    calibrated: Callable[[str], Run], report: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = calibrated("llama")
    options = api.ValidateOptions(
        ("bf16", "reference"), context=32, allow_overlap=True, max_tokens=600, max_kl=99.0, stream=True
    )
    lasting = WorkFolder(run.root, "float-model")
    validate(run, report, None, options, lasting)
    api.scales(run.root, form=("dynamic",))
    alone = Run(Path(shutil.copytree(run.root, run.root.with_name("alone"))))
    chains: list[str] = []

    def noting(name: str, asked: Any) -> Any:
        chains.append(name)
        return layer_chain(name, asked)

    monkeypatch.setattr("fp8q.stages.validate_runtimes.layer_chain", noting)
    validate(run, report, None, options, lasting)
    assert chains == ["reference"]
    validate(alone, report, None, options)
    assert chains == ["reference", "bf16", "reference"]
    for file in ("accuracy.json", "tokens.npz", "top_logits.npz"):
        assert (run.root / file).read_bytes() == (alone.root / file).read_bytes(), file


@pytest.mark.slow
def test_with_an_adapter_on_too(
    shared_checkpoint: Callable[[str], Path], made_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = shared_checkpoint("llama")
    made_adapter(checkpoint, tmp_path / "style", 0.2, r=4, target_modules=["q_proj", "down_proj"])
    (text := tmp_path / "text.txt").write_text(STORY, encoding="utf-8")
    options = api.CalibrateOptions(
        samples=4, seq_len=32, allow_overlap=True, adapter=(tmp_path / "style",), adapter_mode="beside"
    )
    graph = api.ExportOptions(graph=False)
    run = api.calibrate(str(checkpoint), str(text), tmp_path / "run", str(text), options, graph)
    names = ("bf16", "reference")
    whole = losses(run, "style", runtimes=names, stream=False, max_kl=99.0)
    streamed = losses(run, "style", runtimes=names, stream=True)
    assert set(names) == whole.keys() == streamed.keys()
    assert all(np.array_equal(whole[name], streamed[name], equal_nan=True) for name in whole)


def test_without_memory_for_a_whole_model_it_goes_by_layers_and_says_so(
    calibrated: Callable[[str], Run], report: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No whole model is loaded then; FP32 takes twice the bytes of BF16, which would fit."""
    run = calibrated("mixtral")
    weights = weight_bytes(source_of(run))
    monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device: int(weights / 0.8) + 1000)
    monkeypatch.setattr("fp8q.validate.accuracy.runtimes.load_model", None)
    options = api.ValidateOptions(("bf16", "fp32"), context=32, allow_overlap=True, max_tokens=600)
    api.validate(run.root, options=options, progress=report)
    size = f"{2 * weights / 1e9:,.3g} GB"
    (line,) = [line for line in report.lines if "--stream" in line]
    assert line.startswith(f"--stream: fp32 takes {size}, and 80% of the memory available is ")
    assert line.endswith(": validating layer by layer")


def test_a_part_of_the_reference_has_its_own_weights_alone(calibrated: Callable[[str], Run]) -> None:
    run = calibrated("llama")
    load = partial(load_reference, run.model, "fast", torch.bfloat16, "cpu", None)
    chain = ReferenceChain(run.model, load, torch.bfloat16, "cpu")
    with chain.open_layer(1) as model:
        filled = {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}
        filled |= {name for name, value in model.named_parameters() if not value.is_meta}
    assert {chain.layers.index(name) for name in filled} == {1}
    with chain.open_outside() as model:
        outside = {name for name, value in model.named_parameters() if not value.is_meta}
    assert {chain.layers.index(name) for name in outside} == {None}
    assert "model.embed_tokens.weight" in outside


def test_killed_it_goes_on_at_the_layer_it_reached(
    calibrated: Callable[[str], Run], report: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = calibrated("mixtral")
    layer = PairStream._layer

    def stopping(self: PairStream, step: int) -> None:
        if step == 2:
            raise Killed
        layer(self, step)

    options = api.ValidateOptions(("bf16", "reference"), context=32, allow_overlap=True, stream=True, max_tokens=600)
    with monkeypatch.context() as once:
        once.setattr(PairStream, "_layer", stopping)
        with pytest.raises(Killed):
            api.validate(run.root, options=options)
    assert (run.root / ".validate.work" / "layers" / "00001.json").is_file()
    api.validate(run.root, options=options, progress=report)
    assert "going on at decoder layer 2 of 4, where an earlier call stopped" in report.lines
    assert not (run.root / ".validate.work").exists()


def no_chain(calls: object, layers: object, source: Any) -> None:
    raise NoChainError(source, "changes the hidden states between layer 0 and layer 1")


def test_a_model_that_is_no_chain_goes_as_a_whole_unless_layers_are_asked_for(
    calibrated: Callable[[str], Run], report: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = calibrated("mixtral")
    monkeypatch.setattr("fp8q.calibrate.measure.chain.common_output", no_chain)
    monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device: 1000)
    options = api.ValidateOptions(("bf16", "reference"), context=32, allow_overlap=True, max_tokens=600)
    with pytest.raises(InputError) as refused:
        api.validate(run.root, options=options.replaced(stream=True))
    reason = "MixtralForCausalLM changes the hidden states between layer 0 and layer 1"
    assert str(refused.value).endswith(
        f": {reason}, so it cannot be validated layer by layer; give --no-stream, and memory for whole models"
    )
    assert set(api.validate(run.root, options=options, progress=report).runtimes) == {"bf16", "reference"}
    assert report.lines[-1] == f"{reason}, so it cannot go layer by layer: validating with whole models"


@pytest.mark.parametrize(
    ("options", "whole"), [({"as_served": 8}, "--as-served 8"), ({"accumulator": "fp22"}, "--accumulator")]
)
def test_what_runs_the_whole_model_is_not_asked_for_beside_layers(
    options: dict[str, Any], whole: str, calibrated: Callable[[str], Run]
) -> None:
    with pytest.raises(InputError) as refused:
        losses(calibrated("llama"), stream=True, **options)
    assert str(refused.value) == (
        f"--stream: runs whole windows through a layer, and {whole} the whole model; leave one out"
    )
