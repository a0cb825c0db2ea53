"""Check the run's files without running a model: exact histograms at the scales in the checkpoint.

The scales are read from `model/`, like every runtime does, and not from `scales.json`, whose statements on a scale
(saturation, SQNR) come from the program that wrote it.

`served_cache` checks how other servers read the scales of an FP8 cache, by the rules of the checkpoint's lint that are
about these: a server that finds no scale takes 1.0, and one that has no place for a scale leaves it unread; both go on
without a word (`quantize/lint/rules_cache.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.histogram import Histogram
from ...calibrate.measure.statistics import Statistics
from ...core.columns import magnitude, share
from ...core.findings import Finding
from ...options import Clipping
from ...quantize.codes.formats import E4M3, Grid
from ...quantize.lint.check import RULES
from ...quantize.reading.fp8_tensors import open_checkpoint
from ...quantize.reading.quantization_config import read_by_fp8q_alone
from ...quantize.reading.run_checkpoint import stored_arrays
from ...quantize.scales.activation_scales import group_of
from ...quantize.scales.clip import (
    clip_mse,
    largest_jump,
    lost_share,
    measured,
    saturation,
    scale_of,
    sqnr_db,
    underflow,
)
from ...quantize.scales.decisions import Scales, TensorScale
from . import criteria
from .checkup import Check, Remedies, graded, unknown
from .findings import unmeasured

#: Scales of 1.0, missing ones, those that nothing reads, and those that some servers read.
OF_THE_CACHE = ("C119", "C120", "C126", "C127")


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A tensor that has a scale. `name`: its module (for an input the first that reads it) or its name in the cache;
    `scale`: the checkpoint's; `chosen`: its entry in `scales.json`.
    """

    name: str
    histogram: Histogram
    amax_batches: npt.NDArray[np.float32]
    chosen: TensorScale
    scale: float

    @property
    def grid(self) -> Grid:
        """The format of its values."""
        return self.chosen.grid

    @property
    def clips(self) -> bool:
        """Tell whether values of the calibration text saturate."""
        return self.histogram.amax > self.scale * self.grid.max


def tensors_of(statistics: Statistics, scales: Scales, directory: Path) -> list[ScaledTensor]:
    """Every distinct tensor of `scales`, in the order of the model. Raises InputError where the checkpoint in
    `directory` lacks a scale, or the statistics a tensor.
    """
    first = group_of(statistics.record.groups)
    named = {f"{module}.input_scale": (module, chosen) for module, chosen in scales.static_inputs.items()}
    named |= {f"{name}_scale": (name, chosen) for name, chosen in scales.kv_cache.items()}
    stored = stored_arrays(directory, list(named))
    by_tensor: dict[str, ScaledTensor] = {}
    for key, (name, chosen) in named.items():
        tensor = name if name in scales.kv_cache else f"{first.get(name, name)}.input"
        if tensor not in statistics.tensors:
            raise unmeasured(tensor)
        seen = statistics.tensors[tensor]
        scale = judged_scale(stored[key], chosen)
        # members of a group share a scale; where they do not, the least fitting one is judged
        if tensor not in by_tensor or _distance(scale, chosen) > _distance(by_tensor[tensor].scale, chosen):
            by_tensor[tensor] = ScaledTensor(name, seen.histogram, seen.amax_batches, chosen, scale)
    return sorted(by_tensor.values(), key=lambda tensor: layer_order(tensor.name))


def judged_scale(stored: npt.NDArray[np.float32], chosen: TensorScale) -> float:
    """The scale of a tensor in the checkpoint; of a cache by heads, that of the whole tensor times the factor by which
    the worst head's `stored` scale, float32 [heads], is off.
    """
    if chosen.heads is None or len(stored) != len(chosen.heads):
        return float(stored[0])
    factors = stored.astype(np.float64) / chosen.heads
    return chosen.scale * max(map(float, factors), key=lambda factor: _distance(factor * chosen.scale, chosen))


def _distance(scale: float, chosen: TensorScale) -> float:
    if scale > 0:
        return abs(math.log2(scale / chosen.scale))
    return math.inf


