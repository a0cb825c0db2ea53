"""Find outliers in a run's statistics, ranked, each with a remedy; and the two what-ifs: a history of amax, and other
text.

Pure functions of the statistics and the chosen scales. Every check compares one number with a limit (`criteria`), and
the severity of an outlier is their ratio, so that outliers of different kinds can be ranked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.statistics import Statistics, TensorStatistics
from ...core.errors import InputError
from ...options import Clipping
from ...quantize.codes.formats import E4M3
from ...quantize.scales.activation_scales import group_of, tensor_scale, unfit
from ...quantize.scales.clip import largest_jump, measured, saturated_batches, saturation
from ...quantize.scales.decisions import Scales, TensorScale
from . import criteria
from .criteria import Criterion

#: The text for `{in_bf16}` in a remedy, by the last part of the tensor's name: --skip matches modules, and a cache
#: tensor is none.
IN_BF16 = {
    "input": "keep it in BF16 with --skip",
    "k": "keep its layer's cache in BF16 with --kv-skip, or all keys with --kv-cache v",
    "v": "keep its layer's cache in BF16 with --kv-skip, or all with --kv-cache off",
}
#: The text for `{better}` in a remedy: a cache has no second codes.
BETTER = IN_BF16 | {"input": "two codes lose nothing of it: --form 'MODULE=two'"}
#: The beginning of a remedy where the tensor has no scale yet.
BEFORE_FP8 = "in BF16; before it goes into FP8: "


@dataclass(frozen=True)
class Outlier:
    """A value beyond its limit: `value` of `what` at `tensor`; `severity` is the value over the limit."""

    tensor: str
    what: str
    value: float
    severity: float
    remedy: str


@dataclass(frozen=True)
class DelayedRow:
    """One tensor under delayed scaling: of `batches` that had a history, the share that would have saturated, and the
    largest jump of the amax.
    """

    tensor: str
    batches: int
    saturated: float
    largest_jump: float


@dataclass(frozen=True)
class AgainstRow:
    """One tensor on other text, at the scale chosen before: amax over clip, and the saturated shares of that text and
    of calibration's.
    """

    tensor: str
    clip: float
    amax: float
    amax_over_clip: float
    saturation: float
    calibrated_saturation: float


def chosen_scales(scales: Scales, groups: Mapping[str, list[str]]) -> dict[str, TensorScale]:
    """Tensor name -> its static scale: each distinct input once, then the cache."""
    first = group_of(groups)
    return {
        f"{first.get(module, module)}.input": scale for module, scale in scales.static_inputs.items()
    } | scales.kv_cache


def prospective_scales(statistics: Statistics, scales: Scales, clipping: Clipping) -> dict[str, TensorScale]:
    """Cache tensor in BF16 -> the scale that `clipping` would give it, which shows the effect of --kv-cache before it
    is chosen.
    """
    return {
        name: tensor_scale(tensor.histogram, clipping, amax_batches=tensor.amax_batches)
        for name, tensor in statistics.tensors.items()
        if name.endswith((".k", ".v")) and name not in scales.kv_cache and unfit(tensor.histogram) is None
    }


def outlier_channels(amax_channels: npt.NDArray[np.float32]) -> tuple[int, float]:
    """Count the channels that exceed ten times the median channel's amax, and the largest ratio; the median
    is over channels that are not zero.
    """
    finite = amax_channels[np.isfinite(amax_channels) & (amax_channels > 0)]
    if not len(finite):
        return 0, 1.0
    ratios = finite / np.median(finite)
    return int((ratios > criteria.OUTLIER_CHANNELS.limit.watch).sum()), float(ratios.max())


def converged_after(amax_batches: npt.NDArray[np.float32]) -> float:
    """The share of batches after which the amax no longer grew: small says enough data, 1.0 that it grew in the very
    last.
    """
    amax = measured(amax_batches)
    if len(amax):
        return float((np.argmax(amax) + 1) / len(amax))
    return 1.0


def late_growth(amax_batches: npt.NDArray[np.float32]) -> float:
    """Return the amax over the amax of the first three quarters of the batches; 1.0 for fewer than four batches."""
    amax = measured(amax_batches)
    early = amax[: len(amax) * 3 // 4].max(initial=0)
    if len(amax) >= 4 and early > 0:
        return float(amax.max() / early)
    return 1.0


def _rounds_to_zero(scale: TensorScale) -> str:
    beyond = scale.clip > 2 * scale.amax  # by more than rounding to a power of two
    if beyond:
        return "a smaller --margin"
    return "a few huge values set its scale: {in_bf16}"


#: Check -> its value for a tensor, and its remedy.
CHECKS: dict[Criterion, tuple[Callable[[TensorStatistics, TensorScale], float], Callable[[TensorScale], str]]] = {
    criteria.SATURATION: (
        lambda tensor, scale: scale.saturation,
        lambda scale: "clip less: --method amax, or --margin 1",
    ),
    criteria.UNDERFLOW: (lambda tensor, scale: scale.underflow, _rounds_to_zero),
    criteria.DB_LOST: (
        lambda tensor, scale: criteria.db_below_best(scale.sqnr_db, scale.sqnr_best_db),
        lambda scale: "{better}",
    ),
    criteria.OUTLIER_CHANNELS: (
        lambda tensor, scale: outlier_channels(tensor.amax_channels)[1],
        lambda scale: "harmless while little underflows; else {in_bf16}",
    ),
    criteria.AMAX_GROWTH: (
        lambda tensor, scale: late_growth(tensor.amax_batches),
        lambda scale: "not enough data: more --samples, or --margin 1",
    ),
    criteria.AMAX_JUMPS: (
        lambda tensor, scale: largest_jump(tensor.amax_batches),
        lambda scale: "rare huge values: calibrate on more text like it, and do not serve it with delayed scaling",
    ),
}


def findings(
    statistics: Statistics, scales: Scales, prospective: Mapping[str, TensorScale] = MappingProxyType({})
) -> list[Outlier]:
    """List all values beyond their limits in the tensors that have a scale, and in those of the cache that have a
    `prospective` one, the worst first. Raises InputError for a scale of a tensor that was not measured.
    """
    outliers = []
    for name, scale in (chosen_scales(scales, statistics.record.groups) | dict(prospective)).items():
        kind = name.rpartition(".")[2]
        prefix = BEFORE_FP8 if name in prospective else ""
        if name not in statistics.tensors:
            raise unmeasured(name)
        for criterion, (value_of, remedy_of) in CHECKS.items():
            value = value_of(statistics.tensors[name], scale)
            limit = criterion.limit.watch
            if value > limit:
                remedy = prefix + remedy_of(scale).format(in_bf16=IN_BF16[kind], better=BETTER[kind])
                outliers.append(Outlier(name, criterion.what, value, value / limit, remedy))
    return sorted(outliers, key=lambda outlier: -outlier.severity)


def unmeasured(tensor: str) -> InputError:
    """The error of a scale that nothing was measured for."""
    return InputError(
        tensor,
        "has a scale, and the statistics have no such tensor",
        "restore statistics.safetensors and scales.json, or calibrate again",
    )


def delayed_rows(statistics: Statistics, scales: Scales, clipping: Clipping) -> list[DelayedRow]:
    """Simulate delayed scaling of every tensor, on its grid in `scales` (default E4M3); the most saturated first."""
    grids = {name: scale.grid for name, scale in chosen_scales(scales, statistics.record.groups).items()}
    rows = []
    for name, tensor in statistics.tensors.items():
        saturated = saturated_batches(tensor.amax_batches, grids.get(name, E4M3), clipping)
        rows.append(
            DelayedRow(
                name,
                len(saturated),
                float(saturated.mean()) if len(saturated) else 0.0,
                largest_jump(tensor.amax_batches),
            )
        )
    return sorted(rows, key=lambda row: (-row.saturated, -row.largest_jump))


def jumps(rows: list[DelayedRow]) -> list[str]:
    """A warning for each tensor whose amax jumps more than tenfold between batches."""
    return [
        (
            f"{row.tensor}: its amax jumps {row.largest_jump:.3g}-fold from one batch to the next; a scale made from "
            "the "
            "batches before saturates there"
        )
        for row in rows
        if row.largest_jump > criteria.AMAX_JUMPS.limit.watch
    ]


def largest_share(tensor: TensorStatistics, scale: TensorScale) -> tuple[float, float]:
    """The amax of a tensor and its clip under `scale`; where heads have scales, of the head nearest to its clip."""
    heads = scale.stored.ravel()
    clips = heads.astype(np.float64) * scale.grid.max
    if scale.heads is None:
        return tensor.histogram.amax, float(clips[0])
    amax = tensor.amax_channels.reshape(len(heads), -1).max(1)
    worst = int(np.argmax(amax / clips))
    return float(amax[worst]), float(clips[worst])


def against_rows(statistics: Statistics, scales: Scales, other: Statistics) -> list[AgainstRow]:
    """Compare every tensor that has a scale with its values on the text of `other`: the most saturated first, then
    those nearest to their clip.
    """
    rows = []
    for name, scale in chosen_scales(scales, statistics.record.groups).items():
        if (tensor := other.tensors.get(name)) is not None:
            grid = scale.grid
            amax, clip = largest_share(tensor, scale)
            saturated = saturation(tensor.histogram, grid, scale.scale)
            rows.append(AgainstRow(name, clip, amax, amax / clip, saturated, scale.saturation))
    return sorted(rows, key=lambda row: (-row.saturation, -row.amax_over_clip))
