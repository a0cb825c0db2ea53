"""The curves of a tensor's values and of their errors, as the report draws them."""

import re

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.quantize.codes.formats import E4M3, E5M2
from fp8q.quantize.scales.clip import scale_of, sqnr_db
from fp8q.validate.report import curves


@pytest.fixture(scope="module")
def values() -> npt.NDArray[np.float32]:
    """Heavy-tailed BF16 numbers, zeros among them."""
    drawn = np.random.default_rng(3).standard_t(3, size=20_000).astype(ml_dtypes.bfloat16).astype(np.float32)
    drawn[:100] = 0
    return drawn


def counted(values: npt.NDArray[np.float32]) -> Histogram:
    return Histogram.from_dense(np.bincount(np.abs(values).view(np.uint32) >> 16, minlength=1 << 15))


@pytest.mark.parametrize("patterns", [16, 64])
def test_a_density_integrates_to_the_share_of_values_that_are_not_zero(
    values: npt.NDArray[np.float32], patterns: int
) -> None:
    edges, heights = curves.density(counted(values), patterns)
    assert (heights * np.diff(edges)).sum() == pytest.approx(0.995)
    assert edges[0] <= np.log2(np.abs(values[values != 0]).min())
    assert edges[-1] > np.log2(np.abs(values).max())
    octaves, bar = np.log2(np.abs(values[100:]).astype(np.float64)), len(heights) // 2
    inside = (octaves >= edges[bar] - 1e-9) & (octaves < edges[bar + 1] - 1e-9)
    assert heights[bar] * (edges[bar + 1] - edges[bar]) == pytest.approx(inside.sum() / len(values))


def test_the_error_is_split_by_cause_as_ml_dtypes_rounds(values: npt.NDArray[np.float32]) -> None:
    scale = float(scale_of(np.percentile(np.abs(values), 99.9), E4M3))
    codes = np.clip(values / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    error = (values.astype(np.float64) - codes * scale) ** 2
    beyond, zeroed = np.abs(values) > 448 * scale, codes == 0
    shares = curves.error_shares(counted(values), scale)
    assert shares.saturation == pytest.approx(error[beyond].sum() / error.sum())
    assert shares.underflow == pytest.approx(error[zeroed].sum() / error.sum())
    assert shares.saturation + shares.underflow + shares.rounding == pytest.approx(1)
    edges, heights = curves.error_density(counted(values), scale)
    assert (heights * np.diff(edges)).sum() == pytest.approx(1 - shares.underflow)


def test_rounding_alone_is_what_values_spread_evenly_over_the_logarithm_lose() -> None:
    spread = (2 ** np.random.default_rng(4).uniform(-4, 4, size=400_000)).astype(ml_dtypes.bfloat16).astype(np.float32)
    for kind in (E4M3, E5M2):
        assert sqnr_db(counted(spread), kind, 1.0) == pytest.approx(curves.rounding_alone_db(kind), abs=0.1)
    assert curves.rounding_alone_db() == pytest.approx(32.2, abs=0.01)


def test_a_sparkline_stays_on_its_axis(values: npt.NDArray[np.float32]) -> None:
    path = curves.sparkline(counted(values), float(scale_of(np.abs(values).max(), E4M3)))
    x = [float(found) for found in re.findall(r"[MH](-?[\d.]+)", path)]
    y = [float(found) for found in re.findall(r"V([\d.]+)", path)]
    assert curves.SPARK_LEFT <= min(x) < max(x) <= curves.SPARK_RIGHT
    assert (min(y), max(y)) == (0, 1)
    assert x == sorted(x)
