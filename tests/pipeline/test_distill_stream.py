"""`fp8q distill --stream` on the demo: each layer learns, a killed call goes on, and only what is better is written."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8q import api
from fp8q.calibrate.model.source import load_model
from fp8q.core import reporter
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import DistillOptions
from fp8q.quantize.learning.blocks import BlockLearning, LearnedBlocks
from fp8q.quantize.learning.divergence import forward_kl
from fp8q.quantize.learning.document import Distillation
from fp8q.quantize.learning.linear import LearnedLinear, student_of
from fp8q.quantize.learning.progress import Progress
from fp8q.quantize.reference.fp8_model import open_codes
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages import distill as stage
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of

pytestmark = pytest.mark.slow

OPTIONS = DistillOptions(epochs=2.0, learning_rate=0.003, stream=True)
#: The same, and end to end after it.
WHOLE = replace(OPTIONS, end_to_end=True)


@pytest.fixture
def copied(begun: Run, tmp_path: Path) -> Callable[[str], Run]:
    """`copied("name")`: a copy of the run to learn in."""
    return lambda name: Run(Path(shutil.copytree(begun.root, tmp_path / name)))


@pytest.fixture(scope="module")
def learned(begun: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Distillation]:
    """A copy of the run that has learned, and what it found."""
    run = Run(Path(shutil.copytree(begun.root, tmp_path_factory.mktemp("learned") / "run")))
    return run, distilled(run, OPTIONS)


def distilled(run: Run, options: DistillOptions) -> Distillation:
    found = api.distill(run.root, options=options)
    assert isinstance(found, Distillation)
    return found


def tensors(run: Run) -> dict[str, torch.Tensor]:
    (shard,) = run.model.glob("*.safetensors")
    return load_file(shard)


def divergence(run: Run) -> float:
    """KL of the run's model, all of it in memory, on the windows that learning holds out."""
    source, held_out = source_of(run), load_tokens(run, run.calibration)[9::10]
    teacher, other = (load_model(source, torch.float32) for _ in range(2))
    stored = open_codes(run.model, "exact", torch.float32)
    student, _ = student_of(other, stored, load_scales(run).activations, LearnedLinear)
    ids = torch.from_numpy(held_out.copy())
    with torch.no_grad():
        return float(forward_kl(teacher(input_ids=ids).logits, student(input_ids=ids).logits))


def test_every_layer_gets_better_and_so_does_the_model(begun: Run, learned: tuple[Run, Distillation]) -> None:
    run, found = learned
    assert found.blocks is not None
    assert [loss.layer for loss in found.blocks] == [0, 1, 2, 3]
    for loss in found.blocks:
        assert loss.step > 0
        assert loss.after < 0.99 * loss.before
        assert 0 < loss.changed < loss.codes
    assert found.steps == 4 * 18  # 36 windows, 4 a step, twice
    assert found.start.kl == pytest.approx(divergence(begun), rel=1e-3)
    assert found.best.kl == pytest.approx(divergence(run), rel=1e-3)
    assert found.best.kl < found.start.kl


def test_the_checkpoint_has_the_codes_and_the_scales_stay(begun: Run, learned: tuple[Run, Distillation]) -> None:
    run, found = learned
    stored, before, after = load_file(run.distilled), tensors(begun), tensors(run)
    changed = 0
    for name, tensor in after.items():
        if tensor.dtype == torch.float8_e4m3fn:
            assert torch.equal(
                stored[f"{name.removesuffix('.weight')}.codes"].view(torch.uint8), tensor.view(torch.uint8)
            )
            changed += int((tensor.float() != before[name].float()).sum())
        else:
            assert torch.equal(tensor, before[name]), name
    assert found.blocks is not None
    assert changed == sum(loss.changed for loss in found.blocks)
    assert found.changed == pytest.approx(changed / sum(loss.codes for loss in found.blocks))
    assert not any(path.name.endswith(".work") for path in run.root.iterdir())


