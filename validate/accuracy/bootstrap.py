"""Bootstrap intervals of means over tokens: windows are resampled, since the tokens of a window are not independent.

The percentile method (Efron 1979), with a fixed seed. One value for each token, such as the difference of its losses in
two runtimes, makes a paired comparison, which removes the difficulty of the text.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...options import LEAST_WINDOWS
from .document import Estimate

#: The share of intervals that should hold the truth, and the number of resamples.
CONFIDENCE = 0.95
DRAWS = 2000


class MeanInterval(NamedTuple):
    """A mean, and the ends of its interval; NaN where there is nothing."""

    mean: float
    low: float
    high: float

    @property
    def estimate(self) -> Estimate:
        """The interval as documents have it."""
        return Estimate(**self._asdict())


class Bootstrap:
    """Resamples of the windows of some tokens, the same for all values of these tokens."""

    def __init__(self, windows: npt.NDArray[np.intp]):
        """Resample `windows` [tokens], the window of each token; with a single window, resample its tokens."""
        names, self._index = np.unique(windows, return_inverse=True)
        if len(names) == 1:
            self._index = np.arange(len(windows))
        self._count = int(self._index.max()) + 1
        random = np.random.default_rng(0)
        self._drawn = random.multinomial(self._count, np.full(self._count, 1 / self._count), DRAWS)

    def interval(self, values: npt.NDArray[np.float64]) -> MeanInterval:
        """Return the mean of `values` [tokens] and its interval; NaN are left out."""
        known = np.isfinite(values)
        if not known.any():
            return MeanInterval(*[float("nan")] * 3)
        sums = np.bincount(self._index, np.where(known, values, 0.0), self._count)
        counts = np.bincount(self._index, known.astype(np.float64), self._count)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile((self._drawn @ sums) / np.maximum(self._drawn @ counts, 1), [tail, 1 - tail])
        return MeanInterval(float(sums.sum() / counts.sum()), float(low), float(high))

    def ratio(self, above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> tuple[float, float]:
        """Return the ends of the interval of sum(`above`) / sum(`below`), both [tokens]; infinite without `below`."""
        upper, lower = (self._drawn @ np.bincount(self._index, values, self._count) for values in (above, below))
        quotients = np.divide(upper, lower, out=np.full(DRAWS, np.inf), where=lower != 0)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(quotients, [tail, 1 - tail], method="inverted_cdf")
        return float(low), float(high)


def paired(base: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Return the windows in which both have a scored token."""
    return np.flatnonzero((~np.isnan(base) & ~np.isnan(other)).any(axis=1))


def increase_interval(
    base: npt.NDArray[np.float32], other: npt.NDArray[np.float32]
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the perplexity's relative increase, from the same tokens in both: NLL float32
    [windows, context], nats, NaN: not scored.

    The pairing removes the difficulty of a text, which varies a hundred times more than FP8 adds. None below
    `LEAST_WINDOWS` windows that both have.
    """
    windows = paired(base, other)
    if len(windows) < LEAST_WINDOWS:
        return None, None
    base = base[windows]
    other = other[windows]
    scored = ~np.isnan(base) & ~np.isnan(other)
    bootstrap = Bootstrap(np.nonzero(scored)[0])
    _, low, high = bootstrap.interval(other[scored].astype(np.float64) - base[scored])
    return float(np.expm1(low)), float(np.expm1(high))


def increase_halves(base: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> list[float] | None:
    """Return the perplexity's relative increase on every second window that both have, and on the others; NLL float32
    [windows, context], nats, NaN: not scored. None below two windows.

    Their difference is the effect that the choice of text alone has on an increase.
    """
    windows = paired(base, other)
    if len(windows) < 2:
        return None
    halves = [other[some].astype(np.float64) - base[some] for some in (windows[::2], windows[1::2])]
    return [float(np.expm1(np.nanmean(half))) for half in halves]
