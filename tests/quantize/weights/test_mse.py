"""The scale search for weights against brute force: every BF16 scale of six octaves, by another method
(`clip.squared_error`).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.calibrate.measure.histogram import PATTERNS, Histogram, magnitudes
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.clip import scale_of, squared_error
from fp8q.quantize.weights.mse import BLOCK, mse_scales


def gauss(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def rows_of_every_kind() -> dict[str, torch.Tensor]:
    normal = gauss(1, 700, 0)[0]
    outlier = normal * 1e-5
    outlier[3] = 1.7
    return {
        "normal": normal,
        "heavy tails": gauss(1, 700, 1)[0] / gauss(1, 700, 2)[0].abs(),
        "one outlier over subnormals": outlier,
        "spread over thirty octaves": torch.exp2(-30 * torch.rand(700, generator=torch.Generator().manual_seed(3))),
        "all vanish but one": torch.cat([torch.full((699,), 2.0**-23), torch.ones(1)]),
        "powers of two": torch.exp2(torch.arange(700) % 6),
        "one value": torch.cat([torch.tensor([1.37]), torch.zeros(699)]),
        "amax just below a power of two": torch.cat([normal.clamp(-1, 1), torch.tensor([1.9921875])])[1:],
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
    }


def error_over_best(row: torch.Tensor, scale: np.float32) -> tuple[float, float]:
    """The squared error of `row` at `scale`, and the least at any BF16 scale within three octaves of the amax scale."""
    histogram = Histogram.from_dense(torch.bincount(row.abs().view(torch.int16), minlength=PATTERNS).numpy())
    pattern = int(scale_of(histogram.amax, E4M3).view(np.uint32) >> 16)
    every = magnitudes(np.arange(max(pattern - 3 * 128, 0x80), pattern + 3 * 128))
    return squared_error(histogram, E4M3, [scale])[0], squared_error(histogram, E4M3, every).min()


@pytest.mark.parametrize("kind", rows_of_every_kind())
def test_no_bf16_scale_of_six_octaves_errs_less(kind: str) -> None:
    row = rows_of_every_kind()[kind].to(torch.bfloat16)
    (scale,) = mse_scales(row[None])
    error, best = error_over_best(row, np.float32(scale))
    energy = float(row.double().square().sum())
    assert error <= best * (1 + 1e-5) + 1e-13 * energy  # the oracle subtracts sums of the size of the energy


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(2.0**-24, 1, width=32), min_size=1, max_size=60), st.integers(-60, 60))
def test_no_bf16_scale_errs_less_on_any_row(values: list[float], exponent: int) -> None:
    row = (torch.tensor(values) * 2.0**exponent).to(torch.bfloat16)
    error, best = error_over_best(row, np.float32(mse_scales(row[None])[0]))
    assert error <= best * (1 + 1e-5) + 1e-13 * float(row.double().square().sum())


def test_a_single_value_gets_a_scale_that_holds_it_exactly() -> None:
    """1.375 · 2^k is a code (mantissa 3/8), which the amax scale, 1.375 · 2^k / 448, is no power of two for."""
    row = torch.zeros(1, 64, dtype=torch.bfloat16)
    row[0, 5] = 1.375
    (scale,) = mse_scales(row)
    assert float((row[0, 5].float() / scale).to(torch.float8_e4m3fn).float() * scale) == 1.375


def test_each_row_is_searched_by_itself_whatever_lies_around_it() -> None:
    weight = torch.cat([torch.logspace(-6, 6, BLOCK + 5)[:, None] * gauss(BLOCK + 5, 300, 4)]).to(torch.bfloat16)
    together = mse_scales(weight)
    alone = np.concatenate([mse_scales(row[None]) for row in weight[:: BLOCK // 8]])
    np.testing.assert_array_equal(together[:: BLOCK // 8], alone)


def test_scales_are_bf16_numbers_and_signs_do_not_matter() -> None:
    weight = gauss(20, 256, 5).to(torch.bfloat16)
    scales = mse_scales(weight)
    assert not (scales.numpy().view(np.uint32) & 0xFFFF).any()
    np.testing.assert_array_equal(scales, mse_scales(-weight.abs()))


def test_a_transposed_matrix_is_read_by_its_rows() -> None:
    weight = gauss(64, 48, 6).to(torch.bfloat16)
    np.testing.assert_array_equal(mse_scales(weight.t()), mse_scales(weight.t().contiguous()))


def test_rows_at_the_bottom_of_bf16_take_their_amax_scale() -> None:
    row = torch.tensor([[1.0e-36, 3.0e-37, 0.0]]).to(torch.bfloat16)
    np.testing.assert_array_equal(mse_scales(row), scale_of(row.float().amax(1).numpy(), E4M3))


def test_the_search_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    mse_scales(torch.ones(3, 8, dtype=torch.bfloat16))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", rows_of_every_kind())
def test_no_power_of_two_errs_less(kind: str) -> None:
    row = rows_of_every_kind()[kind].to(torch.bfloat16)
    scale = np.float32(mse_scales(row[None], "power-of-two")[0])
    assert np.frexp(scale)[0] == 0.5
    histogram = Histogram.from_dense(torch.bincount(row.abs().view(torch.int16), minlength=PATTERNS).numpy())
    powers = np.ldexp(scale, np.arange(-4, 5)).astype(np.float32)
    powers = powers[powers >= np.finfo(np.float32).tiny]
    energy = float(row.double().square().sum())
    errors = squared_error(histogram, E4M3, powers)
    assert squared_error(histogram, E4M3, [scale])[0] <= errors.min() * (1 + 1e-5) + 1e-13 * energy
