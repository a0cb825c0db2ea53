"""The formats against ml_dtypes, ONNX Runtime and torch: every code, every midpoint, every neighbour of a midpoint."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3, E4M3FNUZ, E5M2, FORMATS, INT8, TWO_TERMS, Format, Grid

ORACLES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz}
ALL = [pytest.param(kind, id=name) for name, kind in FORMATS.items()]


def edges(format: Format) -> np.ndarray:
    """Every grid value, every midpoint and both its neighbours, values beyond the maximum, both signs."""
    inf = np.float32(np.inf)
    middle = format.midpoints
    beyond = np.array([format.max * 1.01, format.max * 2, 1e30], np.float32)
    positive = np.concatenate(
        [format.grid, middle, np.nextafter(middle, inf), np.nextafter(middle, np.float32(0)), beyond]
    )
    return np.concatenate([positive, -positive]).astype(np.float32)


@pytest.mark.parametrize("format", ALL)
def test_all_256_codes_have_the_values_of_ml_dtypes(format: Format) -> None:
    expected = np.arange(256, dtype=np.uint8).view(ORACLES[format.name]).astype(np.float32)
    np.testing.assert_array_equal(format.values, expected)


@pytest.mark.parametrize("format", ALL)
def test_every_midpoint_and_its_neighbours_round_as_in_ml_dtypes(format: Format) -> None:
    x = edges(format)
    expected = np.clip(x, -format.max, format.max).astype(ORACLES[format.name]).view(np.uint8)
    np.testing.assert_array_equal(format.encode(x), expected)


@pytest.mark.parametrize(
    ("format", "maximum", "smallest"), [(E4M3, 448.0, 2.0**-9), (E5M2, 57344.0, 2.0**-16), (E4M3FNUZ, 240.0, 2.0**-10)]
)
def test_extremes_are_those_of_the_papers(format: Format, maximum: float, smallest: float) -> None:
    assert (format.max, format.smallest_subnormal) == (maximum, smallest)


@pytest.mark.parametrize("format", ALL)
def test_nan_stays_nan_and_infinity_saturates(format: Format) -> None:
    codes = format.encode(np.array([np.nan, np.inf, -np.inf]))
    assert np.isnan(format.decode(codes[:1])).all()
    assert format.decode(codes[1:]).tolist() == [format.max, -format.max]


@pytest.mark.parametrize("format", ALL)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_any_float_goes_to_the_nearest_grid_value(format: Format, values: list[float]) -> None:
    x = np.array(values, np.float32)
    chosen = format.decode(format.encode(x)).astype(np.float64)
    clipped = np.clip(x.astype(np.float64), -format.max, format.max)
    best = np.abs(clipped[:, None] - format.values[np.isfinite(format.values)].astype(np.float64)).min(axis=1)
    np.testing.assert_array_equal(np.abs(clipped - chosen), best)


@pytest.mark.parametrize("format", [*FORMATS.values(), INT8, TWO_TERMS], ids=lambda kind: kind.name)
def test_rounding_is_to_the_nearest_of_the_grid_of_two_to_the_even_index(format: Grid) -> None:
    midpoints = format.midpoints
    lower, upper = format.grid[:-1], format.grid[1:]
    even = np.where(np.arange(len(lower)) % 2 == 0, lower, upper)
    below, above = (np.nextafter(midpoints, np.float32(end)) for end in (0, np.inf))
    for x, expected in ((midpoints, even), (below, lower), (above, upper), (format.grid, format.grid)):
        np.testing.assert_array_equal(format.round(x), expected)
    assert format.round(np.array([2 * format.max], np.float32)) == [format.max]


@pytest.mark.parametrize("format", ALL)
def test_encoding_the_grid_gives_its_own_codes(format: Format) -> None:
    np.testing.assert_array_equal(format.encode(format.grid), np.arange(len(format.grid)))


def test_e4m3_agrees_with_onnxruntime_quantize_linear() -> None:
    x = edges(E4M3)
    node = onnx.helper.make_node("QuantizeLinear", ["x", "scale"], ["y"], output_dtype=onnx.TensorProto.FLOAT8E4M3FN)
    scale = onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [0.37])
    graph = onnx.helper.make_graph(
        [node],
        "quantize",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT8E4M3FN, ["n"])],
        [scale],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)}
    codes = session.run_with_ort_values(["y"], feed)[0].numpy()
    np.testing.assert_array_equal(E4M3.encode(x / np.float32(0.37)), codes)


def test_the_torch_kernel_agrees_with_the_reference_on_every_edge() -> None:
    x = np.concatenate([edges(E4M3), np.array([np.nan])]).astype(np.float32) * np.float32(0.37)
    codes = encode(torch.from_numpy(x), torch.tensor(0.37)).view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes, E4M3.encode(x / np.float32(0.37)))
