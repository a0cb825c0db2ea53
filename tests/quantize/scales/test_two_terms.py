"""Two codes a value: exact for every BF16 number between s/64 and 476·s, and the GEMMs of such codes."""

from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.calibrate.measure.histogram import PATTERNS, Histogram
from fp8q.core.errors import InputError
from fp8q.options import METHODS, Clipping, ExportOptions, RescaleOptions, ScaleOptions
from fp8q.quantize.codes.encoding import CODE, code_tables, encode_two
from fp8q.quantize.codes.formats import E4M3, TWO_TERMS
from fp8q.quantize.reference.attention import attention_on_codes
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.quantize.scales.activation_scales import tensor_scale
from fp8q.quantize.scales.clip import (
    FROM_HISTOGRAM,
    LARGEST_POWER,
    entropy,
    saturation,
    scale_of,
    sqnr_db,
    squared_error,
    underflow,
)
from fp8q.quantize.scales.decisions import PROBABILITY_SCALES, TensorScale
from fp8q.stages.export import check_dtype

#: Every finite BF16 number that is not negative, float32.
NUMBERS = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)


def counted(values: object) -> Histogram:
    bits = np.abs(np.asarray(values, np.float32)).view(np.uint32) >> 16
    return Histogram.from_dense(np.bincount(bits.ravel(), minlength=PATTERNS))


def by_ml_dtypes(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """s·(a + b/16) in FP64, by somebody else's E4M3."""
    kind = ml_dtypes.float8_e4m3fn
    first = np.clip(x / scale, -448, 448).astype(kind).astype(np.float64)
    second = np.clip((x.astype(np.float64) / scale - first) * 16, -448, 448).astype(kind).astype(np.float64)
    return np.float64(scale) * (first + second / 16)


@pytest.mark.parametrize("power", [-100, -20, -7, 0, 3, 60])
def test_every_bf16_number_from_a_64th_of_the_scale_to_476_of_it_is_exact(power: int) -> None:
    scale = np.float32(2.0**power)
    x = NUMBERS[: np.searchsorted(NUMBERS, 480 * scale)]
    value = TWO_TERMS.decode(*TWO_TERMS.encode(x / scale)).astype(np.float64) * scale
    np.testing.assert_array_equal(value, by_ml_dtypes(x, scale))
    exact = (x >= scale / 64) & (x <= 476 * scale)
    assert exact.sum() > 1800
    np.testing.assert_array_equal(value[exact], x[exact])
    below = x < scale / 64
    assert np.abs(value - x)[below].max() == scale * 2.0**-14
    np.testing.assert_array_equal(value[x > 476 * scale], np.float64(476) * scale)


@pytest.mark.parametrize("power", [-40, -7, 0, 5])
def test_torch_s_codes_are_the_format_s_for_every_pattern_of_either_sign(power: int) -> None:
    scale = torch.tensor(2.0**power)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = [E4M3.decode(codes) for codes in TWO_TERMS.encode(patterns.float().numpy() / scale.numpy())]
    for found in ([code.float() for code in encode_two(patterns, scale)], list(code_tables(scale, 2).float())):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=0, equal_nan=True)


def test_the_grid_is_what_both_terms_make_and_rounding_to_it_is_rounding_twice() -> None:
    assert (TWO_TERMS.divisor, TWO_TERMS.clip, TWO_TERMS.max, TWO_TERMS.midpoints[0]) == (16, 448, 476, 2.0**-14)
    x = NUMBERS[: np.searchsorted(NUMBERS, 480)]
    below, above = (np.searchsorted(TWO_TERMS.midpoints, x, side=side) for side in ("left", "right"))
    np.testing.assert_array_equal(
        TWO_TERMS.grid[np.where(below % 2 == 0, below, above)], TWO_TERMS.decode(*TWO_TERMS.encode(x))
    )