def test_progress_says_what_the_last_layer_and_the_whole_model_came_to(
    copied: Callable[[str], Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "EVERY_S", 0.05)
    with caplog.at_level("INFO", logger="fp8q"):
        api.distill(copied("told").root, options=replace(WHOLE, epochs=1.0))
    assert any(
        re.match(r"Learning 4 layers, one by one, layer 1: held-out error -\d+%: ", line) for line in caplog.messages
    )
    assert any(re.match(r"Learning weights, held-out KL \d\.\d{3}e-04 nats: ", line) for line in caplog.messages)


class Killed(BaseException):
    """Stands for SIGKILL where the test must go on: like it, nothing of ours catches it."""


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_killed_call_goes_on_at_its_layer_to_the_same_bytes(
    at: int, copied: Callable[[str], Run], learned: tuple[Run, Distillation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 stops as the first layer has learned but nothing says so, 4 before the codes of all layers are one file."""
    run, begun = copied("killed"), list[int]()
    add, layer = LearnedBlocks.add, BlockLearning._layer

    def stopped(*arguments: Any, **named: Any) -> None:
        raise Killed

    def stopping(self: LearnedBlocks, *arguments: Any) -> None:
        if len(self.losses) == at:
            raise Killed
        add(self, *arguments)

    def counted(self: BlockLearning, index: int, *arguments: Any) -> None:
        begun.append(index)
        layer(self, index, *arguments)

    with monkeypatch.context() as once:
        if at == 4:
            once.setattr(LearnedBlocks, "save_codes", stopped)
        else:
            once.setattr(LearnedBlocks, "add", stopping)
        with pytest.raises(Killed):
            api.distill(run.root, options=OPTIONS)
    monkeypatch.setattr(BlockLearning, "_layer", counted)
    found = api.distill(run.root, options=OPTIONS)
    assert begun == [*range(at, 4)]
    assert found.model_copy(update={"seconds": 0}) == learned[1].model_copy(update={"seconds": 0})
    assert run.distilled.read_bytes() == learned[0].distilled.read_bytes()


@pytest.fixture(scope="module")
def went_on(begun: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Distillation]:
    """A copy of the run whose layers have learned, and then the whole model, and what it found."""
    run = Run(Path(shutil.copytree(begun.root, tmp_path_factory.mktemp("whole") / "run")))
    return run, distilled(run, WHOLE)


def test_the_whole_model_goes_on_from_what_its_layers_learned(
    begun: Run, learned: tuple[Run, Distillation], went_on: tuple[Run, Distillation]
) -> None:
    (_, layers), (run, found) = learned, went_on
    assert found.blocks == layers.blocks
    assert found.start == layers.start
    assert found.moments[1].step == layers.steps
    assert found.moments[1].kl == pytest.approx(layers.best.kl, rel=1e-3)
    assert found.steps == layers.steps + 18
    assert layers.steps < found.best.step <= found.steps
    assert found.best.kl < 0.98 * layers.best.kl
    assert found.best.kl == pytest.approx(divergence(run), rel=1e-3)
    before, after = tensors(begun), tensors(run)
    names = [name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn]
    changed = sum(int((after[name].float() != before[name].float()).sum()) for name in names)
    assert found.changed == pytest.approx(changed / sum(after[name].numel() for name in names))


def test_the_whole_model_begins_as_it_was_where_its_layers_made_it_no_better(
    begun: Run, copied: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the divergence before and that after the layers have learned are taken for each other."""
    measured, run = BlockLearning.divergences, copied("worse")
    monkeypatch.setattr(BlockLearning, "divergences", lambda self: measured(self)[::-1])
    found = distilled(run, replace(WHOLE, epochs=1.0))
    assert found.blocks is not None
    assert all(loss.changed for loss in found.blocks)
    assert found.start.kl == pytest.approx(divergence(begun), rel=1e-3)
    assert found.moments[1].step == 4 * 9 + 1
    assert found.best.kl == pytest.approx(divergence(run), rel=1e-3)


@pytest.mark.parametrize("at", [3, 12], ids=["before its first moment", "after some"])
def test_a_killed_whole_model_goes_on_to_the_same_bytes(
    at: int, copied: Callable[[str], Run], went_on: tuple[Run, Distillation], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step, taken = copied("killed"), Progress.on_step_end, list[int]()

    def stopping(self: Progress, *arguments: Any, **named: Any) -> None:
        taken.append(1)
        if len(taken) == at:
            raise Killed
        step(self, *arguments, **named)

    with monkeypatch.context() as once:
        once.setattr(Progress, "on_step_end", stopping)
        with pytest.raises(Killed):
            api.distill(run.root, options=WHOLE)
    found = api.distill(run.root, options=WHOLE)
    assert found.model_copy(update={"seconds": 0}) == went_on[1].model_copy(update={"seconds": 0})
    assert run.distilled.read_bytes() == went_on[0].distilled.read_bytes()


def test_the_whole_model_goes_on_after_its_layers_only() -> None:
    with pytest.raises(InputError, match=r"^--end-to-end: comes after --stream, without which all is learned so"):
        DistillOptions(end_to_end=True)
    with pytest.raises(InputError, match=r"^--watch 10: is for learning end to end.* or let --end-to-end follow$"):
        DistillOptions(stream=True, watch=10)
    assert DistillOptions(stream=True, end_to_end=True, watch=10).watch == 10


def test_where_nothing_gets_better_nothing_changes(begun: Run, copied: Callable[[str], Run]) -> None:
    run = copied("worse")
    found = distilled(run, DistillOptions(epochs=0.5, learning_rate=1e4, stream=True))
    assert found.blocks is not None
    assert {loss.step for loss in found.blocks} == {0}
    assert found.best == found.start
    assert found.conclusion.startswith("nothing better was found in 16 steps: the held-out KL is ")
    assert not run.distilled.exists()
    before, after = tensors(begun), tensors(run)
    assert all(torch.equal(tensor.float(), before[name].float()) for name, tensor in after.items())


def test_a_model_too_large_for_memory_is_told_to_stream(
    copied: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "beyond", lambda size, ranks: "and 80% of the memory available is 0.001 GB")
    run = copied("large")
    with pytest.raises(InputError) as refused:
        api.distill(run.root)
    assert str(refused.value).endswith(
        "checkpoint: learning its weights takes 0.103 GB, and 80% of the memory available is 0.001 GB; --stream "
        "learns weights layer by layer, and --shard shares them between the ranks of torchrun"
    )
    with pytest.raises(InputError, match=r"is 0.001 GB; leave --end-to-end out$"):
        api.distill(run.root, options=WHOLE)


@pytest.mark.parametrize(
    ("free", "message"),
    [
        (-1, r" GB, too much; --stream learns weights"),
        (0, r" GB, 0\.0\d+ GB of it for the logits of a step, too much; --batch-size 1 takes fewer windows a step$"),
    ],
)
def test_a_step_whose_logits_are_too_large_is_told_to_take_fewer_windows(
    copied: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, free: int, message: str
) -> None:
    run, options = copied("logits"), DistillOptions(batch_size=4)
    sizes = list[int]()

    def any_is_too_much(size: int, ranks: int) -> str:
        sizes.append(size)
        return "too much"

    monkeypatch.setattr(stage, "beyond", any_is_too_much)
    with pytest.raises(InputError):
        api.distill(run.root, options=options)
    of_four, of_one = sizes
    assert of_four > of_one
    monkeypatch.setattr(stage, "beyond", lambda size, ranks: "too much" if size > of_one + free else "")
    with pytest.raises(InputError, match=message):
        api.distill(run.root, options=options)
