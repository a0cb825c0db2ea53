"""Learning weights of a small model: better or unchanged, the same after a kill, and ended by a NaN."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainerState

from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.quantize.learning.divergence import forward_kl
from fp8q.quantize.learning.document import Moment
from fp8q.quantize.learning.linear import LearnedLinear, weight_steps
from fp8q.quantize.learning.progress import StepPace, moments_of
from fp8q.quantize.learning.training import (
    Listener,
    LossIsNotFiniteError,
    Schedule,
    begin_again,
    last_checkpoint,
    learn,
)
from fp8q.quantize.reference.linear import replace_linears
from fp8q.quantize.weights.channels import QuantizedWeight, quantize_weight
from fp8q.quantize.weights.sequential import weight_rows

WINDOWS: npt.NDArray[np.int64] = np.random.default_rng(0).integers(3, 60, (30, 24))
TEXT = WINDOWS[:24], WINDOWS[24:]
SCHEDULE = Schedule(epochs=4, batch_size=4, learning_rate=0.01, seed=0)
#: From 16 windows it makes the others far worse.
TOO_LARGE = Schedule(epochs=6, batch_size=4, learning_rate=0.01, seed=0)


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return build_models()


def build_models(learn_scales: bool = False) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A small random Llama, and the same with learned layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    teacher = LlamaForCausalLM(config).eval().requires_grad_(False)
    student = deepcopy(teacher)
    layers = {}
    for name, module in observed_gemms(student).items():
        rounded = quantize_weight(weight_rows(module), "amax")
        assert isinstance(rounded, QuantizedWeight)
        layers[name] = LearnedLinear(rounded.codes, rounded.scale, None, None, learn_scales)
    replace_linears(student, layers)
    return teacher, student


def train(
    models: tuple[PreTrainedModel, PreTrainedModel],
    folder: Path,
    advance: Callable[[int], None] = lambda steps: None,
    schedule: Schedule = SCHEDULE,
    text: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = TEXT,
) -> list[Moment]:
    return learn(models, text, schedule, folder, Listener(advance, lambda ids: ", first by nothing"))


def codes(student: PreTrainedModel) -> dict[str, bytes]:
    layers = {name: each for name, each in student.named_modules() if isinstance(each, LearnedLinear)}
    assert layers
    return {name: each.learned()[0].view(torch.uint8).numpy().tobytes() for name, each in layers.items()}


def loss(models: tuple[PreTrainedModel, PreTrainedModel]) -> float:
    ids = torch.from_numpy(TEXT[1])
    with torch.no_grad():
        return float(forward_kl(models[0](ids).logits, models[1](ids).logits))


def test_the_weights_of_the_best_moment_stay(models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path) -> None:
    begun, steps = loss(models), list[int]()
    moments = train(models, tmp_path, steps.append)
    best = min(moments, key=lambda moment: moment.kl)
    assert sum(steps) == 24
    assert moments[0].step == 0
    assert moments[0].kl == pytest.approx(begun, rel=1e-3)
    assert best.step > 0
    assert best.kl < 0.95 * begun
    assert loss(models) == pytest.approx(best.kl, rel=1e-3)


def test_weights_of_a_moment_before_the_last_stay(
    models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path
) -> None:
    """Learned from eight windows twelve times over, the others get better first, and then a little worse."""
    schedule = Schedule(epochs=12, batch_size=4, learning_rate=0.003, seed=0)
    moments = train(models, tmp_path, schedule=schedule, text=(WINDOWS[:8], WINDOWS[24:]))
    best = min(moments, key=lambda moment: moment.kl)
    assert 0 < best.step < moments[-1].step
    assert best.kl < 0.98 * moments[-1].kl
    assert loss(models) == pytest.approx(best.kl, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [None, 5, 12], ids=["whole", "killed in the first", "killed in the second"])
def test_steps_that_are_too_large_are_made_smaller(
    models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path, kill_at: int | None
) -> None:
    """Of 24 steps at this rate four make it better and six far worse; at a third of it, it gets better."""

    class Killed(BaseException):
        """A kill."""

    taken, anew = list[int](), list[float]()

    def train_once(pair: tuple[PreTrainedModel, PreTrainedModel], folder: Path, killed: bool) -> list[Moment]:
        def step(steps: int) -> None:
            taken.append(steps)
            if killed and sum(taken) == kill_at:
                raise Killed

        listener = Listener(step, lambda ids: "", anew=anew.append)
        return learn(pair, (WINDOWS[:16], WINDOWS[24:]), TOO_LARGE, folder, listener)

    begun, again = loss(models), deepcopy(models)
    whole = train_once(models, tmp_path / "whole", killed=False)
    assert anew == [pytest.approx(0.01 / 3)]
    assert sum(taken) == 24
    best = min(moment.kl for moment in whole)
    assert best < 0.9 * begun
    assert loss(models) == pytest.approx(best, rel=1e-3)
    if kill_at is not None:
        taken.clear()
        with pytest.raises(Killed):
            train_once(deepcopy(again), tmp_path / "killed", killed=True)
        assert train_once(again, tmp_path / "killed", killed=False) == whole
        assert codes(again[1]) == codes(models[1])


@pytest.mark.slow
def test_the_optimizer_of_a_training_that_made_it_worse_is_gone_when_the_next_begins(
    models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path
) -> None:
    made, there = list["weakref.ref[torch.optim.Optimizer]"](), list[bool]()

    def steps(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        optimizer = weight_steps(model, learning_rate)
        made.append(weakref.ref(optimizer))
        return optimizer

    schedule = replace(TOO_LARGE, optimizer=steps)
    listener = Listener(lambda steps: None, lambda ids: "", anew=lambda rate: there.append(made[0]() is not None))
    learn(models, (WINDOWS[:16], WINDOWS[24:]), schedule, tmp_path, listener)
    assert there == [False]


@pytest.mark.slow
def test_what_gets_worse_changes_nothing(models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path) -> None:
    before = codes(models[1])
    moments = train(models, tmp_path, schedule=Schedule(epochs=1, batch_size=4, learning_rate=50.0, seed=0))
    assert moments[0].kl == min(moment.kl for moment in moments)
    assert codes(models[1]) == before


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_bytes(
    models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path
) -> None:
    class Killed(BaseException):
        """A kill."""

    taken, again = list[int](), deepcopy(models)

    def die(steps: int) -> None:
        taken.append(steps)
        if sum(taken) == 14:
            raise Killed

    whole = train(models, tmp_path / "whole")
    with pytest.raises(Killed):
        train(again, tmp_path / "killed", die)
    fresh, resumed = deepcopy(again), list[int]()
    begin_again(fresh[1])
    assert train(fresh, tmp_path / "killed", resumed.append) == whole
    assert sum(resumed) == 24  # told of the steps before the kill too, once
    assert len(resumed) < 24
    assert codes(fresh[1]) == codes(models[1])


@pytest.mark.slow
def test_a_training_whose_folder_was_moved_since_keeps_its_best_moment(
    models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path
) -> None:
    """A kill after the last step leaves all to read: the Trainer names its best checkpoint by the whole path."""
    again, schedule = deepcopy(models), replace(SCHEDULE, epochs=12, learning_rate=0.003)
    text = WINDOWS[:8], WINDOWS[24:]  # some way before the last step is the best
    whole = train(models, tmp_path / "before", schedule=schedule, text=text)
    (tmp_path / "before").rename(tmp_path / "moved")
    assert train(again, tmp_path / "moved", schedule=schedule, text=text) == whole
    assert codes(again[1]) == codes(models[1])


def test_of_a_step_that_was_scored_twice_the_first_counts() -> None:
    """A training that goes on scores the step of its checkpoint again, and the Trainer chose its best before that."""
    scored = [(0, 3.0), (4, 1.0), (4, 1.5), (8, 1.2)]
    state = TrainerState(log_history=[{"step": step, "eval_loss": kl} for step, kl in scored])
    assert [(moment.step, moment.kl) for moment in moments_of(state)] == [(0, 3.0), (4, 1.0), (8, 1.2)]


def test_a_loss_that_is_no_number_ends_it(models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path) -> None:
    bad = WINDOWS.copy()
    bad[:24, 3] = 63
    for model in models:
        with torch.no_grad():
            model.get_input_embeddings().weight[63] = float("nan")  # type: ignore[operator]
    before = codes(models[1])
    with pytest.raises(LossIsNotFiniteError) as raised:
        train(models, tmp_path, text=(bad[:24], bad[24:]))
    assert str(raised.value) == "the loss is nan at step 1 of 24, first by nothing"
    assert [moment.step for moment in raised.value.moments] == [0]
    assert codes(models[1]) == before


def test_a_checkpoint_that_a_kill_left_half_written_is_passed_over(tmp_path: Path) -> None:
    for step in (8, 16, 24):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_checkpoint(tmp_path) is None
    for step in (8, 16):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert last_checkpoint(tmp_path) == "checkpoint-16"


def test_a_checkpoint_of_another_number_of_ranks_is_passed_over(tmp_path: Path) -> None:
    for step, ranks in ((8, 2), (16, 4)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in (f"rank-0-of-{ranks}-model.safetensors", "trainer_state.json"):
            (tmp_path / f"checkpoint-{step}" / name).touch()
    assert last_checkpoint(tmp_path, "rank-0-of-2-model.safetensors") == "checkpoint-8"
    assert last_checkpoint(tmp_path, "model.safetensors") is None


def test_each_held_out_divergence_is_told(models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path) -> None:
    scored = list[Moment]()
    listener = Listener(lambda steps: None, lambda ids: "", scored=scored.append)
    moments = learn(models, TEXT, SCHEDULE, tmp_path, listener)
    assert scored[-len(moments) :] == moments


@pytest.mark.slow
def test_the_pace_is_told_once_by_a_real_step(models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path) -> None:
    """Of 24 steps, scored every third, two are done when it is told, and the eight evaluations are to come."""
    told = list[StepPace]()
    listener = Listener(lambda steps: None, lambda ids: "", told.append)
    learn(models, TEXT, SCHEDULE, tmp_path, listener)
    (pace,) = told
    assert (pace.steps, pace.evaluations) == (22, 8)
    assert 0 < pace.step_seconds < 60
    assert 0 < pace.evaluation_seconds < 60
    assert StepPace(2.0, 5.0, steps=22, evaluations=8).seconds_left == 22 * 2.0 + 8 * 5.0
