"""Choose the scale of a tensor's histogram, and those of the inputs of modules.

A scale comes out of one function, `scale_of`; what has no scale (amax zero, NaN or Inf seen, never observed) is refused
by one function, `unfit`. ModelOpt maps such an amax to scale 1.0 in silence; here the module stays in BF16 and says so.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.histogram import Histogram
from ...calibrate.measure.statistics import Statistics, TensorStatistics
from ...core.errors import InputError
from ...options import ONE, Clipping, Form
from ..codes.formats import E4M3, TWO_TERMS, Grid
from .clip import (
    FROM_BATCHES,
    FROM_HISTOGRAM,
    LARGEST_POWER,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    clip_mse,
    powers_alone,
    saturation,
    scale_of,
    sqnr_db,
    underflow,
)
from .decisions import Skipped, TensorScale
from .expert_scales import Starved


def unfit(histogram: Histogram | None) -> Skipped | None:
    """Give the reason why no scale follows from these values; None where one does."""
    if histogram is None or not histogram.samples:
        return Skipped(reason="never observed: no token of the calibration text reached it", samples=0)
    if histogram.nans:
        return Skipped(
            reason=f"NaN in {histogram.nans:,} of {histogram.samples:,} input values",
            value=float("nan"),
            samples=histogram.samples,
        )
    if histogram.infinities:
        return Skipped(
            reason=f"Inf in {histogram.infinities:,} of {histogram.samples:,} input values",
            value=float("inf"),
            samples=histogram.samples,
        )
    if float(scale_of(histogram.amax, E4M3)) < SMALLEST_SCALE:
        return Skipped(
            reason="amax is 0: every input value is zero or vanishes in BF16",
            value=histogram.amax,
            samples=histogram.samples,
        )
    return None


def tensor_scale(
    histogram: Histogram, clipping: Clipping, format: Grid = E4M3, amax_batches: npt.NDArray[np.float32] | None = None
) -> TensorScale:
    """Choose the scale of one tensor, and measure its error on the values it was chosen for.

    The histogram must be fit (`unfit` is None). `amax_batches` float32 [batches] is used by the methods of
    `FROM_BATCHES`.
    """
    return described(histogram, format, clipping, _clip_and_scale(histogram, clipping, format, amax_batches))


def described(histogram: Histogram, format: Grid, clipping: Clipping, chosen: tuple[str, float, float]) -> TensorScale:
    """Measure the error that a scale, `chosen` as method, clip and scale, causes on the values of `histogram`."""
    method, clip, scale = chosen
    # where there are no values, no scale loses any
    best = float(scale_of(clip_mse(histogram, format, clipping), format)) if histogram.amax else scale
    achieved, possible = (sqnr_db(histogram, format, candidate) for candidate in (scale, best))
    return TensorScale(
        method=method,
        amax=histogram.amax,
        clip=clip,
        scale=scale,
        terms=format.terms,
        saturation=saturation(histogram, format, scale),
        underflow=underflow(histogram, format, scale),
        sqnr_db=achieved,
        sqnr_best_db=None if achieved is None or possible is None else max(achieved, possible),
    )


def _clip_and_scale(
    histogram: Histogram, clipping: Clipping, format: Grid, amax_batches: npt.NDArray[np.float32] | None
) -> tuple[str, float, float]:
    """Choose method, clip and scale by `clipping`.

    Where the clip is too small for a scale, such as a percentile of 0, the amax takes its place, and the method says
    so. Margins are bounded by the smallest and the largest scale.
    """
    method: str = clipping.method
    if method in FROM_HISTOGRAM:
        clip = FROM_HISTOGRAM[method](histogram, format, clipping)
    elif amax_batches is not None:
        clip = FROM_BATCHES[method](amax_batches, clipping)
    else:
        raise InputError(
            f"--method {method}",
            "needs the amax of every batch, which a histogram does not hold",
            "choose another method",
        )
    if scale_of(clip, format) < SMALLEST_SCALE:
        method = f"amax ({method} gave {clip:.3g})"
        clip = histogram.amax
    scale = float(scale_with_margin(clip, clipping, format))
    powers = powers_alone(format, clipping.scale_grid)
    return method, scale * format.clip if powers else float(np.ldexp(clip, clipping.margin)), scale


def scale_with_margin(clips: npt.ArrayLike, clipping: Clipping, format: Grid = E4M3) -> npt.NDArray[np.float64]:
    """The scales of `clips` on the grid of `clipping`, times 2^margin, within the bounds of scales."""
    powers = powers_alone(format, clipping.scale_grid)
    scales = np.ldexp(scale_of(clips, format, clipping.scale_grid).astype(np.float64), clipping.margin)
    bounded: npt.NDArray[np.float64] = np.clip(scales, SMALLEST_SCALE, LARGEST_POWER if powers else LARGEST_SCALE)
    return bounded


def group_of(groups: Mapping[str, list[str]]) -> dict[str, str]:
    """Map each module to the first module of its group, after which the group's tensor is called."""
    return {member: first for first, members in groups.items() for member in members}


def activation_scales(
    statistics: Statistics,
    modules: Iterable[str],
    clipping: Clipping,
    format: Grid = E4M3,
    forms: Mapping[str, Form] = MappingProxyType({}),
    starved: Mapping[str, Starved] = MappingProxyType({}),
) -> tuple[dict[str, TensorScale], dict[str, Skipped]]:
    """Choose the scales of the inputs of `modules`; return them, and the modules that have none with the reasons.

    `forms`: modules, in whole groups, -> the form of their input, which is not BF16; the others take one code of
    `format`.
    `starved`: experts that saw too few tokens and take the amax of others. All members of a group have the same scale.
    """
    scales: dict[str, TensorScale] = {}
    skipped: dict[str, Skipped] = {}
    first = group_of(statistics.record.groups)
    chosen: dict[str, TensorScale | Skipped] = {}
    for module in modules:
        name = f"{first.get(module, module)}.input"
        if name not in chosen:
            form = forms.get(module, ONE)
            grid = TWO_TERMS if form.terms == 2 else format
            decided = _scale_or_reason(statistics.tensors.get(name), clipping, grid, starved.get(module))
            chosen[name] = decided if isinstance(decided, Skipped) else decided.with_form(form)
        decision = chosen[name]
        if isinstance(decision, Skipped):
            skipped[module] = decision
        else:
            scales[module] = decision
    return scales, skipped


def _scale_or_reason(
    tensor: TensorStatistics | None, clipping: Clipping, format: Grid, starved: Starved | None
) -> TensorScale | Skipped:
    histogram = tensor.histogram if tensor else None
    reason = unfit(histogram)
    if histogram is not None and starved and starved.larger and not histogram.nans + histogram.infinities:
        plain = Clipping(margin=clipping.margin, scale_grid=clipping.scale_grid)
        _, clip, scale = _clip_and_scale(starved.larger, plain, format, None)
        return described(histogram, format, clipping, (starved.method, clip, scale))
    if reason is not None or tensor is None:
        return reason or Skipped(reason="never observed", samples=0)
    return tensor_scale(tensor.histogram, clipping, format, tensor.amax_batches)