def layer_order(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts names as the model has its layers: 2 before 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def stored_checks(tensors: Sequence[ScaledTensor], scales: Scales, remedies: Remedies) -> list[Check]:
    """All checks that need no model."""
    return [
        *_saturation(tensors, remedies),
        *_fit(tensors, remedies),
        *_underflow(tensors, remedies),
        *_inverse(tensors, scales, remedies),
        *_jumps(tensors, remedies),
    ]


def _narrow(tensors: Sequence[ScaledTensor], remedies: Remedies) -> Callable[[str, float], str]:
    """Return the remedy for a tensor whose scale is too small."""
    by_name = {tensor.name: tensor for tensor in tensors}

    def remedy(name: str, value: float) -> str:
        tensor = by_name[name]
        if (
            tensor.clips
            and tensor.chosen.method.startswith("amax")
            and tensor.scale * tensor.grid.max < tensor.chosen.clip
        ):
            return f"the scale is not that of its amax; {remedies.again()}"
        if tensor.clips:
            return remedies.scales("--method", "amax")
        return remedies.scales("--method", "mse")

    return remedy


def _saturation(tensors: Sequence[ScaledTensor], remedies: Remedies) -> list[Check]:
    values = [(tensor.name, saturation(tensor.histogram, tensor.grid, tensor.scale)) for tensor in tensors]
    return graded(criteria.SATURATION, values, share, _narrow(tensors, remedies))


def _fit(tensors: Sequence[ScaledTensor], remedies: Remedies) -> list[Check]:
    values = [(tensor.name, db_lost(tensor)) for tensor in tensors]
    return graded(criteria.DB_LOST, values, lambda value: f"{value:.1f} dB", _narrow(tensors, remedies))


def db_lost(tensor: ScaledTensor) -> float:
    """dB that the checkpoint's scale loses to the one of least squared error; 0 where it loses nothing to speak of."""
    best = float(scale_of(clip_mse(tensor.histogram, tensor.grid, Clipping()), tensor.grid))
    actual_db, best_db = (sqnr_db(tensor.histogram, tensor.grid, scale) for scale in (tensor.scale, best))
    return criteria.db_below_best(actual_db, best_db)


def relative_error(tensor: ScaledTensor) -> float:
    """‖rounded - x‖ / ‖x‖ at the checkpoint's scale."""
    return math.sqrt(lost_share(sqnr_db(tensor.histogram, tensor.grid, tensor.scale)))


def _underflow(tensors: Sequence[ScaledTensor], remedies: Remedies) -> list[Check]:
    by_name = {tensor.name: tensor for tensor in tensors}

    def remedy(name: str, value: float) -> str:
        tensor = by_name[name]
        if tensor.scale * tensor.grid.max > 2 * tensor.histogram.amax:  # by more than rounding to a power of two
            return remedies.scales("--margin", "0")
        return f"a few huge values set its scale; {remedies.better(name, tensor.chosen)}"

    values = [(tensor.name, underflow(tensor.histogram, tensor.grid, tensor.scale)) for tensor in tensors]
    return graded(criteria.UNDERFLOW, values, share, remedy)


def _inverse(tensors: Sequence[ScaledTensor], scales: Scales, remedies: Remedies) -> list[Check]:
    """Scales that are so large that their reciprocal vanishes; of weights the largest channel's."""
    largest: dict[str, float] = {}
    for name, scale in [
        *((tensor.name, tensor.scale) for tensor in tensors),
        *((module, weight.scale_max) for module, weight in scales.weights.items()),
    ]:
        largest[name] = max(scale, largest.get(name, 0.0))
    values = sorted(largest.items(), key=lambda named: layer_order(named[0]))
    checks = graded(
        criteria.INVERSE_SCALE,
        values,
        lambda scale: f"{1 / scale:.3g}",
        lambda name, scale: f"its values reach {magnitude(scale * E4M3.max)}; {remedies.in_bf16(name)}",
    )
    return [check.model_copy(update={"value": check.value and 1 / check.value, "by_depth": []}) for check in checks]


def _jumps(tensors: Sequence[ScaledTensor], remedies: Remedies) -> list[Check]:
    values = [
        (tensor.name, largest_jump(tensor.amax_batches)) for tensor in tensors if len(measured(tensor.amax_batches)) > 1
    ]
    return graded(
        criteria.AMAX_JUMPS,
        values,
        lambda value: f"{value:.3g}-fold",
        lambda name, value: remedies.more_text(),
    )


def served_cache(model: Path) -> list[Check]:
    """Return an entry for each place at which a server's cache differs from the run's, or one that is good.

    `model`: the folder of the checkpoint. One that other servers cannot load at all is unknown.
    """
    criterion = criteria.CACHE_SERVED
    checkpoint = None if read_by_fp8q_alone(model) else open_checkpoint(model)
    if checkpoint is None:
        return [unknown(criterion, "other servers do not load this checkpoint, and fp8q's own read every scale")]
    violations = [finding for number in OF_THE_CACHE for finding in RULES[number].findings(checkpoint)]
    if violations:
        return [_entry(finding) for finding in violations]
    return [Check(check=criterion.check, verdict="good", value=0, what=criterion.what, said="none")]


def _entry(finding: Finding) -> Check:
    """The entry of a broken rule, whose message ends in the remedy."""
    criterion = criteria.CACHE_SERVED
    said, _, remedy = finding.message.rpartition("; ")
    return Check(
        check=criterion.check,
        verdict="watch",
        module=finding.node or None,
        value=finding.places,
        what=criterion.what,
        said=f"{finding.rule}: {said}",
        remedy=remedy,
    )
