"""Intervals of means over tokens: whole windows are drawn again, since the tokens of one are not independent.

The percentile method (Efron 1979), with a fixed seed. A value for each token, such as the difference of two losses of
it, pairs what is compared, which removes the difficulty of the text.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: What share of such intervals should hold the truth, and how often windows are drawn.
CONFIDENCE, DRAWS = 0.95, 2000


class MeanInterval(NamedTuple):
    """A mean, and the ends of its interval; NaN where there is nothing."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """The windows of some tokens, drawn again in one way for all values of these tokens."""

    def __init__(self, windows: npt.NDArray[np.intp]):
        """`windows` [tokens]: the window of each. Of one window the tokens are drawn instead."""
        names, self._index = np.unique(windows, return_inverse=True)
        if len(names) == 1:
            self._index = np.arange(len(windows))
        self._count = int(self._index.max()) + 1
        random = np.random.default_rng(0)
        self._drawn = random.multinomial(self._count, np.full(self._count, 1 / self._count), DRAWS)

    def interval(self, values: npt.NDArray[np.float64]) -> MeanInterval:
        """The mean of `values` [tokens] and its interval; NaN are left out."""
        known = np.isfinite(values)
        if not known.any():
            return MeanInterval(*[float("nan")] * 3)
        sums = np.bincount(self._index, np.where(known, values, 0.0), self._count)
        counts = np.bincount(self._index, known.astype(np.float64), self._count)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile((self._drawn @ sums) / np.maximum(self._drawn @ counts, 1), [tail, 1 - tail])
        return MeanInterval(float(sums.sum() / counts.sum()), float(low), float(high))

    def ratio(self, above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> tuple[float, float]:
        """The ends of the interval of sum(`above`) / sum(`below`), both [tokens]; infinite without `below`."""
        upper, lower = (self._drawn @ np.bincount(self._index, each, self._count) for each in (above, below))
        quotients = np.divide(upper, lower, out=np.full(DRAWS, np.inf), where=lower != 0)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(quotients, [tail, 1 - tail], method="inverted_cdf")
        return float(low), float(high)
