"""The numbers of one tensor in a training log, by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.measure.counting import count_patterns
from fp8q.calibrate.measure.histogram import Histogram
from fp8q.options import WatchOptions
from fp8q.quantize.codes.formats import E4M3, E5M2, Format
from fp8q.quantize.scales.clip import lost_share, sqnr_db
from fp8q.quantize.training.training_log import COLUMNS, lost_energy, tensor_numbers


def numbers(values: list[float], before: list[float], options: WatchOptions = WatchOptions()) -> dict[str, float]:
    patterns = torch.tensor(values).bfloat16().abs().view(torch.int16)
    histogram = Histogram.from_dense(count_patterns(patterns).numpy())
    found = tensor_numbers(histogram, np.array(before, np.float32), options)
    return dict(zip(COLUMNS, found, strict=True))


def test_a_value_beyond_the_history_saturates() -> None:
    found = numbers([0.0, 1.0, -2.0, 896.0], [448.0])  # E4M3's scale is 1
    energy = 1 + 4 + 896**2
    assert found["amax"] == 896
    assert found["history"] == 448
    assert found["zeros"] == 0.25
    assert found["rms"] == pytest.approx((energy / 4) ** 0.5)
    assert found["e4m3_saturated"] == 0.25
    assert found["e4m3_underflow"] == 0
    assert found["e4m3_lost"] == pytest.approx((896 - 448) ** 2 / energy)
    assert found["e5m2_saturated"] == 0.25
    assert found["not_finite"] == 0


def test_what_becomes_zero_is_counted_among_what_is_not_zero() -> None:
    found = numbers([0.0, 2.0**-11, 2.0**-9, 448.0], [448.0])
    assert found["e4m3_underflow"] == pytest.approx(1 / 3)  # the least code is 2^-9, and half of it becomes zero
    assert found["e5m2_underflow"] == 0  # 57,344 / 2^-16 is 2^31.8


def test_the_first_record_is_scaled_by_its_own_amax_as_current_scaling_is() -> None:
    assert numbers([3.0, 0.5], [])["history"] == 3
    assert numbers([3.0, 0.5], [100.0], WatchOptions(scaling="current"))["history"] == 3
    assert numbers([3.0, 0.5], [100.0, 7.0], WatchOptions(history=1))["history"] == 7
    assert numbers([3.0, 0.5], [100.0, 0.0], WatchOptions(history=1))["history"] == 100  # a zero keeps the scale


def test_without_scaling_the_scale_is_one() -> None:
    found = numbers([2.0**-11, 2.0**-15, 600.0], [1.0], WatchOptions(scaling="none"))
    assert found["history"] == 0
    assert found["e4m3_saturated"] == pytest.approx(1 / 3)
    assert found["e4m3_underflow"] == pytest.approx(2 / 3)
    assert found["e5m2_underflow"] == 0


def test_a_tensor_of_zeros_loses_nothing_and_not_finite_values_are_counted() -> None:
    assert numbers([0.0, 0.0], [1.0]) == dict.fromkeys(COLUMNS, 0.0) | {"zeros": 1.0, "history": 1.0}
    found = numbers([float("nan"), float("inf"), 1.0], [1.0])
    assert (found["not_finite"], found["amax"]) == (2, 1)


@given(
    st.lists(st.floats(2.0**-20, 2.0**12, width=32), min_size=1, max_size=50),
    st.floats(2.0**-12, 2.0**4, width=32),
    st.sampled_from([E4M3, E5M2]),
)
def test_lost_energy_is_that_of_the_sums_over_all_patterns(values: list[float], scale: float, kind: Format) -> None:
    patterns = torch.tensor(values).bfloat16().view(torch.int16)
    histogram = Histogram.from_dense(count_patterns(patterns).numpy())
    expected = lost_share(sqnr_db(histogram, kind, scale))
    assert lost_energy(histogram, kind, scale) == pytest.approx(expected, rel=1e-6, abs=1e-9)
