"""Judge a training log: the checklist of FP8 training, each verdict from the numbers of the exact histograms.

Inputs and weights are judged in E4M3, gradients in E5M2 or, where that is asked, in E4M3 too. Shares are those of a
tensor's worst record with a full history, but underflow and lost energy are means over the last quarter of the
records: they belong to a tensor's distribution and not to one batch. Limits, each with its reason, are in `criteria`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ...core.columns import magnitude, share
from ...core.files import FirstSchema, Strict
from ...options import GradientFormat
from ...quantize.training.training_log import KINDS, Kind, TrainingLog
from .checkup import Check, graded, unknown, worst_first
from .criteria import (
    ENERGY_LOST,
    GRADIENT_NORM,
    LOSS,
    NOT_FINITE,
    SATURATION,
    TRAINING_JUMPS,
    UNDERFLOW,
    VANISHING,
    Criterion,
)

#: Records before the first that is judged by a median: a model's first steps are like none after them.
WARM_UP = 4
#: Records of the median that a gradient norm is compared with, and of a loss.
NORM_RECORDS = 16
LOSS_RECORDS = 5
Floats = npt.NDArray[np.float64]


class TrainingCheckup(Strict):
    """The result of `fp8q inspect LOG` on a training log: all checks, the worst first."""

    schema_: FirstSchema = 1
    model: str
    records: int
    first_step: int
    last_step: int
    gradients: GradientFormat
    checks: list[Check]

    @property
    def verdict(self) -> str:
        """The worst of all verdicts."""
        return self.checks[0].verdict


@dataclass(frozen=True)
class TrainingInspection:
    """A training log, and the checklist's verdicts."""

    log: TrainingLog
    checkup: TrainingCheckup


def format_of(kind: Kind, gradients: GradientFormat) -> str:
    """The format that a tensor is judged in."""
    return gradients if kind == "gradient" else "e4m3"


def training_checkup(log: TrainingLog, gradients: GradientFormat = "e5m2") -> TrainingCheckup:
    """Judge `log`, with gradients in the format `gradients`."""
    checks = [
        *_not_finite(log),
        *_loss(log),
        *_gradient_norm(log),
        *_of_tensors(log, gradients, "saturated", SATURATION, partial(_worst, first=_settled(log)), _saturation_remedy),
        *_of_tensors(log, gradients, "underflow", UNDERFLOW, _late_mean, _underflow_remedy),
        *_of_tensors(log, gradients, "lost", ENERGY_LOST, _late_mean, _underflow_remedy),
        *_jumps(log),
        *_vanishing(log),
    ]
    return TrainingCheckup(
        model=log.head.model, records=len(log.steps), first_step=int(log.steps[0]), last_step=int(log.steps[-1]),
        gradients=gradients, checks=worst_first(checks),
    )  # fmt: skip


def shares(log: TrainingLog, gradients: GradientFormat, name: str) -> Floats:
    """The share `name` (saturated, underflow, lost) of each tensor in its format, float64 [records, tensors]."""
    by_tensor = np.full(log.values.shape[:2], np.nan)
    for kind in KINDS:
        of_kind = log.of_kind(kind)
        by_tensor[:, of_kind] = log.column(f"{format_of(kind, gradients)}_{name}")[:, of_kind]
    return by_tensor


def _of_tensors(
    log: TrainingLog, gradients: GradientFormat, name: str, criterion: Criterion,
    of_records: Callable[[Floats], float], remedy: Callable[[str, float], str],
) -> list[Check]:  # fmt: skip
    """A check of one share of every tensor."""
    by_tensor = shares(log, gradients, name)
    values = [(tensor, of_records(by_tensor[:, index])) for index, tensor in enumerate(log.tensors)]
    return graded(criterion, [pair for pair in values if not np.isnan(pair[1])], share, remedy)


def _settled(log: TrainingLog) -> int:
    """The first record whose history is full: gradients of a new model grow tenfold within the first ones."""
    return max(WARM_UP, log.head.history)


def _worst(values: Floats, first: int) -> float:
    """The largest value from the record `first` on; NaN where there is none."""
    later = values[first:]
    if len(later) and not np.isnan(later).all():
        return float(np.nanmax(later))
    return np.nan


