"""The reference linear layer against arithmetic on the codes, and against torch's own scaled GEMM."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays
from hypothesis.strategies import floats
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8q.options import Accumulator
from fp8q.quantize.codes.encoding import CODE, code_tables, code_values, encode, encode_two, two_code_values
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.codes.gemm import scaled_gemm
from fp8q.quantize.reference.linear import FP8Linear, Mode


def layer(mode: Mode, bias: bool = False, seed: int = 0) -> tuple[FP8Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight_scale = torch.rand(24, generator=generator) * 0.01 + 0.001
    codes = (torch.randn(24, 64, generator=generator) * 100).clamp(-448, 448).to(CODE)
    input_scale = torch.tensor(0.0123)
    offset = torch.randn(24, generator=generator) if bias else None
    return FP8Linear(codes, weight_scale, input_scale, offset, mode), codes, weight_scale, input_scale


@pytest.mark.parametrize("bias", [False, True])
def test_exact_mode_is_the_formula_in_float64(bias: bool) -> None:
    linear, codes, weight_scale, input_scale = layer("exact", bias)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    quantized = torch.from_numpy(E4M3.decode(E4M3.encode((x / input_scale).numpy()))).double()
    expected = quantized @ codes.double().T * (input_scale * weight_scale).double()
    expected += 0 if linear.bias is None else linear.bias.double()
    torch.testing.assert_close(linear(x).double(), expected, rtol=2e-6, atol=1e-6)


def test_fast_mode_differs_from_exact_by_one_rounding_of_the_sum_to_bf16() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    fast, exact = layer("fast")[0](x).double(), layer("exact")[0](x.float()).double()
    assert ((fast - exact).abs() <= exact.abs() * 2.0**-7).all()


def test_the_table_gives_every_bf16_pattern_its_code() -> None:
    scale = torch.tensor(0.0371)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    expected = E4M3.decode(E4M3.encode((patterns.float() / scale).numpy()))
    torch.testing.assert_close(
        code_tables(scale, 1)[0].float(), torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True
    )


@given(
    x=arrays(np.float32, 64, elements=floats(width=32)),
    scale=floats(2.0**-40, 2.0**40, width=32),
)
def test_the_values_of_codes_are_what_the_reference_decodes(x: npt.NDArray[np.float32], scale: float) -> None:
    with np.errstate(over="ignore", under="ignore"):
        expected = E4M3.decode(E4M3.encode(x / np.float32(scale)))
    found = code_values(torch.from_numpy(x), torch.tensor(scale))
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert (np.signbit(expected) == torch.signbit(found).numpy())[numbers].all()


def test_the_values_of_codes_are_right_at_and_beside_every_midpoint() -> None:
    edges = np.concatenate([E4M3.grid, E4M3.midpoints])
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1e9))])
    x = np.concatenate([edges, -edges])
    expected = torch.from_numpy(E4M3.decode(E4M3.encode(x)))
    torch.testing.assert_close(code_values(torch.from_numpy(x), torch.ones(())), expected, rtol=0, atol=0)
    first, second = two_code_values(torch.from_numpy(x), torch.ones(()))
    for found, codes in zip((first, second), encode_two(torch.from_numpy(x), torch.ones(())), strict=True):
        torch.testing.assert_close(found, codes.float(), rtol=0, atol=0)


def test_the_quotient_is_taken_in_fp32_not_in_bf16() -> None:
    x, scale = torch.tensor([1.1640625], dtype=torch.bfloat16), torch.tensor(0.0123)
    assert encode(x, scale).float().item() == E4M3.decode(E4M3.encode([x.float().item() / 0.0123])).item()


def test_a_gpu_s_scaled_product_gives_the_sum_that_exact_mode_accumulates() -> None:
    _, codes, _, input_scale = layer("exact")
    x = encode(torch.randn(16, 64, generator=torch.Generator().manual_seed(2)), input_scale)
    torch.testing.assert_close(scaled_gemm(x, codes).double(), x.double() @ codes.double().T, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(("width", "out"), [(172, 24), (64, 7), (1, 1), (48, 32)])
def test_a_scaled_product_of_any_width_is_the_sum_of_its_own_codes(width: int, out: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = ((torch.randn(rows, width, generator=generator) * 50).to(CODE) for rows in (5, out))
    found = scaled_gemm(x, weight)
    assert found.shape == (5, out)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize(("width", "out"), [(172, 24), (64, 7), (4096, 4096)])
def test_a_scaled_product_of_any_width_is_one_that_cuda_takes(width: int, out: int) -> None:
    """By torch's own rules for CUDA, which refuse 172; nothing is computed."""
    with FakeTensorMode():
        x, weight = (torch.empty(rows, width, dtype=CODE, device="cuda") for rows in (5, out))
        assert scaled_gemm(x, weight).shape == (5, out)


@pytest.mark.parametrize("accumulator", [None, "fp22", "two-level", "fp32"])
@pytest.mark.parametrize("terms", [0, 1, 2])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["as a CPU holds codes", "as a GPU does"])
def test_an_expert_without_tokens_gives_no_rows(on_gpu: bool, terms: int, accumulator: Accumulator | None) -> None:
    codes = (torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) * 50).to(CODE)
    scale = torch.tensor(0.5) if terms else None
    expert = FP8Linear(codes, torch.ones(24), scale, torch.ones(24), "fast", terms)
    expert.accumulator = accumulator
    if on_gpu:
        expert.codes = codes
    for dtype in (torch.bfloat16, torch.float32):
        found = expert(torch.zeros(0, 64, dtype=dtype))
        assert (found.shape, found.dtype) == ((0, 24), dtype)


def test_nan_in_the_input_comes_out_as_nan() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[1, 3] = float("nan")
    y = layer("fast")[0](x)
    assert not y[0].isnan().any()
    assert y[1].isnan().all()
