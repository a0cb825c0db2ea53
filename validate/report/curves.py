"""The numbers behind the pictures: densities on the logarithm of the magnitude, where the error comes from, the loss
along the window.

A density per octave (share of the whole in a bar, divided by the bar's width in octaves) is what may be compared
between bars of different widths, and areas under two such curves are shares of two wholes.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.histogram import Histogram, magnitudes
from ...quantize.codes.formats import E4M3, CodeGrid, Format

Floats = npt.NDArray[np.float64]
#: BF16 patterns in one bar of a histogram: an eighth of an octave, as wide as E4M3's steps.
PATTERNS_A_BAR = 16
#: The octaves of the code that a sparkline spans: E4M3 from below its smallest value to above its largest.
SPARK_LEFT = -12
SPARK_RIGHT = 10


def density(histogram: Histogram, patterns: int = PATTERNS_A_BAR) -> tuple[Floats, Floats]:
    """Bars of `patterns` BF16 patterns: their edges in octaves (log2 of the magnitude), float64 [bars + 1], and the
    share of the values an octave, [bars].

    The value zero has no octave and the subnormal numbers no place on such an axis: they are left out, but count among
    the values.
    """
    values, counts = histogram.finite
    normal = values >= np.finfo(np.float32).tiny
    bars = histogram.bits[: len(values)][normal] // patterns
    first = int(bars.min())
    last = int(bars.max())
    edges = np.log2(magnitudes(np.arange(first, last + 2) * patterns).astype(np.float64))
    totals = np.bincount(bars - first, counts[normal].astype(np.float64), last - first + 1)
    return edges, totals / counts.sum() / np.diff(edges)


def errors(histogram: Histogram, scale: float, grid: CodeGrid = E4M3) -> tuple[npt.NDArray[np.uint8], Floats]:
    """The (first) code that each finite pattern gets at `scale`, uint8 [patterns], and the squared error its values
    add, float64 [patterns].
    """
    values, counts = histogram.finite
    quotients = values / np.float32(scale)
    codes = grid.codes.encode(quotients)
    rounded = grid.round(quotients).astype(np.float64)
    return codes, (values.astype(np.float64) - rounded * scale) ** 2 * counts


def error_density(histogram: Histogram, scale: float, grid: CodeGrid = E4M3) -> tuple[Floats, Floats]:
    """The sources of the squared error, as bars: one for each nonzero (first) code, as wide as its rounding interval;
    edges in octaves and shares an octave.

    Values that round to zero are left out, but count in the total. The last bar reaches to amax, so that it includes
    saturation.
    """
    codes, error = errors(histogram, scale, grid)
    midpoints = grid.codes.midpoints.astype(np.float64)
    edges = np.log2(np.append(scale * midpoints, max(histogram.amax, scale * grid.max)))
    totals = np.bincount(codes, error, len(midpoints) + 1)[1:]
    return edges, totals / (error.sum() or 1.0) / np.diff(edges)


@dataclass(frozen=True)
class ErrorShares:
    """Fractions of the squared error made by values beyond the clip, by values that round to zero, and by rounding in
    between.
    """

    saturation: float
    underflow: float
    rounding: float


def error_shares(histogram: Histogram, scale: float, grid: CodeGrid = E4M3) -> ErrorShares:
    """Split the squared error at `scale` by its cause; without any error all shares are zero."""
    _, error = errors(histogram, scale, grid)
    values = histogram.finite[0]
    total = float(error.sum()) or 1.0
    beyond = values > scale * grid.max
    zeroed = values <= np.float64(scale) * grid.midpoints[0]
    return ErrorShares(
        float(error[beyond].sum()) / total,
        float(error[zeroed].sum()) / total,
        float(error[~beyond & ~zeroed].sum()) / total,
    )


def rounding_alone_db(format: Format = E4M3) -> float:
    """Signal to noise, in dB, of values spread evenly over the logarithm, without saturation and underflow: what the
    mantissa alone allows.

    In an octave [1, 2) with density 1/(x ln 2) the mean square is 3/(2 ln 2); rounding to steps of 2^-m adds 2^-2m/12.
    """
    return float(10 * np.log10(18 / np.log(2) * 4.0**format.mantissa_bits))


def sparkline(histogram: Histogram, scale: float) -> str:
    """The SVG path of a word-sized histogram, in octaves of the code (|x| / scale) from `SPARK_LEFT` to `SPARK_RIGHT`,
    one unit high.

    Every tensor is drawn on the same axis, so that a column of them shows who leaves the format's range unused.
    """
    edges, heights = density(histogram, 4 * PATTERNS_A_BAR)
    x = np.clip(edges - np.log2(scale), SPARK_LEFT, SPARK_RIGHT)
    y = 1 - heights / heights.max()
    steps = "".join(
        f"V{height:.2f}H{right:.1f}" for height, left, right in zip(y, x[:-1], x[1:], strict=True) if right > left
    )
    return f"M{x[0]:.1f} 1{steps}V1Z"


@dataclass(frozen=True)
class Curve:
    """A quantity along the window: float64 [spans] each; `low` and `high` two standard errors away, NaN where one
    window is all there is.
    """

    position: Floats
    mean: Floats
    low: Floats
    high: Floats


def along_window(values: npt.NDArray[np.floating], spans: int) -> Curve:
    """Mean of `values` [windows, context] (NaN: not scored) in `spans` equal spans of positions; spans without scored
    tokens are left out.

    Tokens of one window are not independent, so the standard error is computed from the means of windows.
    """
    scored = ~np.isnan(values)
    scored_spans = [span for span in np.array_split(np.arange(values.shape[1]), spans) if scored[:, span].any()]
    means = np.full(len(scored_spans), np.nan)
    standard_errors = np.full(len(scored_spans), np.nan)
    for i, span in enumerate(scored_spans):
        inside = values[scored[:, span].any(axis=1)][:, span].astype(np.float64)
        means[i] = np.nanmean(inside)
        if len(inside) > 1:
            standard_errors[i] = np.nanmean(inside, axis=1).std(ddof=1) / np.sqrt(len(inside))
    return Curve(
        np.array([span.mean() for span in scored_spans]),
        means,
        means - 2 * standard_errors,
        means + 2 * standard_errors,
    )