@given(st.lists(st.floats(-600, 600, width=16), min_size=1, max_size=50), st.integers(-12, 3))
def test_errors_and_shares_are_those_of_each_value(values: list[float], power: int) -> None:
    x = torch.tensor(values).to(torch.bfloat16).float().abs().numpy()
    scale = np.float32(2.0**power)
    left = x - by_ml_dtypes(x, scale)
    measured = counted(x)
    assert squared_error(measured, TWO_TERMS, [scale])[0] == pytest.approx((left**2).sum(), rel=1e-12, abs=0)
    assert saturation(measured, TWO_TERMS, float(scale)) == (x > 476 * scale).mean()
    lost = ((x > 0) & (by_ml_dtypes(x, scale) == 0)).sum() / max((x > 0).sum(), 1)
    assert underflow(measured, TWO_TERMS, float(scale)) == lost


def test_an_error_of_zero_is_null_and_is_written() -> None:
    scale = tensor_scale(counted([1.0, 3.0, 0.5]), Clipping(), TWO_TERMS)
    assert (scale.terms, scale.scale, scale.clip, scale.sqnr_db, scale.sqnr_best_db) == (2, 2.0**-7, 3.5, None, None)
    assert '"sqnr_db":null' in scale.model_dump_json(exclude_none=True)
    assert '"sqnr_best_db"' not in scale.model_dump_json(exclude_none=True)
    assert TensorScale.model_validate_json(scale.model_dump_json(exclude_none=True)) == scale
    assert sqnr_db(counted([2.0**-15, 1.0]), TWO_TERMS, 2.0**-8) is None
    assert sqnr_db(counted([2.0**-23, 1.0]), TWO_TERMS, 2.0**-8) == pytest.approx(20 * np.log10(2**23))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("margin", [-1, 0, 2])
@given(seed=st.integers(0, 200))
@settings(max_examples=5)
def test_the_scale_is_the_power_of_two_at_or_above_what_the_method_chose(method: str, margin: int, seed: int) -> None:
    values = np.abs(np.random.default_rng(seed).standard_t(3, 3000)).astype(np.float32)
    batches = np.array([values.max(), values.max() / 2], np.float32)
    measured, clipping = counted(values), Clipping(method, margin=margin)
    scale = tensor_scale(measured, clipping, TWO_TERMS, batches)
    assert np.frexp(scale.scale)[0] == 0.5
    assert scale.clip == 448 * scale.scale
    for grid in ("bf16", "power-of-two"):
        same = Clipping(method, margin=margin, scale_grid=grid)
        assert tensor_scale(measured, same, TWO_TERMS, batches) == scale
    one = tensor_scale(measured, clipping, E4M3, batches)
    clips = {FROM_HISTOGRAM[method](measured, grid, clipping) for grid in (E4M3, TWO_TERMS) if method in FROM_HISTOGRAM}
    if len(clips) < 2:  # a method that searches the grid may choose another octave on each
        assert one.scale <= scale.scale < 2 * one.scale


@given(seed=st.integers(0, 200))
@settings(max_examples=10)
def test_mse_and_entropy_choose_the_best_of_the_powers_of_two(seed: int) -> None:
    measured = counted(np.random.default_rng(seed).standard_t(2, 3000).astype(np.float32))
    powers = 2.0 ** np.arange(-30, 6)
    for method, cost in (("mse", squared_error), ("entropy", entropy)):
        chosen = tensor_scale(measured, Clipping(method), TWO_TERMS).scale
        least = cost(measured, TWO_TERMS, powers).min()
        assert cost(measured, TWO_TERMS, [chosen])[0] <= least * (1 + 1e-9) + 1e-12


