"""The tensor core's adder against whole numbers and fractions, term by term, and against sums made by hand."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.options import Accumulator
from fp8q.quantize.codes.encoding import CODE
from fp8q.quantize.reference.adder import ADDERS, TILE, Adder, accumulated_gemm, add_in, seconds_per_multiply_add
from fp8q.quantize.reference.linear import FP8Linear

BITS = 13


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def decoded(code: int) -> tuple[Fraction, int]:
    """An E4M3 byte as a fraction, and the exponent of its field."""
    sign, field, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    exponent = max(field, 1) - 7
    return sign * (Fraction(mantissa, 8) + (1 if field else 0)) * power(exponent), exponent


def leading(value: Fraction) -> int:
    """The exponent of the leading one of a number that is not zero."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if abs(value) >= power(exponent) else exponent - 1


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """The whole units in a number, towards zero: `int` of a fraction."""
    return int(value / unit) * unit


def instruction(terms: list[tuple[Fraction, int]], sum_: Fraction) -> Fraction:
    """A block of products and their exponents added to the sum before it."""
    exponents = [exponent for value, exponent in terms if value] + ([leading(sum_)] if sum_ else [])
    if not exponents:
        return Fraction(0)
    unit = power(max(exponents) - BITS)
    total = cut(sum_, unit) + sum(cut(value, unit) for value, _ in terms)
    return cut(total, power(leading(total) - BITS)) if total else total


def slow(x: list[int], weight: list[int], adder: Adder) -> Fraction:
    """The sum of the products of two rows of bytes. Promoted sums are added in FP32."""
    terms = []
    for left, right in zip(x, weight, strict=True):
        (value, exponent), (other, others) = decoded(left), decoded(right)
        terms.append((value * other, exponent + others))
    total, sum_ = torch.zeros(()), Fraction(0)
    for start in range(0, len(terms), adder.block):
        sum_ = instruction(terms[start : start + adder.block], sum_)
        if adder.promotion and (start + adder.block) % adder.promotion == 0:
            total, sum_ = total + float(sum_), Fraction(0)
    return Fraction((total + float(sum_)).item())


def codes(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(CODE)


def numbers(*values: float) -> torch.Tensor:
    """Numbers that E4M3 has, as one row of codes."""
    row = torch.tensor([values])
    assert torch.equal(row.to(CODE).float(), row)
    return row.to(CODE)


def ones(width: int) -> torch.Tensor:
    return torch.ones(1, width).to(CODE)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 50).clamp(-448, 448).to(CODE)


#: Bytes but NaN's, and rows of the same and of few magnitudes, where carries and cancellation are.
BYTES = st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F)
NEIGHBOURS = st.sampled_from([0x00, 0x01, 0x38, 0xB8, 0x3F, 0xBF, 0x40, 0x7E, 0xFE, 0x81])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    width, kind = draw(st.integers(1, 150)), draw(st.sampled_from([BYTES, NEIGHBOURS]))
    row = st.lists(kind, min_size=width, max_size=width)
    return draw(row), draw(row)


@settings(max_examples=80)
@given(pairs(), st.sampled_from([Adder(), Adder(promotion=128), Adder(promotion=32), Adder(block=16)]))
def test_the_fast_sum_is_the_slow_one_bit_for_bit(pair: tuple[list[int], list[int]], adder: Adder) -> None:
    x, weight = pair
    assert Fraction(add_in(codes(x), codes(weight), adder).item()) == slow(x, weight, adder)


def test_what_lies_fourteen_bits_below_the_largest_product_is_lost() -> None:
    # 448 = 1.75 · 2^8: the last bit that is kept is 2^-5
    assert accumulated_gemm(numbers(448, 2**-5), ones(2), "fp22").item() == 448 + 2**-5
    assert accumulated_gemm(numbers(448, 2**-6), ones(2), "fp22").item() == 448
    assert accumulated_gemm(numbers(448, 2**-6), ones(2), "fp32").item() == 448 + 2**-6


def test_each_product_is_cut_toward_zero_by_itself_whatever_its_sign() -> None:
    assert accumulated_gemm(numbers(-448, *[-(2**-6)] * 31), ones(32), "fp22").item() == -448
    # 448, cut to 2^-5: 2^-5 + 2^-6 gives 2^-5, and less of it gives more than 448 - 2^-5 - 2^-6
    assert accumulated_gemm(numbers(448, -(2**-5) - 2**-6), ones(2), "fp22").item() == 448 - 2**-5


