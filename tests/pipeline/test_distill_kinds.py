"""`fp8q distill` of runs of all kinds: tails, weights alone, experts, a model given in FP8, other families."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import DistillOptions
from fp8q.quantize.learning.document import Distillation

from ..conftest import Texts
from ..mixtures import random_mixture

pytestmark = pytest.mark.slow

#: Kind -> options of calibrating.
KINDS: dict[str, api.CalibrateOptions] = {
    "tails": api.CalibrateOptions(activation_terms="tail", samples=12, seq_len=64),
    "weights alone": api.CalibrateOptions(bf16_input=("*",), samples=12, seq_len=64),
    "learned scales": api.CalibrateOptions(activation_terms=2, samples=12, seq_len=64),
}


def calibrated(checkpoint: Path, texts: Texts, out: Path, options: api.CalibrateOptions) -> Run:
    data = str(texts.calibration), out, str(texts.evaluation)
    return api.calibrate(str(checkpoint), *data, options, api.ExportOptions(graph=False))


def learn_and_hold(run: Run, options: DistillOptions) -> Distillation:
    """Learn, and hold the checkpoint to the codes and scales that were learned."""
    found = api.distill(run.root, options=options)
    assert isinstance(found, Distillation)
    assert found.stopped is None
    assert 0 < found.best.kl < found.start.kl
    stored = load_file(run.distilled).items()
    tensors = [pair for shard in run.model.glob("*.safetensors") for pair in load_file(shard).items()]
    learned = {end: _sorted(each for name, each in stored if name.endswith(end)) for end in (".codes", ".scale")}
    # names of experts, and axes of GPT-2's weights, are others in a checkpoint
    assert torch.equal(learned[".codes"], _sorted(each for _, each in tensors if each.dtype == torch.float8_e4m3fn))
    assert torch.equal(learned[".scale"], _sorted(each for name, each in tensors if name.endswith(".weight_scale")))
    return found


def _sorted(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.float().flatten() for each in tensors]).sort().values


@pytest.mark.parametrize(
    ("kind", "stream"),
    [("tails", False), ("tails", True), ("weights alone", False), ("learned scales", True)],
)
def test_a_run_of_this_kind_learns(
    kind: str, stream: bool, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    run = calibrated(demo_checkpoint, demo_texts, tmp_path / "run", KINDS[kind])
    scales = "learned" if kind == "learned scales" else "fixed"
    learn_and_hold(run, DistillOptions(epochs=2.0, stream=stream, scales=scales))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "stream"), [("qwen2_moe", False), ("mixtral", True)])
def test_experts_learn(name: str, stream: bool, demo_texts: Texts, tmp_path: Path) -> None:
    checkpoint = random_mixture(tmp_path / "checkpoint", name)
    options = api.CalibrateOptions(activation_terms=2, samples=12, seq_len=64, min_expert_tokens=1)
    run = calibrated(checkpoint, demo_texts, tmp_path / "run", options)
    found = learn_and_hold(run, DistillOptions(epochs=2.0, stream=stream, learning_rate=0.003))
    assert found.changed > 0


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_other_families_learn(
    name: str, shared_checkpoint: Callable[[str], Path], demo_texts: Texts, tmp_path: Path
) -> None:
    options = api.CalibrateOptions(activation_terms=2, samples=12, seq_len=64)
    run = calibrated(shared_checkpoint(name), demo_texts, tmp_path / "run", options)
    learn_and_hold(run, DistillOptions(epochs=2.0))


def test_a_model_that_was_given_in_fp8_learns_toward_what_its_codes_mean(
    demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    """Its weights are its original's, so that in two codes next to nothing is left to win, as it is after rounding."""
    options = api.CalibrateOptions(activation_terms=2, samples=12, seq_len=64)
    first = calibrated(demo_checkpoint, demo_texts, tmp_path / "first", options)
    given = Path(shutil.copytree(first.model, tmp_path / "given"))
    run = calibrated(given, demo_texts, tmp_path / "run", options)
    rounded, exact = (api.distill(each.root, options=DistillOptions(epochs=0.2)) for each in (first, run))
    assert exact.stopped is None
    assert 0 < exact.start.kl < 0.1 * rounded.start.kl
