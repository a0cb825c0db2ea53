"""The entropy clip against the definition, computed value by value with dictionaries."""

from collections import Counter
from math import inf, log

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.calibrate.measure.histogram import Histogram, magnitudes
from fp8q.options import Clipping
from fp8q.quantize.codes.formats import E4M3, E5M2, Format
from fp8q.quantize.scales.clip import clip_entropy, entropy, scale_of


def histogram_of(values: npt.NDArray[np.float32]) -> Histogram:
    return Histogram.from_dense(np.bincount(values.view(np.uint32) >> 16, minlength=1 << 15))


def bf16(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Magnitudes cut to BF16."""
    bits: npt.NDArray[np.uint32] = np.abs(np.asarray(values, np.float32)).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def definition(values: npt.NDArray[np.float32], scale: float, format: Format) -> float:
    """P and Q as the docstring has them, one value at a time."""
    inside = Counter(float(x) for x in values if float(x) <= scale * format.max)
    if not inside:
        return inf
    cell = {x: int(format.encode(np.float32(x) / np.float32(scale))) for x in inside}
    in_cell, kinds = Counter[int](), Counter(cell.values())
    for x, n in inside.items():
        in_cell[cell[x]] += n
    q = {x: in_cell[cell[x]] / kinds[cell[x]] / inside.total() for x in inside}
    p = dict(inside)
    p[max(p)] += len(values) - inside.total()
    return sum(n / len(values) * log(n / len(values) / q[x]) for x, n in p.items())


@pytest.mark.parametrize("format", [E4M3, E5M2])
@given(seed=st.integers(0, 1000), octave=st.integers(-9, 1), outlier=st.sampled_from([1, 50]))
@settings(max_examples=40)
def test_entropy_equals_its_definition_on_every_kind_of_scale(
    format: Format, seed: int, octave: int, outlier: int
) -> None:
    values = bf16(np.random.default_rng(seed).standard_t(4, 300))
    values[0] *= outlier
    scale = float(scale_of(values.max() * 2.0**octave, format))
    assert entropy(histogram_of(values), format, [scale])[0] == pytest.approx(
        definition(values, scale, format), rel=1e-9, abs=1e-12
    )


def test_a_value_on_a_midpoint_counts_in_the_cell_of_the_even_code() -> None:
    # 1.0625 goes down to 1, 1.1875 up to 1.25; there each is as many as its cell's mean says
    values = np.array([1, 1.0625, 1.0625, 1.125, 1.125, 1.1875, 1.25, 448], np.float32)
    expected = (log(1 / 1.5) + 2 * log(2 / 1.5)) / 8
    assert entropy(histogram_of(values), E4M3, [1.0])[0] == pytest.approx(expected)


def test_values_beyond_the_clip_are_counted_at_the_largest_that_is_within() -> None:
    values = np.array([1, 2, 448, 1000], np.float32)
    expected = 1 / 4 * log((1 / 4) / (1 / 3)) * 2 + 2 / 4 * log((2 / 4) / (1 / 3))
    assert entropy(histogram_of(values), E4M3, [1.0])[0] == pytest.approx(expected)


def test_a_scale_that_every_value_lies_beyond_is_infinitely_bad() -> None:
    assert entropy(histogram_of(np.array([1000.0, 2000], np.float32)), E4M3, [1.0]).tolist() == [inf]


@given(seed=st.integers(0, 1000), outlier=st.sampled_from([1, 1000]))
@settings(max_examples=15)
def test_the_entropy_clip_is_the_best_of_the_bf16_scales_up_to_an_octave_above_the_amaxs(
    seed: int, outlier: int
) -> None:
    values = bf16(np.random.default_rng(seed).normal(size=2000))
    values[0] *= outlier
    histogram = histogram_of(values)
    chosen = scale_of(clip_entropy(histogram, E4M3, Clipping("entropy")), E4M3)
    every = magnitudes(np.arange(0x80, 0x7F80))
    near = every[(every > histogram.amax / 448 / 2**8) & (every < 2 * scale_of(histogram.amax, E4M3))]
    assert entropy(histogram, E4M3, chosen[None])[0] <= entropy(histogram, E4M3, near).min() * (1 + 1e-12)


def test_one_value_alone_keeps_the_amax() -> None:
    assert (
        clip_entropy(histogram_of(np.array([3.0, 3.0], np.float32)), E4M3, Clipping("entropy"))
        == float(scale_of(3.0, E4M3)) * 448
    )