def test_a_product_has_the_sum_of_its_factors_exponents_even_where_it_reaches_two() -> None:
    # 1.75² = 3.0625 with exponent 0, so that each 2^-13 counts, and two of them are the sum's last bit
    x, weight = numbers(1.75, 2**-6, 2**-6), numbers(1.75, 2**-7, 2**-7)
    assert accumulated_gemm(x, weight, "fp22").item() == 3.0625 + 2**-12
    assert accumulated_gemm(x[:, :2], weight[:, :2], "fp22").item() == 3.0625  # one alone is half of it


def test_a_large_sum_swallows_what_comes_after_it_unless_it_was_put_away_before() -> None:
    values = [448, *[0] * 127, *[2**-6] * 128]  # 128 · 2^-6 = 2
    x = numbers(*values)
    assert accumulated_gemm(x, ones(256), "fp32").item() == 450
    assert accumulated_gemm(x, ones(256), "fp22").item() == 448
    assert accumulated_gemm(x, ones(256), "two-level").item() == 450
    assert accumulated_gemm(numbers(*reversed(values)), ones(256), "fp22").item() == 450  # the small ones first


def test_sums_of_one_sign_come_out_too_small_the_more_so_the_longer_they_are() -> None:
    x, weight = drawn(1, 8192).float().abs().to(CODE), drawn(1, 8192, seed=1).float().abs().to(CODE)
    exact = (x.double() @ weight.double().T).item()
    short = [accumulated_gemm(x[:, :n], weight[:, :n], "fp22").item() for n in (64, 8192)]
    assert -0.001 < short[0] / (x[:, :64].double() @ weight[:, :64].double().T).item() - 1 < 0
    assert short[1] / exact - 1 < -0.05
    assert -0.001 < accumulated_gemm(x, weight, "two-level").item() / exact - 1 < 0


def test_a_row_of_zeros_adds_up_to_zero_and_nan_stays_nan() -> None:
    x = torch.zeros(2, 64)
    x[1, 40] = float("nan")
    for adder in ADDERS.values():
        y = add_in(x.to(CODE), ones(64), adder)
        assert (y[0].item(), torch.isnan(y[1]).item()) == (0.0, True)


def test_every_sum_is_that_of_its_own_row_and_output_over_the_edges_of_tiles() -> None:
    x, weight = drawn(TILE[0] + 3, 80), drawn(TILE[1] + 5, 80, seed=1)
    whole = accumulated_gemm(x, weight, "fp22")
    assert whole.shape == (TILE[0] + 3, TILE[1] + 5)
    for row, out in ((0, 0), (TILE[0] - 1, TILE[1]), (TILE[0], TILE[1] - 1), (TILE[0] + 2, TILE[1] + 4)):
        alone = accumulated_gemm(x[row : row + 1], weight[out : out + 1], "fp22")
        assert whole[row, out] == alone.item()


@pytest.mark.parametrize("held", [CODE, torch.bfloat16, torch.float32])
def test_codes_add_up_the_same_in_whatever_type_they_are_held(held: torch.dtype) -> None:
    x, weight = drawn(6, 160), drawn(5, 160, seed=1)
    expected = accumulated_gemm(x, weight, "two-level")
    found = accumulated_gemm(x.to(held).view(2, 3, 160), weight.to(held), "two-level")
    assert torch.equal(found, expected.view(2, 3, 5))


def test_sums_in_fp32_are_those_of_the_exact_reference() -> None:
    x, weight = drawn(6, 160), drawn(5, 160, seed=1)
    torch.testing.assert_close(
        accumulated_gemm(x, weight, "fp32").double(), x.double() @ weight.double().T, rtol=1e-6, atol=1e-2
    )


def test_a_layer_scales_and_rounds_the_sum_that_it_is_told_to_make() -> None:
    weight, scales = drawn(24, 96, seed=1), torch.rand(24, generator=torch.Generator().manual_seed(2)) + 0.5
    layer = FP8Linear(weight, scales, torch.tensor(0.5), torch.ones(24), "fast")
    x = (drawn(7, 96).float() * 0.5).to(torch.bfloat16)
    layer.accumulator = "fp22"
    expected = accumulated_gemm(drawn(7, 96), weight, "fp22") * (torch.tensor(0.5) * scales) + 1
    assert torch.equal(layer(x), expected.to(torch.bfloat16))


def test_the_time_of_a_product_is_measured_where_it_will_be_made() -> None:
    assert 0 < seconds_per_multiply_add("fp22", "cpu") < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("fast", "accumulator"), [(True, "fp22"), (False, "two-level")])
def test_hopper_adds_as_the_adder_does(fast: bool, accumulator: Accumulator) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is no Hopper")
    x, weight = drawn(512, 1024).cuda(), drawn(512, 1024, seed=1).cuda()  # so large that cuBLAS does not split the rows
    one = torch.ones((), device="cuda")
    found = torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
    assert torch.equal(found, accumulated_gemm(x, weight, accumulator))
