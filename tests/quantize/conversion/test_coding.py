"""Codes of rows and blocks, and their proof, against ml_dtypes and against codes that are wrong by one."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8q.core.errors import InputError
from fp8q.quantize.codes.blocks import block_values
from fp8q.quantize.codes.encoding import CODE
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.conversion.coding import CodedPart, encode_again, encode_part, largest_errors
from fp8q.quantize.weights.channels import quantize_weight

#: The error of a value in the middle of two codes whose significands are 1 and 1.125.
LARGEST = 0.0625 / 1.0625


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) * 0.1
    return (torch.randn(rows, columns, generator=generator) * spread).to(torch.bfloat16)


def expected(values: torch.Tensor, scales: Any) -> Any:
    return (values.float().numpy() / scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def test_rows_have_the_codes_and_scales_that_calibrate_writes() -> None:
    values = weight(70, 300)
    coded, usual = encode_part("w", values, blocks=None), quantize_weight(values, "amax")
    assert not hasattr(usual, "reason")
    assert np.array_equal(coded.scales[:, 0], usual.scale.numpy())
    assert np.array_equal(coded.codes, usual.codes.view(torch.uint8).numpy())


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 257), (300, 1100), (128, 2048)])
def test_blocks_at_the_edges_are_smaller(shape: tuple[int, int]) -> None:
    values = weight(*shape)
    coded = encode_part("w", values, blocks="bf16")
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    assert coded.scales.shape == grid
    for row in range(grid[0]):
        for column in range(grid[1]):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            largest = float(values[block].float().abs().max())
            scale = float(coded.scales[row, column])
            assert largest / 448 <= scale <= largest / 448 * (1 + 2**-7)
            assert np.array_equal(coded.codes[block], expected(values[block], np.float32(scale)))


@pytest.mark.parametrize("columns", [1024, 1100, 2048])
def test_blocks_of_any_width_are_coded_again_and_proven(columns: int) -> None:
    """More than 1,024 columns are coded in pieces, which are views with gaps of numbers that are in FP32 already."""
    before = encode_part("w", weight(130, columns), blocks="bf16")
    codes = torch.from_numpy(before.codes).view(CODE)
    again = encode_again("w", codes, before.scales)
    assert 0 < again.errors.steps <= 0.5
    assert np.array_equal(again.scales, np.exp2(np.ceil(np.log2(before.scales))))
    numbers = block_values(codes, torch.from_numpy(before.scales))
    spread = np.repeat(np.repeat(again.scales, 128, 0), 128, 1)[:130, :columns]
    assert np.array_equal(again.codes, expected(numbers, spread))


@given(st.integers(0, 2**31), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_the_proof_finds_half_a_step_at_most(seed: int, kind: torch.dtype) -> None:
    coded: CodedPart = encode_part("w", weight(16, 64, seed).to(kind), blocks=None)
    assert 0 < coded.errors.steps <= 0.5
    assert 0 < coded.errors.relative <= LARGEST * (1 + 1e-6)


def test_the_proof_states_the_largest_error_of_all_bf16_numbers() -> None:
    """Between the smallest and the largest code, under the scale 1: half a step, at 1.0625 and at odd multiples."""
    bits = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = bits[bits.float() <= 448].float()
    both = torch.cat([values, -values])
    codes = both.to(torch.float8_e4m3fn)
    found = largest_errors(both.clone(), codes)
    assert found.steps == 0.5
    assert found.relative == pytest.approx(LARGEST, abs=1e-7)


@pytest.mark.parametrize("change", [-1, 1, 128])
def test_every_code_that_is_off_by_one_or_by_its_sign_is_found(change: int) -> None:
    finite = np.flatnonzero(np.isfinite(E4M3.values)).astype(np.uint8)
    for code in finite:
        wrong = (int(code) + change) % 256
        if code in (0, 128) and wrong in (0, 128):
            continue  # both are zero
        quotient = torch.tensor([[float(E4M3.values[code]), 1.0]])
        codes = torch.tensor([[wrong, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert not largest_errors(quotient, codes).steps <= 0.5, (code, wrong)


def test_a_row_of_zeros_has_codes_of_zero_and_a_positive_scale() -> None:
    values = weight(4, 64)
    values[2] = 0
    coded = encode_part("w", values, blocks=None)
    assert not coded.codes[2].any()
    assert float(coded.scales[2, 0]) == 2.0**-126


@pytest.mark.parametrize(("wrong", "told"), [(float("nan"), "1 NaN and 0 Inf"), (float("-inf"), "0 NaN and 1 Inf")])
def test_a_value_that_is_not_finite_is_refused(wrong: float, told: str) -> None:
    values = weight(4, 64)
    values[1, 2] = wrong
    with pytest.raises(InputError, match=f"^up: holds {told} in BF16 among 256 values; take an earlier checkpoint"):
        encode_part("up", values, blocks=None)
