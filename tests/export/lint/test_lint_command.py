"""`fp8q lint` as its users meet it: graphs that others exported, a run's own, exit codes, JSON, files that are none."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnxruntime import quantization

from .foreign_nodes import LAYER, node
from .lint_output import Fp8q, findings

Foreign = Callable[..., Path]
NUMPY: dict[int, Any] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.INT8: np.int8,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
}


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    """`foreign(nodes, {name: (type, values)}, opset=21)`: a graph of one GEMM as other tools write them, x [batch,
    32] to y.
    """

    def write(
        nodes: Sequence[NodeProto],
        constants: dict[str, tuple[int, Any]],
        opset: int = 21,
        compute: int = TensorProto.FLOAT,
        x: Sequence[Any] = ("batch", 32),
    ) -> Path:
        stored = [
            numpy_helper.from_array(np.asarray(values).astype(NUMPY[kind]), name)
            for name, (kind, values) in constants.items()
        ]
        ends = [[helper.make_tensor_value_info(name, compute, shape)] for name, shape in (("x", x), ("y", None))]
        model = helper.make_model(
            helper.make_graph(nodes, "theirs", ends[0], ends[1], stored),
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=10,
        )
        (tmp_path / "theirs.onnx").write_bytes(model.SerializeToString())
        return tmp_path / "theirs.onnx"

    return write


ACTIVATION = [
    node("QuantizeLinear", "x x_scale x_zero", "x_codes"),
    node("DequantizeLinear", "x_codes x_scale x_zero", "x_value"),
]
WEIGHT = np.linspace(-2, 2, 32 * 48).reshape(32, 48)


def constants(
    scale: int = TensorProto.FLOAT, code: int = TensorProto.FLOAT8E4M3FN, weight: Any = WEIGHT
) -> dict[str, tuple[int, Any]]:
    return {
        "x_scale": (scale, 0.5),
        "x_zero": (code, 0),
        "w": (code, weight),
        "w_scale": (scale, 0.25),
        "w_zero": (code, 0),
    }


def test_per_tensor_scales_before_a_gemm_are_good(fp8q: Fp8q, foreign: Foreign) -> None:
    nodes = [
        *ACTIVATION,
        node("DequantizeLinear", "w w_scale w_zero", "w_value"),
        node("Gemm", "x_value w_value bias", "y", transB=1),
    ]
    path = foreign(nodes, constants(weight=WEIGHT.T) | {"bias": (TensorProto.FLOAT, np.zeros(48))})
    result = fp8q("lint", path)
    assert (result.code, result.err) == (0, "")
    assert (
        result.out == f"{path}: opset 21, 1 GEMMs, 1 on FP8 codes on both sides; nothing expected of it\nno findings\n"
    )


def test_scales_in_fp16_are_errors_that_name_node_and_module(fp8q: Fp8q, foreign: Foreign) -> None:
    nodes = [
        *ACTIVATION,
        node("DequantizeLinear", "w w_scale w_zero", "w_value"),
        node("MatMul", "x_value w_value", "y"),
    ]
    path = foreign(nodes, constants(TensorProto.FLOAT16), opset=19, compute=TensorProto.FLOAT16)
    result = fp8q("lint", path, "--json")
    assert result.code == 3
    assert json.loads(result.out)["findings"][0] == {
        "file": str(path),
        "rule": "F103",
        "severity": "error",
        "node": f"{LAYER}/weight_quantizer/DequantizeLinear",
        "module": "model.layers.0.mlp.down_proj",
        "message": "scale w_scale is FLOAT16; store it as FLOAT and state output_dtype (from opset 23 on)",
    }
    assert [finding[0] for finding in findings(result)] == ["F103", "F103"]
    first = (
        f"F103 scale-type: {LAYER}/weight_quantizer/DequantizeLinear: scale w_scale is FLOAT16; store it as FLOAT and "
        "state output_dtype (from opset 23 on)"
    )
    assert result.err == f"fp8q: {path}: 2 errors, first {first}\n"


def test_int8_called_fp8_is_told(fp8q: Fp8q, foreign: Foreign) -> None:
    nodes = [
        *ACTIVATION,
        node("DequantizeLinear", "w w_scale w_zero", "w_value"),
        node("MatMul", "x_value w_value", "y", name="product"),
    ]
    result = fp8q("lint", foreign(nodes, constants(code=TensorProto.INT8)))
    assert result.code == 3
    assert result.out.splitlines()[1:] == [
        "error   F205 nothing-quantized: of its GEMMs (1) none takes FP8 on both sides; quantize weights and inputs",
        (
            f"warning F210 other-codes: product: multiplies INT8 codes ({LAYER}/input_quantizer/DequantizeLinear); "
            "quantize to FLOAT8E4M3FN for FP8"
        ),
        (
            f"warning F210 other-codes: product: multiplies INT8 codes ({LAYER}/weight_quantizer/DequantizeLinear); "
            "quantize to FLOAT8E4M3FN for FP8"
        ),
    ]


def test_an_int8_zero_point_on_fp8_codes_is_an_error(fp8q: Fp8q, foreign: Foreign) -> None:
    nodes = [
        *ACTIVATION,
        node("DequantizeLinear", "w w_scale w_zero", "w_value"),
        node("MatMul", "x_value w_value", "y"),
    ]
    result = fp8q("lint", foreign(nodes, constants() | {"w_zero": (TensorProto.INT8, 0)}), "--json")
    assert (result.code, findings(result)) == (
        3,
        [("F106", f"{LAYER}/weight_quantizer/DequantizeLinear", "model.layers.0.mlp.down_proj")],
    )


def test_convolutions_count_as_products_and_their_scales_run_along_the_channels(fp8q: Fp8q, foreign: Foreign) -> None:
    def convolution(axis: int) -> Any:
        nodes = [
            *ACTIVATION,
            node("DequantizeLinear", "w w_scale", "w_value", axis=axis),
            node("Conv", "x_value w_value", "y"),
        ]
        held = constants(weight=np.ones((48, 32, 3, 3))) | {"w_scale": (TensorProto.FLOAT, np.ones((48, 32)[axis]))}
        return fp8q("lint", foreign(nodes, held, x=("batch", 32, 8, 8)), "--json")

    assert (convolution(0).code, findings(convolution(0))) == (0, [])
    assert (convolution(1).code, [rule for rule, _, _ in findings(convolution(1))]) == (3, ["F208"])


def test_a_weight_quantized_in_the_graph_is_a_warning_and_exit_code_0(fp8q: Fp8q, foreign: Foreign) -> None:
    nodes = [
        *ACTIVATION,
        node("QuantizeLinear", "w w_scale w_zero", "w_codes"),
        node("DequantizeLinear", "w_codes w_scale w_zero", "w_value"),
    ]
    path = foreign([*nodes, node("MatMul", "x_value w_value", "y")], constants() | {"w": (TensorProto.FLOAT, WEIGHT)})
    result = fp8q("lint", path, "--json")
    assert (result.code, result.err, [rule for rule, _, _ in findings(result)]) == (0, "", ["F111"])


def test_a_weight_quantized_in_the_graph_may_have_a_scale_for_each_channel(fp8q: Fp8q, foreign: Foreign) -> None:
    def rules(axis: int) -> list[str]:
        pair = (
            node("QuantizeLinear", "w w_scale", "w_codes", axis=1, output_dtype=17),
            node("DequantizeLinear", "w_codes w_scale", "w_value", axis=axis),
        )
        held = constants() | {"w": (TensorProto.FLOAT, WEIGHT), "w_scale": (TensorProto.FLOAT, np.ones(48))}
        path = foreign([*ACTIVATION, *pair, node("MatMul", "x_value w_value", "y")], held)
        return [rule for rule, _, _ in findings(fp8q("lint", path, "--json"))]

    assert (rules(1), rules(0)) == (["F111"], ["F107", "F111"])


def test_nameless_nodes_and_dimensions_and_idle_domains_are_warnings(fp8q: Fp8q, foreign: Foreign) -> None:
    nodes = [
        *ACTIVATION,
        node("DequantizeLinear", "w w_scale w_zero", "w_value", name=""),
        node("MatMul", "x_value w_value", "y", name=""),
    ]
    path = foreign(nodes, constants(), x=(None, 32))
    model = onnx.load_model(path)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path.write_bytes(model.SerializeToString())
    result = fp8q("lint", path)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[1:] == [
        "warning F309 unnamed-node: nodes have no name (2 of 4); name them",
        "warning F310 unused-domain: imports the domain com.microsoft and uses nothing of it; drop the import",
        (
            "warning F311 unnamed-dimension: the input x has a dynamic dimension without a name (axis 0); name it, "
            "such "
            "as batch or seq"
        ),
    ]


def test_what_onnx_runtime_quantizes_to_fp8_has_no_findings(fp8q: Fp8q, foreign: Foreign, tmp_path: Path) -> None:
    float_graph = foreign([node("MatMul", "x w", "y")], {"w": (TensorProto.FLOAT, WEIGHT)}, opset=19)
    model = onnx.load_model(float_graph)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 48]))
    float_graph.write_bytes(model.SerializeToString())
    assert [rule for rule, _, _ in findings(fp8q("lint", float_graph, "--json"))] == ["F205"]

    class Rows(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = 3

        def get_next(self) -> dict[str, Any] | None:
            self.left -= 1
            return (
                {"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32) * self.left} if self.left >= 0 else None
            )

    kinds = {
        "activation_type": quantization.QuantType.QFLOAT8E4M3FN,
        "weight_type": quantization.QuantType.QFLOAT8E4M3FN,
    }
    quantization.quantize_static(
        float_graph,
        tmp_path / "quantized.onnx",
        Rows(),
        calibrate_method=quantization.CalibrationMethod.Distribution,
        **kinds,
    )
    result = fp8q("lint", tmp_path / "quantized.onnx")
    assert result.code == 0
    assert result.out.endswith("opset 19, 1 GEMMs, 1 on FP8 codes on both sides; nothing expected of it\nno findings\n")


def test_many_findings_of_one_rule_are_counted_and_json_has_them_all(fp8q: Fp8q, decoder: Callable[..., Any]) -> None:
    path = decoder(layers=2, scale_type=TensorProto.BFLOAT16).path
    result = fp8q("lint", path)
    assert [line.split()[1] for line in result.out.splitlines()[1:-1]] == ["F103"] * 8
    every = json.loads(fp8q("lint", path, "--json").out)["findings"]
    assert result.out.splitlines()[-1].strip() == f"F103: {len(every) - 8} more (--json has all)"