def _late_mean(values: Floats) -> float:
    """The mean over the last quarter of the records that have a value."""
    there = values[~np.isnan(values)]
    if len(there):
        return float(there[-max(1, len(there) // 4) :].mean())
    return np.nan


def _saturation_remedy(tensor: str, value: float) -> str:
    return (
        "scale by the tensor's own amax (Float8CurrentScaling), or keep a margin (DelayedScaling(margin=1) holds twice "
        "the history's amax)"
    )


def _underflow_remedy(tensor: str, value: float) -> str:
    if tensor.endswith(".gradient"):
        return (
            "gradients in E5M2 (Format.HYBRID), which reaches 14 octaves lower; in E5M2 already, a scale for each "
            "block (MXFP8BlockScaling) or this layer in BF16. A margin makes it worse"
        )
    return "a scale for each block (MXFP8BlockScaling), or this layer in BF16; a margin makes it worse"


def _of_the_run(criterion: Criterion, value: float, said: Callable[[float], str], remedy: str) -> list[Check]:
    """A check of the run as a whole."""
    (check,) = graded(criterion, [("", value)], said, lambda *_: remedy)
    return [check.model_copy(update={"module": None, "by_depth": []})]


def _not_finite(log: TrainingLog) -> list[Check]:
    """Name the tensors with NaN or infinity, by the record in which the first of them occurs."""
    counts = np.nan_to_num(log.column("not_finite"))
    bad = np.flatnonzero(counts.any(axis=1))
    if not len(bad):
        return _of_the_run(NOT_FINITE, 0.0, lambda _: "none", "")
    first = int(bad[0])
    values = [(tensor, float(counts[first, index])) for index, tensor in enumerate(log.tensors) if counts[first, index]]
    return graded(
        NOT_FINITE,
        values,
        lambda value: f"{value:,.0f} at step {log.steps[first]}",
        lambda *_: f"go back to a checkpoint before step {log.steps[first]}, with a lower learning rate or clipping",
    )


def _loss(log: TrainingLog) -> list[Check]:
    """Compare the last loss with the lowest before it."""
    loss = log.loss[~np.isnan(log.loss)]
    if not len(loss):
        return [unknown(LOSS, LOSS.nothing)]
    records = min(LOSS_RECORDS, len(loss))
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(loss, records), axis=1)
    lowest = float(smooth.min())
    ratio = float(smooth[-1]) / lowest if lowest > 0 else (1.0 if smooth[-1] <= lowest else np.inf)
    return _of_the_run(
        LOSS,
        np.nan if np.isinf(loss).any() else ratio,
        lambda _: "not finite" if np.isinf(loss).any() else f"{smooth[-1]:.4g} after {lowest:.4g}",
        "a lower learning rate, or a longer warm-up; go back to the checkpoint of the lowest loss",
    )


def _gradient_norm(log: TrainingLog) -> list[Check]:
    """Compare each gradient norm with the median of those before it."""
    norms = log.gradient_norm
    there = np.flatnonzero(~np.isnan(norms))
    if len(there) <= WARM_UP:
        return [unknown(GRADIENT_NORM, GRADIENT_NORM.nothing)]
    ratios: dict[int, float] = {}
    for number, record in enumerate(there):
        before = norms[there[max(0, number - NORM_RECORDS) : number]]
        if number >= WARM_UP and np.median(before) > 0:
            ratios[int(record)] = float(norms[record] / np.median(before))
    if not ratios:
        return [unknown(GRADIENT_NORM, "the gradients of all steps before were zero")]
    worst = max(ratios, key=lambda record: ratios[record])
    ratio = np.nan if np.isinf(norms[there]).any() else ratios[worst]
    return graded(
        GRADIENT_NORM,
        [("", ratio)],
        lambda value: "not finite" if np.isnan(value) else f"{value:.3g} times, at step {log.steps[worst]}",
        lambda *_: (
            "clip gradients by their norm, and look at the batch of that step; a lower learning rate if it comes again"
        ),
    )


def _jumps(log: TrainingLog) -> list[Check]:
    """Compare each amax with the amax of its history."""
    amax = log.column("amax")
    history = log.column("history")
    first = _settled(log)
    if len(log.steps) <= first:
        return [unknown(TRAINING_JUMPS, TRAINING_JUMPS.nothing)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(history > 0, amax / history, 1.0)[first:]
    values = []
    steps = {}
    for index, tensor in enumerate(log.tensors):
        if not np.isnan(ratio[:, index]).all():
            worst = int(np.nanargmax(ratio[:, index]))
            values.append((tensor, float(ratio[worst, index])))
            steps[float(ratio[worst, index])] = int(log.steps[first + worst])
    return graded(
        TRAINING_JUMPS,
        values,
        lambda value: f"{value:.3g} times, at step {steps[value]}",
        lambda _, value: (
            f"a margin of {int(np.ceil(np.log2(max(value, 1.0))))} octaves would hold it, and scaling by "
            "the tensor's own amax (Float8CurrentScaling) holds any"
        ),
    )


def _vanishing(log: TrainingLog) -> list[Check]:
    """Compare each gradient's last amax with its first."""
    amax = log.column("amax")
    values = []
    for index in log.of_kind("gradient"):
        there = amax[~np.isnan(amax[:, index]), index]
        if len(there) > 1:
            last = float(np.median(there[-LOSS_RECORDS:]))
            values.append((log.tensors[index], float(there[0]) / last if last > 0 else np.inf))
    return graded(
        VANISHING,
        values,
        lambda value: "zero at the end" if np.isinf(value) else f"{magnitude(value)} times",
        lambda *_: (
            "the layer no longer learns: look for a saturated activation before it, or for gradients that "
            "underflow behind it"
        ),
    )
