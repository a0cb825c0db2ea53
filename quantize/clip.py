"""Where to clip: pure functions of an exact histogram and a format, evaluated on the real grid.

The squared error of a scale s needs no pass over the values. Cut the sorted magnitudes at the midpoints of the scaled grid;
in the cell of grid value g, with count n, sum a and sum of squares b, the error is b - 2(gs)a + (gs)²n. Prefix sums of n, a and b
give all cells at once, so one candidate costs one search among the occurring magnitudes for each midpoint (126 for E4M3),
and the optimum is searched on every BF16 scale there is, not on a coarse grid. A value on a midpoint errs equally both
ways, so ties do not matter. Sums are float64: the error, 1e-3 of the energy, keeps ten digits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ..calibrate.histogram import Histogram, magnitudes
from .formats import Format

Method = Literal["amax", "mse", "percentile"]
METHODS: tuple[str, ...] = get_args(Method)
#: The optimum lies between amax / 2^CLIP_OCTAVES and amax for any distribution worth quantizing.
CLIP_OCTAVES = 10


@dataclass(frozen=True)
class Clipping:
    """How the clip of an activation is chosen; `percentile` is used by that method alone, in percent."""

    method: Method = "amax"
    percentile: float = 99.99


def squared_error(histogram: Histogram, format: Format, scales: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Sum over all finite values of (value - dequantized)², float64 [len(scales)], for float32 `scales` [candidates]."""
    values, counts = histogram.finite
    x, n = values.astype(np.float64), counts.astype(np.float64)
    prefix = np.zeros((3, len(x) + 1))
    np.cumsum(np.stack([n, n * x, n * x * x]), axis=1, out=prefix[:, 1:])
    s = np.asarray(scales, np.float64).reshape(-1, 1)
    cuts = np.searchsorted(x, s * format.midpoints.astype(np.float64))
    edges = np.concatenate([np.zeros_like(cuts[:, :1]), cuts, np.full_like(cuts[:, :1], len(x))], axis=1)
    n_cell, a_cell, b_cell = np.diff(prefix[:, edges], axis=2)
    g = s * format.grid.astype(np.float64)
    error: npt.NDArray[np.float64] = np.maximum((b_cell - 2 * g * a_cell + g * g * n_cell).sum(axis=1), 0)
    return error


def sqnr_db(histogram: Histogram, format: Format, scale: float) -> float:
    """Signal-to-quantization-noise ratio of the finite values at `scale`, in dB; infinite where the error is zero."""
    values, counts = histogram.finite
    signal = float((values.astype(np.float64) ** 2 * counts).sum())
    noise = float(squared_error(histogram, format, [scale])[0])
    return 10 * float(np.log10(signal / noise)) if noise > 0 else float("inf")


def saturation(histogram: Histogram, format: Format, scale: float) -> float:
    """Share of the finite values beyond the clip, a fraction."""
    values, counts = histogram.finite
    return float(counts[values > np.float64(scale) * format.max].sum() / max(counts.sum(), 1))


def underflow(histogram: Histogram, format: Format, scale: float) -> float:
    """Share of the finite, non-zero values that round to code 0, a fraction."""
    values, counts = histogram.finite
    lost = counts[(values > 0) & (values <= np.float64(scale) * format.midpoints[0])].sum()
    return float(lost / max(counts[values > 0].sum(), 1))


def clip_amax(histogram: Histogram, format: Format, clipping: Clipping) -> float:
    """The largest finite magnitude: nothing saturates."""
    return histogram.amax


def clip_percentile(histogram: Histogram, format: Format, clipping: Clipping) -> float:
    """The observed magnitude at `clipping.percentile`."""
    return histogram.percentile(clipping.percentile)


def clip_mse(histogram: Histogram, format: Format, clipping: Clipping) -> float:
    """The clip of the BF16 scale with the least squared error; of equals the largest, for headroom."""
    top = int(bf16_ceil(np.float32(histogram.amax) / np.float32(format.max)).view(np.uint32) >> 16)
    candidates = magnitudes(np.arange(max(top - 128 * CLIP_OCTAVES, 0x80), top + 1))[::-1]
    best = candidates[np.argmin(squared_error(histogram, format, candidates))]
    return float(best) * format.max


CLIPPERS: dict[str, Callable[[Histogram, Format, Clipping], float]] = {"amax": clip_amax, "mse": clip_mse, "percentile": clip_percentile}


def bf16_ceil(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The smallest BF16 number not below each non-negative float32, as float32 of the same shape."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def scale_of(clip: npt.ArrayLike, format: Format) -> npt.NDArray[np.float32]:
    """The scale of a clip: FP32 clip / FP32 maximum, rounded up to the BF16 grid, float32 of the same shape.

    Rounded up so that the clip itself never saturates; on the BF16 grid so that whoever loads the checkpoint, in BF16 or in FP32,
    holds this very number.
    """
    return bf16_ceil(np.asarray(clip, np.float32) / np.float32(format.max))
