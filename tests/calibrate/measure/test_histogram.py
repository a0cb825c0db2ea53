"""The exact histogram against NumPy on the raw values."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp8q.calibrate.measure.histogram import PATTERNS, Histogram, magnitudes

#: Zeros, infinities, the largest finite value and NaN, which patterns drawn from all would hardly ever be.
SPECIAL = (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F7F, 0x7FC0)
PATTERN_LISTS = hnp.arrays(np.uint16, st.integers(0, 60), elements=st.integers(0, 2**16 - 1) | st.sampled_from(SPECIAL))


def histogram_of(patterns: np.ndarray) -> Histogram:
    return Histogram.from_dense(np.bincount(patterns & 0x7FFF, minlength=PATTERNS))


def values_of(patterns: np.ndarray) -> np.ndarray:
    values: np.ndarray = np.abs(patterns.view(ml_dtypes.bfloat16).astype(np.float32))
    return values


@given(PATTERN_LISTS)
def test_counts_and_amax_are_numpys_on_the_raw_values(patterns: np.ndarray) -> None:
    histogram, values = histogram_of(patterns), values_of(patterns)
    assert histogram.samples == len(values)
    assert histogram.nans == np.isnan(values).sum()
    assert histogram.infinities == np.isinf(values).sum()
    assert histogram.amax == values[np.isfinite(values)].max(initial=0)


@given(PATTERN_LISTS, PATTERN_LISTS, PATTERN_LISTS)
def test_merging_is_associative_and_commutative_and_equals_counting_together(
    a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> None:
    x, y, z = map(histogram_of, (a, b, c))
    assert (x + y) + z == x + (y + z) == (z + y) + x == histogram_of(np.concatenate([a, b, c]))


@given(hnp.arrays(np.uint16, st.integers(1, 60), elements=st.integers(0, 0x7F7F)), st.floats(0.01, 100))
def test_percentile_is_numpys_inverted_cdf_on_the_raw_values(patterns: np.ndarray, q: float) -> None:
    expected = np.percentile(values_of(patterns).astype(np.float64), q, method="inverted_cdf")
    assert histogram_of(patterns).percentile(q) == expected


def test_magnitudes_are_the_values_of_the_patterns() -> None:
    assert magnitudes([0x0000, 0x3F80, 0x4000, 0x43E0]).tolist() == [0.0, 1.0, 2.0, 448.0]


@pytest.mark.parametrize("q", [0, -1, 100.1])
def test_a_percentile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match=rf"^a percentile lies in \(0, 100\], not {q}$"):
        histogram_of(np.array([0x3F80], np.uint16)).percentile(q)
