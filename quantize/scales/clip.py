"""Choose the clip of a tensor: pure functions of an exact histogram and a format, evaluated on the real grid.

A scale s cuts the magnitudes into cells, one for each value of the format's grid, at the midpoints of the scaled grid.
Magnitudes are counted by BF16 bit pattern, patterns are ordered as magnitudes are, and both s and the midpoints have
few significant bits, so each cut *is* a pattern: every cell's count, sum and sum of squares is a difference of two
prefix sums over the 32,640 finite patterns. Nothing is binned or searched for; a candidate costs one look-up for each
midpoint (126 for E4M3), and the optimum is taken over all BF16 scales, not over a coarse grid.

The squared error of a cell of grid value g with count n, sum a and sum of squares b is b - 2(gs)a + (gs)²n. Sums are
float64: the error, 1e-3 of the energy, keeps ten digits.

Delayed scaling chooses the clip of a batch by the amax of the batches before it. Transformer Engine does so because
reading a tensor twice (once for its amax, once to cast it) costs time. Its rules (user guide, "FP8 Delayed Scaling",
and `recipe.DelayedScaling`):

1. The history is a window of the last `amax_history_len` batches, or of all batches where there are fewer.
2. After each batch its amax joins the history, and the scale for the next batch is max_fp8 / amax of the history, over
   2^margin (Transformer Engine's scale is the reciprocal of ours). The amax of the history is the largest in the window
   (`max`) or the last one (`most_recent`).
3. Where that amax is zero, the scale stays as it was.
4. With an `interval` (up to release 1.x) the scale is computed once in so many batches; the history takes every batch.

The first batches have no history: Transformer Engine runs them with scale 1, and here they are not judged. Static
inference has no next batch; the method `delayed` takes the scale that the batch after the last one would have.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.histogram import INFINITY, Histogram, magnitudes
from ...core.errors import InputError
from ...options import METHODS, Clipping, ScaleGrid
from ..codes.formats import E4M3, Grid

#: Octaves below the amax's scale that are searched: no distribution worth quantizing has its optimum lower.
CLIP_OCTAVES = 10
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Clipper = TypeVar("Clipper", bound=Callable[..., float])
#: The functions of `METHODS` that choose a clip, before the margin, from the histogram of a tensor.
FROM_HISTOGRAM: dict[str, Callable[[Histogram, Grid, Clipping], float]] = {}
#: Those that choose it from the amax of the tensor's batches, float32 [batches].
FROM_BATCHES: dict[str, Callable[[Float32s, Clipping], float]] = {}


def from_histogram(method: str) -> Callable[[Clipper], Clipper]:
    """Register the function below as the one that chooses the clips of `method` from a histogram."""
    return _registered(FROM_HISTOGRAM, method)


def from_batches(method: str) -> Callable[[Clipper], Clipper]:
    """Register the function below as the one that chooses the clips of `method` from the amax of batches."""
    return _registered(FROM_BATCHES, method)


def _registered(functions: dict[str, Any], method: str) -> Callable[[Clipper], Clipper]:
    if method not in METHODS:
        raise KeyError(f"options/clipping.py: METHODS has no entry {method}")

    def register(function: Clipper) -> Clipper:
        functions[method] = function
        return function

    return register


def squared_error(histogram: Histogram, format: Grid, scales: npt.ArrayLike) -> Float64s:
    """Sum of (value - dequantized)² over all finite values, float64 [candidates], for float32 `scales` [candidates]."""
    if format.by_value:
        return _error_by_value(histogram, format, np.asarray(scales, np.float32).ravel())
    counts = _finite_counts(histogram)
    x = _MAGNITUDES.astype(np.float64)
    s = np.asarray(scales, np.float32).reshape(-1, 1)
    n, a, b = _cell_sums((counts, counts * x, counts * x * x), _cuts(s, format))
    g = s.astype(np.float64) * format.grid.astype(np.float64)
    error: Float64s = np.maximum((b - 2 * g * a + g * g * n).sum(axis=1), 0)
    return error


def _error_by_value(histogram: Histogram, format: Grid, scales: npt.NDArray[np.float32]) -> Float64s:
    values, counts = histogram.finite
    x = values.astype(np.float64)
    n = counts.astype(np.float64)
    return np.array([(((x - format.round(values / s) * np.float64(s)) ** 2) * n).sum() for s in scales])


def entropy(histogram: Histogram, format: Grid, scales: npt.ArrayLike) -> Float64s:
    """KL divergence, in nats, of the quantized distribution from the real one, float64 [candidates], for float32
    `scales` [candidates].

    This is TensorRT's entropy calibrator (Migacz 2017, "8-bit inference with TensorRT", GTC S7310) with exact BF16
    patterns in place of its 2,048 bins and the cells of the format in place of its 128 levels. P is the distribution
    over the patterns that occur up to the clip s·max; all values beyond the clip are counted at the largest of these
    patterns, where saturation puts them. Q spreads the unclipped count of each cell evenly over the patterns that occur
    in it. KL = Σ P ln(P / Q), both normalized; infinite where every value lies beyond the clip.
    """
    counts = _finite_counts(histogram)
    total = counts.sum()
    occurs = (counts > 0).astype(np.float64)
    s = np.asarray(scales, np.float32).reshape(-1, 1)
    inside = np.searchsorted(_MAGNITUDES, s[:, 0].astype(np.float64) * format.max, side="right")
    cuts = np.minimum(_cuts(s, format), inside[:, None])
    n, k, n_log_n = _cell_sums((counts, occurs, counts * _log(counts)), cuts, inside)
    clipped_total = n.sum(axis=1)
    some = clipped_total > 0
    beyond = total - clipped_total
    q = _log(n) - _log(k) - _log(clipped_total)[:, None]  # log Q of each pattern of the cell
    last = np.maximum.accumulate(np.where(counts > 0, np.arange(INFINITY), 0))[inside - 1]
    at_last = counts[last]
    q_last = np.take_along_axis(q, (cuts <= last[:, None]).sum(axis=1, keepdims=True), axis=1)[:, 0]
    p_log_p = (
        n_log_n.sum(axis=1)
        - at_last * _log(at_last)
        + (at_last + beyond) * _log(at_last + beyond)
        - total * np.log(total)
    )
    divergence = (p_log_p - (n * q).sum(axis=1) - beyond * q_last) / total
    return np.where(some, np.maximum(divergence, 0), np.inf)


def _log(x: Float64s) -> Float64s:
    """The natural logarithm, and 0 at 0, where it is multiplied by a count of zero."""
    return np.log(np.where(x > 0, x, 1))


#: The magnitude of every finite pattern.
_MAGNITUDES = magnitudes(np.arange(INFINITY))


def _finite_counts(histogram: Histogram) -> Float64s:
    return histogram.dense()[:INFINITY].astype(np.float64)


def _cuts(scales: npt.NDArray[np.float32], format: Grid) -> npt.NDArray[np.int64]:
    """The first pattern above each midpoint of the grid scaled by `scales` [candidates, 1], int64 [candidates,
    midpoints]; a value on a midpoint goes to the even code.
    """
    with np.errstate(over="ignore"):  # infinity is a cut that no finite value reaches
        bits = (scales * format.midpoints).view(np.uint32)
    tie_goes_up = np.arange(len(format.midpoints)) % 2 == 1
    first = np.where(tie_goes_up, (bits + np.uint32(0xFFFF)) >> 16, (bits >> 16) + 1)
    return np.minimum(first, INFINITY).astype(np.int64)


def _cell_sums(
    weights: tuple[Float64s, ...], cuts: npt.NDArray[np.int64], end: npt.NDArray[np.int64] | None = None
) -> Float64s:
    """Sum each of `weights` [patterns] over each cell, float64 [len(weights), candidates, cells].

    `cuts`: the patterns at which cells begin; `end`: the pattern at which the last cell ends, by default that of
    infinity.
    """
    prefix = np.zeros((len(weights), INFINITY + 1))
    np.cumsum(np.stack(weights), axis=1, out=prefix[:, 1:])
    last = np.full(len(cuts), INFINITY) if end is None else end
    edges = np.concatenate([np.zeros_like(cuts[:, :1]), cuts, last[:, None]], axis=1)
    return np.diff(prefix[:, edges], axis=2)


def sqnr_db(histogram: Histogram, format: Grid, scale: float) -> float | None:
    """Signal-to-quantization-noise ratio of the finite values at `scale`, in dB; None where the error is zero."""
    values, counts = histogram.finite
    return ratio_db(
        float((values.astype(np.float64) ** 2 * counts).sum()), float(squared_error(histogram, format, [scale])[0])
    )


def ratio_db(signal: float, noise: float) -> float | None:
    """The ratio of two sums of squares in dB; None where there is no noise, or no signal that it could disturb."""
    if signal > 0 and noise > 0:
        return 10 * math.log10(signal / noise)
    return None


def lost_share(decibels: float | None) -> float:
    """The share of the energy that is lost at an SQNR of `decibels`; 0 for None, where nothing is lost."""
    if decibels is None:
        return 0.0
    return 10 ** (-decibels / 10)


def saturation(histogram: Histogram, format: Grid, scale: float) -> float:
    """Share of the finite values beyond the clip, a fraction."""
    values, counts = histogram.finite
    return float(counts[values > np.float64(scale) * format.max].sum() / max(counts.sum(), 1))


def underflow(histogram: Histogram, format: Grid, scale: float) -> float:
    """Share of the finite, non-zero values that round to code 0, a fraction."""
    values, counts = histogram.finite
    lost = counts[(values > 0) & (values <= np.float64(scale) * format.midpoints[0])].sum()
    return float(lost / max(counts[values > 0].sum(), 1))


@from_histogram("amax")
def clip_amax(histogram: Histogram, format: Grid, clipping: Clipping) -> float:
    """Clip at the largest finite magnitude, so that nothing saturates."""
    return histogram.amax


@from_histogram("percentile")
def clip_percentile(histogram: Histogram, format: Grid, clipping: Clipping) -> float:
    """Clip at the observed magnitude of `clipping.percentile`."""
    return histogram.percentile(clipping.percentile)


@from_histogram("mse")
def clip_mse(histogram: Histogram, format: Grid, clipping: Clipping) -> float:
    """Clip by the BF16 scale of least squared error; of equal ones the amax's own, else the largest below it.

    A value beyond a clip errs at least by its distance from the clip, and by more for every smaller clip. Candidates
    for which this alone exceeds the error of the amax's scale are not tried, which leaves two or three octaves of
    eleven.
    """
    candidates = candidate_scales(histogram.amax, format)
    bound = squared_error(histogram, format, candidates[:1])[0] * (1 + 1e-9)
    candidates = candidates[_error_beyond(histogram, candidates * np.float64(format.max)) <= bound]
    return float(candidates[np.argmin(squared_error(histogram, format, candidates))]) * format.clip


def _error_beyond(histogram: Histogram, clips: Float64s) -> Float64s:
    """Sum (value - clip)² over the values beyond each of `clips`, float64 [clips]."""
    values, counts = histogram.finite
    x = values.astype(np.float64)
    n = counts.astype(np.float64)
    suffix = np.zeros((3, len(x) + 1))
    suffix[:, :-1] = np.cumsum(np.stack([n, n * x, n * x * x])[:, ::-1], axis=1)[:, ::-1]
    n_beyond, a_beyond, b_beyond = suffix[:, np.searchsorted(x, clips, side="right")]
    error: Float64s = b_beyond - 2 * clips * a_beyond + clips * clips * n_beyond
    return error


@from_histogram("entropy")
def clip_entropy(histogram: Histogram, format: Grid, clipping: Clipping) -> float:
    """Clip by the BF16 scale of least KL divergence (`entropy`); of equal ones the first of `candidate_scales`."""
    candidates = candidate_scales(histogram.amax, format)
    return float(candidates[np.argmin(entropy(histogram, format, candidates))]) * format.clip


def candidate_scales(amax: float, format: Grid) -> npt.NDArray[np.float32]:
    """All BF16 scales that may be the best, float32: the scale of `amax`, then those up to `CLIP_OCTAVES` octaves below
    it in falling order, then those up to an octave above it.

    No scale is below the smallest normal number. Under a scale larger than the amax's nothing saturates, and values may
    happen to lie nearer to the grid. An octave higher, the grid is the same but for one octave less of subnormals, so
    that no squared error is smaller from there on. Where scales are powers of two, none above the amax's is better.
    """
    top = int(scale_of(amax, format).view(np.uint32) >> 16)
    if format.power_of_two:
        top = min(top, int(LARGEST_POWER.view(np.uint32) >> 16))
        return magnitudes(np.arange(top, max(top - 128 * CLIP_OCTAVES, 0x80) - 1, -128))
    below = np.arange(top, max(top - 128 * CLIP_OCTAVES, 0x80) - 1, -1)
    above = np.arange(top + 1, min(top + 128, INFINITY))
    return magnitudes(np.concatenate([below, above]))


def bf16_ceil(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The smallest BF16 number not below each non-negative float32, as float32 of the same shape."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def power_of_two_ceil(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The smallest power of two not below each positive, normal float32, as float32 of the same shape."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


def powers_of_two(scales: npt.NDArray[np.float32]) -> bool:
    """Tell whether each of `scales`, positive float32, is a power of two."""
    return bool((power_of_two_ceil(scales) == scales).all())


def scale_of(clip: npt.ArrayLike, format: Grid, grid: ScaleGrid = "bf16") -> npt.NDArray[np.float32]:
    """The scale of a clip: FP32 clip / FP32 maximum of a code, rounded up to the grid of scales, float32 of the same
    shape.

    Scales are rounded up so that the clip itself never saturates, and to BF16 numbers so that every loader of the
    checkpoint, in BF16 or in FP32, has exactly this scale. A power of two is a BF16 number too; it makes dequantization
    exact, and wastes up to an octave of range. Two terms take powers of two whatever `grid` says, since they are exact
    under no other scale.
    """
    quotient = np.asarray(clip, np.float32) / np.float32(format.clip)
    if powers_alone(format, grid):
        return power_of_two_ceil(quotient)
    return bf16_ceil(quotient)


def powers_alone(format: Grid, grid: ScaleGrid) -> bool:
    """Tell whether scales must be powers of two: where `grid` asks for them, and where the format needs them."""
    return format.power_of_two or grid == "power-of-two"


#: The largest power of two of which every code is a BF16 number.
LARGEST_POWER = power_of_two_ceil(magnitudes(INFINITY - 1) / np.float32(E4M3.max)) / np.float32(2)
#: Scales below the smallest normal BF16 number are flushed to zero by some hardware.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
#: The scale of BF16's largest number.
LARGEST_SCALE = float(scale_of(magnitudes(INFINITY - 1), E4M3))


def amax_in_use(amax_batches: Float32s, clipping: Clipping) -> Float32s:
    """The amax that each batch's scale follows from, and that of a next batch, float32 [batches + 1].

    NaN where there is no history yet. `amax_batches` float32 [batches] in batch order, all measured.
    """
    batches = len(amax_batches)
    length = min(clipping.amax_history_len, batches) if clipping.amax_compute_algo == "max" else 1
    if not batches:
        return np.full(1, np.nan, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([np.zeros(length - 1, np.float32), amax_batches]), length
    )
    after = np.concatenate([[np.float32(0)], windows.max(axis=1)])  # of the history after t batches
    counts = np.arange(batches + 1)
    computed = np.where((counts % clipping.interval == 0) & (after > 0), counts, 0)  # a zero amax keeps the scale
    latest = np.maximum.accumulate(computed)
    in_use: Float32s = np.where(latest > 0, after[latest], np.nan).astype(np.float32)
    return in_use


def measured(amax_batches: Float32s) -> Float32s:
    """The amax of the batches that were measured, in their order."""
    amax: Float32s = amax_batches[~np.isnan(amax_batches)]
    return amax


@from_batches("delayed")
def clip_delayed(amax_batches: Float32s, clipping: Clipping) -> float:
    """The clip, before the margin, that the batch after the last would be quantized with.

    Raises InputError when no scale was ever computed, because `interval` is larger than the number of batches.
    """
    clip = float(amax_in_use(measured(amax_batches), clipping)[-1])
    if np.isnan(clip):
        raise no_scale(clipping, len(measured(amax_batches)))
    return clip


def no_scale(clipping: Clipping, batches: int) -> InputError:
    """Make the error for an interval of more than `batches` batches."""
    return InputError(
        f"--interval {clipping.interval}",
        f"no scale is computed in {batches} batches",
        "give a smaller one, or more --samples",
    )


def saturated_batches(amax_batches: Float32s, format: Grid, clipping: Clipping) -> npt.NDArray[np.bool_]:
    """Tell whether each batch with a history saturates under its delayed scale, bool [batches with a history]."""
    amax = measured(amax_batches)
    in_use = amax_in_use(amax, clipping)[:-1]
    judged = ~np.isnan(in_use)
    scale = np.ldexp(scale_of(in_use[judged], format, clipping.scale_grid).astype(np.float64), clipping.margin)
    saturated: npt.NDArray[np.bool_] = amax[judged] > scale * format.max
    return saturated


def largest_jump(amax_batches: Float32s) -> float:
    """The largest ratio of a batch's amax to that of the batch before; 1.0 for fewer than two batches.

    Batches whose amax is zero are left out.
    """
    amax = measured(amax_batches)
    amax = amax[amax > 0].astype(np.float64)
    return float((amax[1:] / amax[:-1]).max(initial=1.0))
