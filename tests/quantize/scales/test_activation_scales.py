"""From a clip to a scale: margins are exact, powers of two are such, and what has no scale is never given one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.core.errors import InputError
from fp8q.options import METHODS, Clipping, ScaleOptions
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.activation_scales import tensor_scale
from fp8q.quantize.scales.clip import LARGEST_SCALE, SMALLEST_SCALE, power_of_two_ceil, scale_of, squared_error
from fp8q.quantize.scales.decisions import TensorScale

BATCHES = np.array([1.0, 3.0, 2.0], np.float32)


def histogram(seed: int = 0, largest: float = 3.0) -> Histogram:
    values = np.abs(np.random.default_rng(seed).normal(size=4000)).astype(np.float32)
    values[0] = largest
    return Histogram.from_dense(np.bincount(values.view(np.uint32) >> 16, minlength=1 << 15))


def choose(clipping: Clipping, seed: int = 0) -> TensorScale:
    return tensor_scale(histogram(seed), clipping, amax_batches=BATCHES)


@pytest.mark.parametrize("method", METHODS)
@given(margin=st.integers(-16, 16))
@settings(max_examples=8)
def test_a_margin_multiplies_scale_and_clip_by_a_power_of_two_exactly(method: str, margin: int) -> None:
    plain, moved = choose(Clipping(method)), choose(Clipping(method, margin=margin))
    assert (moved.scale, moved.clip) == (plain.scale * 2.0**margin, plain.clip * 2.0**margin)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("margin", [-1, 0, 2])
def test_the_power_of_two_grid_rounds_up_to_a_power_of_two(method: str, margin: int) -> None:
    plain, rounded = (
        choose(Clipping(method, margin=margin)),
        choose(Clipping(method, margin=margin, scale_grid="power-of-two")),
    )
    assert np.frexp(rounded.scale)[0] == 0.5
    assert plain.scale <= rounded.scale < 2 * plain.scale
    assert rounded.clip == rounded.scale * 448


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_power_of_two_ceil_is_two_to_the_ceiling_of_the_logarithm(value: float) -> None:
    mantissa, exponent = np.frexp(value)
    assert power_of_two_ceil(value) == np.ldexp(1.0, exponent - (mantissa == 0.5))


def test_every_scale_stays_on_the_bf16_grid() -> None:
    for method in METHODS:
        for margin in (-3, 0, 3):
            scale = np.float32(choose(Clipping(method, margin=margin)).scale)
            assert scale.view(np.uint32) & 0xFFFF == 0


@given(seed=st.integers(0, 300))
@settings(max_examples=20)
def test_the_best_sqnr_is_that_of_the_least_squared_error_and_no_method_s_is_better(seed: int) -> None:
    measured = histogram(seed, largest=300)
    signal = float((measured.finite[0].astype(np.float64) ** 2 * measured.finite[1]).sum())
    fine = scale_of(np.geomspace(measured.amax / 900, measured.amax * 4, 2000), E4M3)
    bound = 10 * np.log10(signal / squared_error(measured, E4M3, fine).min())
    for method in METHODS:
        scale = tensor_scale(measured, Clipping(method), amax_batches=BATCHES)
        assert scale.sqnr_db is not None
        assert scale.sqnr_best_db is not None
        assert scale.sqnr_db <= scale.sqnr_best_db
        assert scale.sqnr_best_db >= bound - 1e-9


def test_a_percentile_of_zero_gives_way_to_the_amax_and_says_so() -> None:
    mostly_zero = Histogram(np.array([0, 0x3F80], np.int16), np.array([99, 1], np.int64))
    scale = tensor_scale(mostly_zero, Clipping("percentile", 50))
    assert scale.method == "amax (percentile gave 0)"
    assert (scale.clip, scale.scale) == (1.0, float(scale_of(1.0, E4M3)))


def test_a_margin_goes_no_further_than_scales_do() -> None:
    tiny = Histogram(np.array([0x0600], np.int16), np.array([5], np.int64))
    huge = Histogram(np.array([0x7F00], np.int16), np.array([5], np.int64))
    assert tensor_scale(tiny, Clipping(margin=-16)).scale == SMALLEST_SCALE
    assert tensor_scale(huge, Clipping(margin=16)).scale == LARGEST_SCALE


def test_delayed_needs_the_batches() -> None:
    message = (
        "^--method delayed: needs the amax of every batch, which a histogram does not hold; choose another method$"
    )
    with pytest.raises(InputError, match=message):
        tensor_scale(histogram(), Clipping("delayed"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"margin": 17}, "--margin 17: must lie between -16 and 16; the scale is multiplied by 2 to this power"),
        ({"amax_history_len": 0}, "--amax-history-len 0: must be at least 1"),
        ({"interval": 0}, "--interval 0: must be at least 1"),
        ({"percentile": 101.0}, "--percentile 101.0: must lie in (0, 100]"),
        (
            {"percentile": 50.0},
            "--percentile 50.0: is for --method percentile, and the method is amax; choose that one, or leave this out",
        ),
        (
            {"method": "percentile", "interval": 5},
            "--interval 5: is for --method delayed, and the method is percentile; choose that one, or leave this out",
        ),
        (
            {"amax_history_len": 16},
            (
                "--amax-history-len 16: is for --method delayed, and the method is amax; choose that one, or leave "
                "this "
                "out"
            ),
        ),
        (
            {"method": "mse", "amax_compute_algo": "most_recent"},
            (
                "--amax-compute-algo most_recent: is for --method delayed, and the method is mse; choose that one, or "
                "leave this out"
            ),
        ),
    ],
)
def test_numbers_that_mean_nothing_or_belong_to_another_method(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as refused:
        Clipping(**wrong)  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_a_choice_that_is_none_is_refused_whoever_makes_it() -> None:
    with pytest.raises(InputError, match="^--weight-method mes: is none of amax, mse$"):
        ScaleOptions(weight_method="mes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="^--kv-cache fp4: is none of off, v, fp8$"):
        ScaleOptions(kv_cache="fp4")  # type: ignore[arg-type]
