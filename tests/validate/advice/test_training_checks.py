"""The verdicts on a training log, each from numbers that say by hand what is wrong."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fp8q.options import GradientFormat
from fp8q.quantize.training.training_log import COLUMNS, Head, TrainingLog
from fp8q.validate.advice.checkup import Check
from fp8q.validate.advice.training_checks import training_checkup

TENSORS = [f"layers.{layer}.up.{kind}" for layer in (0, 1) for kind in ("input", "weight", "gradient")]
RECORDS = 12


def a_log(
    loss: npt.ArrayLike = np.nan, norm: npt.ArrayLike = np.nan, records: int = RECORDS, **changes: npt.ArrayLike
) -> TrainingLog:
    """A log of two layers in which all is good, but for `changes`: column -> its values [records, tensors]."""
    values = np.zeros((records, len(TENSORS), len(COLUMNS)))
    for column, value in {"amax": 1.0, "history": 1.0, "rms": 0.1, **changes}.items():
        values[:, :, COLUMNS.index(column)] = value
    head = Head(model="Net", every=10, history=4, scaling="delayed", tensors=TENSORS, columns=[*COLUMNS])
    steps = 10 * np.arange(records)
    return TrainingLog(
        Path("training.jsonl"), head, TENSORS, steps, np.broadcast_to(np.asarray(loss, float), records),
        np.broadcast_to(np.asarray(norm, float), records), steps / 10, values,
    )  # fmt: skip


def at(tensor: int, values: npt.ArrayLike, otherwise: float = 0.0) -> npt.NDArray[np.float64]:
    """A column that has `values` in one tensor."""
    column = np.full((RECORDS, len(TENSORS)), otherwise)
    column[:, tensor] = values
    return column


def worst(log: TrainingLog, name: str, gradients: GradientFormat = "e5m2") -> Check:
    """The worst entry of one check."""
    return next(each for each in training_checkup(log, gradients).checks if each.check == name)


def test_a_log_in_which_all_is_good_is_good() -> None:
    found = training_checkup(a_log(loss=np.linspace(5, 2, RECORDS), norm=1.0))
    assert found.verdict == "good"
    assert (found.records, found.first_step, found.last_step) == (12, 0, 110)
    assert {each.verdict for each in found.checks} == {"good"}
    assert len({each.check for each in found.checks}) == 8


def test_without_loss_and_norms_these_are_unknown() -> None:
    log = a_log()
    assert worst(log, "loss").verdict == "unknown"
    assert worst(log, "loss").said == "no loss was given to watch.step()"
    assert worst(log, "gradient_norm").verdict == "unknown"


@pytest.mark.parametrize(("share", "verdict"), [(0.24, "good"), (0.26, "watch"), (0.51, "bad")])
def test_gradients_are_judged_in_the_format_that_is_asked_for(share: float, verdict: str) -> None:
    log = a_log(e4m3_underflow=at(5, share))
    found = worst(log, "underflow", "e4m3")
    assert (found.verdict, found.module) == (verdict, "layers.1.up.gradient")
    assert worst(log, "underflow", "e5m2").verdict == "good"
    if verdict != "good":
        assert found.remedy is not None
        assert found.remedy.startswith("gradients in E5M2")
        assert found.remedy.endswith("A margin makes it worse")


def test_inputs_are_judged_in_e4m3_whatever_gradients_are_in() -> None:
    assert worst(a_log(e5m2_underflow=at(0, 0.9)), "underflow", "e5m2").verdict == "good"
    assert worst(a_log(e4m3_underflow=at(0, 0.9)), "underflow", "e5m2").verdict == "bad"


def test_what_is_lost_counts_at_the_end_and_saturation_at_its_worst_after_the_first_records() -> None:
    early = np.where(np.arange(RECORDS) < 6, 0.5, 0.0)
    assert worst(a_log(e4m3_lost=at(0, early)), "energy_lost").verdict == "good"
    assert worst(a_log(e4m3_lost=at(0, early[::-1])), "energy_lost").verdict == "bad"
    one = np.zeros(RECORDS)
    one[7] = 0.02
    assert worst(a_log(e4m3_saturated=at(0, one)), "saturation").verdict == "bad"
    first = np.zeros(RECORDS)
    first[3] = 0.02  # its history is of three records, and not of four
    assert worst(a_log(e4m3_saturated=at(0, first)), "saturation").verdict == "good"


@pytest.mark.parametrize(("jump", "verdict", "octaves"), [(1.9, "good", 0), (3.0, "watch", 2), (10.0, "bad", 4)])
def test_an_amax_beyond_its_history_is_named_with_its_step(jump: float, verdict: str, octaves: int) -> None:
    amax = np.ones(RECORDS)
    amax[9] = jump
    amax[3] = 100.0  # before the history is full
    found = worst(a_log(amax=at(3, amax, 1.0)), "training_jumps")
    assert (found.verdict, found.module, found.said) == (verdict, "layers.1.up.input", f"{jump:.3g} times, at step 90")
    if octaves:
        assert found.remedy is not None
        assert found.remedy.startswith(f"a margin of {octaves} octaves would hold it")


def test_gradients_that_vanish_are_watched_and_zeros_are_bad() -> None:
    falling = np.geomspace(1, 1e-4, RECORDS)
    assert worst(a_log(amax=at(2, falling, 1.0)), "inverse_scale").verdict == "watch"
    gone = np.where(np.arange(RECORDS) < 3, 1.0, 0.0)
    assert worst(a_log(amax=at(2, gone, 1.0)), "inverse_scale").verdict == "bad"
    never = worst(a_log(amax=at(2, 0.0, 1.0)), "inverse_scale")
    assert (never.verdict, never.said) == ("bad", "zero at the end")


@pytest.mark.parametrize(("end", "verdict"), [(2.3, "good"), (2.5, "watch"), (4.1, "bad")])
def test_a_loss_that_rises_is_a_learning_rate_too_high(end: float, verdict: str) -> None:
    loss = np.concatenate([np.full(6, 2.0), np.full(6, end)])
    assert worst(a_log(loss=loss), "loss").verdict == verdict


def test_numbers_that_are_not_finite_are_bad() -> None:
    loss, norm = np.full(RECORDS, 2.0), np.full(RECORDS, 1.0)
    loss[8] = norm[8] = np.inf
    log = a_log(loss=loss, norm=norm, not_finite=at(4, np.where(np.arange(RECORDS) == 8, 3, 0)))
    assert worst(log, "loss").said == "not finite"
    assert worst(log, "gradient_norm").verdict == "bad"
    found = worst(log, "not_finite")
    assert (found.module, found.said) == ("layers.1.up.weight", "3 at step 80")
    assert found.remedy is not None
    assert found.remedy.startswith("go back to a checkpoint before step 80")


@pytest.mark.parametrize(("peak", "verdict"), [(4.0, "good"), (6.0, "watch"), (60.0, "bad")])
def test_a_gradient_norm_is_compared_with_the_median_before_it(peak: float, verdict: str) -> None:
    norm = np.ones(RECORDS)
    norm[10] = peak
    found = worst(a_log(norm=norm), "gradient_norm")
    assert (found.verdict, found.said) == (verdict, f"{peak:.3g} times, at step 100")


def test_a_short_log_has_no_history_to_judge_by() -> None:
    log = a_log(records=4, norm=1.0)
    assert worst(log, "training_jumps").verdict == "unknown"
    assert worst(log, "gradient_norm").verdict == "unknown"
    assert worst(log, "saturation").verdict == "unknown"