def test_no_scale_lets_both_terms_leave_bf16() -> None:
    huge = Histogram(np.array([0x7F7F], np.int16), np.array([5], np.int64))
    scale = tensor_scale(huge, Clipping(margin=16), TWO_TERMS).scale
    assert scale == float(LARGEST_POWER)
    assert np.frexp(scale)[0] == 0.5
    assert 476 * scale < 3.39e38


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([16, 48, 64]), st.integers(1, 9), st.booleans(),
    st.integers(-30, 30),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_product_is_that_of_bf16_activations_by_codes(
    seed: int, rows: int, width: int, out: int, bias: bool, power: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, width, generator=generator) * 2.0**power).to(torch.bfloat16)
    codes = (torch.randn(out, width, generator=generator) * 100).clamp(-448, 448).to(CODE)
    scales = torch.rand(out, generator=generator) + 0.1
    offset = torch.randn(out, generator=generator) if bias else None
    input_scale = torch.tensor(float(scale_of(x.abs().max().float().numpy(), TWO_TERMS)))
    expected = x.double() @ codes.double().T * scales.double() + (0 if offset is None else offset.double())
    size = x.double().abs() @ codes.double().abs().T * scales.double()  # what FP32 rounds a part of
    found = FP8Linear(codes, scales, input_scale, offset, "exact", 2)(x.float()).double()
    lost = width * 2.0**-14 * float(input_scale) * 448  # at most s·2^-14 of each value
    assert ((found - expected).abs() <= size * 2e-6 + expected.abs() * 1e-6 + lost).all()
    fast = FP8Linear(codes, scales, input_scale, offset, "fast", 2)(x).double()
    assert ((fast - expected).abs() <= (size + expected.abs()) * 2.0**-7 + lost).all()


def test_a_gpu_s_product_has_twice_the_rows() -> None:
    codes = (torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * 50).to(CODE)
    held = FP8Linear(codes, torch.full((16,), 0.5), torch.tensor(2.0**-6), None, "exact", 2)
    on_codes = FP8Linear(codes, torch.full((16,), 0.5), torch.tensor(2.0**-6), None, "exact", 2)
    on_codes.codes = codes  # as a GPU with FP8 units holds them, and `torch._scaled_mm` takes them
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    torch.testing.assert_close(on_codes(x), held(x), rtol=2e-2, atol=1e-2)


def test_attention_in_two_terms_loses_what_keys_and_values_lose() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 6, 16, generator=generator).to(torch.bfloat16).float() for heads in (4, 2, 2)
    )
    module = torch.nn.Module()
    keys, values = [(x / 2.0**-6).to(CODE).float() * 2.0**-6 for x in (key, value)]
    scales = {"q": 2.0**-6, "k": 2.0**-6, "v": 2.0**-6, "p": PROBABILITY_SCALES[2]}
    vars(module).update(fp8q_scales={part: torch.tensor(scale) for part, scale in scales.items()}, fp8q_two_terms=True)
    mask = torch.full((6, 6), float("-inf")).triu(1)
    found = attention_on_codes(module, query, key, value, mask)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    assert PROBABILITY_SCALES[2] == 2.0**-8
    torch.testing.assert_close(found, expected, rtol=0, atol=float(value.abs().max()) * (2.0**-9 + 6 * 2.0**-22))
    one = scales | {"p": PROBABILITY_SCALES[1]}
    vars(module).update(fp8q_scales={part: torch.tensor(scale) for part, scale in one.items()}, fp8q_two_terms=False)
    assert (attention_on_codes(module, query, key, value, mask)[0] - expected).abs().max() > 0.01


def test_a_probability_is_exact_down_to_2_to_the_minus_14_and_off_by_2_to_the_minus_22_below() -> None:
    p = NUMBERS[NUMBERS <= 1]
    error = np.abs(by_ml_dtypes(p, np.float32(PROBABILITY_SCALES[2])) - p)
    assert not error[p >= 2.0**-14].any()
    assert error.max() == 2.0**-22
    one = E4M3.decode(E4M3.encode(p / np.float32(PROBABILITY_SCALES[1]))) * np.float64(PROBABILITY_SCALES[1])
    assert np.abs(one - p).max() > 2.0**-6


