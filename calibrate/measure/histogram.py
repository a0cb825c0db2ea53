"""The exact histogram of a BF16 tensor's magnitudes.

A magnitude in BF16 has 2^15 = 32,768 bit patterns, which as integers have the order of the magnitudes. Counting each
pattern gives a histogram without bins: amax, every percentile and the error of any quantizer follow from it exactly,
afterwards, and two histograms merge by addition in any order. An ordinary histogram (ModelOpt, TensorRT: 2,048 bins up
to the amax so far) chooses its range before it has seen the data, and rounds each value to its bin.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

#: Number of bit patterns of a BF16 magnitude.
PATTERNS = 1 << 15
#: The pattern of infinity; smaller ones are finite, larger ones are NaN.
INFINITY = 0x7F80


def magnitudes(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The float32 values of BF16 magnitude patterns `bits` (integers in [0, 32768), any shape)."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, eq=False)
class Histogram:
    """The number of times that each magnitude occurred.

    `bits`: the patterns that occur, int16, ascending; `counts`: int64 of the same length.
    """

    bits: npt.NDArray[np.int16]
    counts: npt.NDArray[np.int64]

    @classmethod
    def from_dense(cls, counts: npt.NDArray[np.int64]) -> "Histogram":
        """Make a histogram of the counts of all patterns, int64 [32768]."""
        bits = np.flatnonzero(counts)
        return cls(bits.astype(np.int16), counts[bits].astype(np.int64))

    def dense(self) -> npt.NDArray[np.int64]:
        """The counts of all patterns, int64 [32768]."""
        counts = np.zeros(PATTERNS, np.int64)
        counts[self.bits] = self.counts
        return counts

    def __add__(self, other: "Histogram") -> "Histogram":
        """Add the counts of two histograms."""
        return Histogram.from_dense(self.dense() + other.dense())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Histogram)
            and np.array_equal(self.bits, other.bits)
            and np.array_equal(self.counts, other.counts)
        )

    __hash__ = None  # type: ignore[assignment]  # it holds arrays

    @cached_property
    def samples(self) -> int:
        """The number of values counted."""
        return int(self.counts.sum())

    @cached_property
    def infinities(self) -> int:
        """The number of counted values that are infinite."""
        return int(self.counts[self.bits == INFINITY].sum())

    @cached_property
    def nans(self) -> int:
        """The number of counted values that are NaN."""
        return int(self.counts[self.bits > INFINITY].sum())

    @cached_property
    def finite(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """The finite magnitudes that occur, float32 ascending, and their counts."""
        keep = self.bits < INFINITY
        return magnitudes(self.bits[keep]), self.counts[keep]

    @cached_property
    def amax(self) -> float:
        """The largest finite magnitude; 0.0 where there is none."""
        values, _ = self.finite
        return float(values[-1]) if len(values) else 0.0

    def percentile(self, q: float) -> float:
        """The smallest finite magnitude that at least `q` percent of the finite values do not exceed.

        That is NumPy's `inverted_cdf`: an observed value, never an interpolated one. Raises ValueError for q outside
        (0, 100] and for a histogram without finite values.
        """
        if not 0 < q <= 100:
            raise ValueError(f"a percentile lies in (0, 100], not {q}")
        values, counts = self.finite
        if not len(values):
            raise ValueError("a percentile needs at least one finite value")
        cumulative = np.cumsum(counts)
        return float(values[np.searchsorted(cumulative, q / 100 * float(cumulative[-1]))])
