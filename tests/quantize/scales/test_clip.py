"""Clips as functions of the exact histogram, against brute force on the raw values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.calibrate.measure.histogram import PATTERNS, Histogram
from fp8q.options import Clipping
from fp8q.quantize.codes.formats import E4M3, E5M2, INT8, Format
from fp8q.quantize.scales.clip import (
    bf16_ceil,
    clip_mse,
    clip_percentile,
    saturation,
    scale_of,
    sqnr_db,
    squared_error,
    underflow,
)


def sample(seed: int, outliers: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4096, generator=generator)
    x[:4] *= outliers
    return x.to(torch.bfloat16)


def histogram_of(x: torch.Tensor) -> Histogram:
    return Histogram.from_dense(torch.bincount(x.abs().view(torch.int16).flatten(), minlength=PATTERNS).numpy())


def brute_force(x: torch.Tensor, scale: float, format: Format = E4M3) -> float:
    values = x.float().numpy()
    rounded = format.decode(format.encode(values / np.float32(scale))).astype(np.float64) * scale
    return float(((values - rounded) ** 2).sum())


@pytest.mark.parametrize("format", [E4M3, E5M2])
@given(seed=st.integers(0, 1000), scale=st.floats(1e-4, 1.0))
@settings(max_examples=30)
def test_squared_error_equals_quantizing_every_value(format: Format, seed: int, scale: float) -> None:
    scale = float(np.float32(scale))
    x = sample(seed, outliers=30)
    assert squared_error(histogram_of(x), format, [scale])[0] == pytest.approx(brute_force(x, scale, format), rel=1e-5)


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1.0))
@settings(max_examples=30)
def test_squared_error_on_the_integers_equals_rounding_every_value(seed: int, scale: float) -> None:
    scale = float(bf16_ceil(scale))
    x = sample(seed, outliers=30)
    values = x.double().numpy()
    rounded = np.clip(np.rint(values / scale), -127, 127) * scale
    assert squared_error(histogram_of(x), INT8, [scale])[0] == pytest.approx(((values - rounded) ** 2).sum(), rel=1e-9)


@given(seed=st.integers(0, 1000), outliers=st.sampled_from([1.0, 10.0, 1000.0]))
@settings(max_examples=20)
def test_the_mse_clip_is_no_worse_than_any_scale_of_a_fine_grid(seed: int, outliers: float) -> None:
    x = sample(seed, outliers)
    histogram = histogram_of(x)
    clip = clip_mse(histogram, E4M3, Clipping("mse"))
    chosen = squared_error(histogram, E4M3, scale_of(clip, E4M3)[None])[0]
    fine = scale_of(np.geomspace(histogram.amax / 500, histogram.amax * 8, 4000), E4M3)
    assert chosen <= squared_error(histogram, E4M3, fine).min() * (1 + 1e-12)


def test_the_mse_clip_may_lie_above_the_amax() -> None:
    x = torch.cat([torch.full((100,), 3.5), torch.full((100_000,), 1.65625)]).to(torch.bfloat16)
    histogram = histogram_of(x)
    scale = float(scale_of(clip_mse(histogram, E4M3, Clipping("mse")), E4M3))
    assert scale * E4M3.max > 3.5
    chosen, of_amax = squared_error(histogram, E4M3, [scale, float(scale_of(3.5, E4M3))])
    assert 10 * chosen < of_amax


def test_the_mse_clip_may_lie_far_below_the_amax_worked_by_hand() -> None:
    """One value of 448, and 10^12 of 2^-11, which at the scale of 1 round to zero, and at s up to 1/2 to s · 2^-9.

    (448 - 448 s)² + 10^12 · 2^-18 (s - 1/4)² is least where 448² (1 - s) = 10^12 · 2^-18 (s - 1/4), at s = 0.2875.
    """
    bits = np.array([2.0**-11, 448.0], np.float32).view(np.uint32) >> 16
    histogram = Histogram(bits.astype(np.int16), np.array([10**12, 1], np.int64))
    clip = clip_mse(histogram, E4M3, Clipping("mse"))
    assert clip / 448 == pytest.approx(0.2875, abs=2**-9)


def test_mse_keeps_the_amax_where_clipping_gains_nothing() -> None:
    x = torch.tensor([448.0, 1.0, 2.0]).to(torch.bfloat16)
    assert clip_mse(histogram_of(x), E4M3, Clipping("mse")) == 448.0


def test_percentile_clips_at_the_observed_value() -> None:
    x = torch.arange(1, 101).to(torch.bfloat16)
    assert clip_percentile(histogram_of(x), E4M3, Clipping("percentile", 90)) == 90


def test_saturation_and_underflow_are_shares_of_the_values_beyond_the_grid() -> None:
    x = torch.tensor([0.0, 2.0**-10, 2.0**-9, 1.0, 448.0, 450.0, 896.0, -900.0]).to(torch.bfloat16)
    histogram = histogram_of(x)
    assert saturation(histogram, E4M3, 1.0) == 3 / 8  # 450, 896 and -900
    assert underflow(histogram, E4M3, 1.0) == 1 / 7  # 2^-10 lies on the midpoint and rounds to the even code, 0


def test_there_is_no_sqnr_where_every_value_is_on_the_grid() -> None:
    assert sqnr_db(histogram_of(torch.tensor([1.0, 1.125, 448.0]).to(torch.bfloat16)), E4M3, 1.0) is None


def test_sqnr_of_one_rounded_value_by_hand() -> None:
    x = torch.tensor([1.0625]).to(torch.bfloat16)  # between 1 and 1.125, to the even: 1
    assert sqnr_db(histogram_of(x), E4M3, 1.0) == pytest.approx(20 * np.log10(1.0625 / 0.0625))


@given(st.floats(2.0**-110, 2.0**120, width=32))
def test_scales_lie_on_the_bf16_grid_and_never_saturate_their_clip(clip: float) -> None:
    scale = scale_of(clip, E4M3)
    assert scale.view(np.uint32) & 0xFFFF == 0
    assert np.float32(clip) / scale <= E4M3.max
    assert scale <= np.float32(clip) / np.float32(448) * np.float32(1 + 2.0**-7)


def test_bf16_ceil_leaves_bf16_numbers_alone_and_rounds_others_up() -> None:
    assert bf16_ceil([1.0, 1.0 + 2.0**-20, 0.0]).tolist() == [1.0, 1.0 + 2.0**-7, 0.0]