def test_the_options_say_all_or_some_and_never_both() -> None:
    with pytest.raises(InputError) as refused:
        ScaleOptions(activation_terms=2, two_terms=("*.q_proj",))
    assert str(refused.value) == (
        "--two-terms *.q_proj: --activation-terms 2 takes two for every module; leave one of them out, or give "
        "--activation-terms 1"
    )
    with pytest.raises(InputError, match="^--activation-terms 3: is none of 1, 2, tail, bf16$"):
        ScaleOptions(activation_terms=3)  # type: ignore[arg-type]
    some = ScaleOptions(two_terms=("*.q_proj",))
    assert RescaleOptions().over(some).two_terms == ("*.q_proj",)
    assert RescaleOptions(two_terms=("",)).over(some).two_terms == ()
    assert RescaleOptions(activation_terms=2).over(some) == ScaleOptions(activation_terms=2)
    with pytest.raises(InputError, match="^--two-terms a: --activation-terms 2 takes two for every module"):
        RescaleOptions(two_terms=("a",)).over(ScaleOptions(activation_terms=2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"activation_terms": "tail", "tail": ("*.q_proj",)},
            (
                "--tail *.q_proj: --activation-terms tail gives every module one; leave one of them out, or give "
                "--activation-terms 1"
            ),
        ),
        (
            {"exact_tail": 16},
            "--exact-tail 16: no module has a tail; give --activation-terms tail or --tail PATTERN, or leave it out",
        ),
        ({"exact_tail": 0, "activation_terms": "tail"}, "--exact-tail 0: must be at least 1"),
    ],
)
def test_a_tail_is_of_all_modules_or_of_some_and_has_a_length(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        ScaleOptions(**given)
    assert str(refused.value) == message


def test_a_run_keeps_the_length_of_its_tail_and_forgets_it_with_the_form() -> None:
    short = ScaleOptions(activation_terms="tail", exact_tail=16)
    assert RescaleOptions(weight_rounding="gptq").over(short).exact_tail == 16
    assert RescaleOptions(exact_tail=32).over(short) == ScaleOptions(activation_terms="tail", exact_tail=32)
    assert RescaleOptions(activation_terms=1).over(short) == ScaleOptions()
    some = ScaleOptions(tail=("*.q_proj",), exact_tail=16)
    assert RescaleOptions(activation_terms="tail").over(some) == short
    assert RescaleOptions(tail=("",)).over(some) == ScaleOptions()
    with pytest.raises(InputError, match="^--exact-tail 16: no module has a tail"):
        RescaleOptions(exact_tail=16).over(ScaleOptions())


def chosen(scale: float, terms: Literal[1, 2] = 2) -> TensorScale:
    return TensorScale(method="amax", amax=1, clip=1, scale=scale, terms=terms, saturation=0, underflow=0, sqnr_db=None)


def test_a_graph_in_fp16_refuses_a_scale_whose_codes_it_cannot_hold() -> None:
    in_fp16 = ExportOptions(dtype="fp16")
    with pytest.raises(InputError) as refused:
        check_dtype({"up": chosen(2.0**-16, 1), "gate": chosen(2.0**-15), "self_attn.q": chosen(2.0**-16)}, in_fp16)
    assert str(refused.value) == (
        "--dtype fp16: self_attn.q takes two terms with the scale 1.53e-05, and below 3.05e-05 code × scale leaves "
        "FP16; export in bf16, or choose one term with `fp8q scales`"
    )
    smallest = np.float16(2.0**-9 * 2.0**-15)
    assert smallest == np.finfo(np.float16).smallest_subnormal
    for fine, options in ((2.0**-15, in_fp16), (2.0**-16, ExportOptions())):
        assert check_dtype({"up": chosen(fine)}, options) is None  # type: ignore[func-returns-value]
    assert check_dtype({}, in_fp16) is None  # type: ignore[func-returns-value]


@given(st.lists(st.floats(-400, 400, width=16), min_size=1, max_size=30), st.integers(-6, 0))
def test_an_fp16_value_keeps_eight_of_its_eleven_digits(values: list[float], power: int) -> None:
    scale = np.float32(2.0**power)
    x = np.array(values, np.float16).astype(np.float32) * scale
    kept = (np.abs(x) >= scale / 64) & (np.abs(x) <= 448 * scale)
    assert (np.abs(by_ml_dtypes(x, scale) - x)[kept] <= np.abs(x)[kept] * 2.0**-9).all()
