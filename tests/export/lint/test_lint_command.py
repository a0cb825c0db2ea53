"""`fp8q lint` as its users meet it: graphs that others exported, a run's own, exit codes, JSON, files that are none."""

import json
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnxruntime import quantization

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.stages.commands.lint import Linted

from ...graphs import products_of_the_demo

Fp8q = Callable[..., Any]
Foreign = Callable[..., Path]
NUMPY: dict[int, Any] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.INT8: np.int8,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
}
LAYER = "/model/layers.0/mlp/down_proj"


def node(operator: str, inputs: str, output: str, name: str | None = None, **attributes: Any) -> NodeProto:
    """A node, named as ModelOpt names it."""
    scope = (
        f"{'input' if inputs.startswith('x') else 'weight'}_quantizer/"
        if operator.endswith("quantizeLinear") or operator == "QuantizeLinear"
        else ""
    )
    return helper.make_node(
        operator, inputs.split(), [output], name=f"{LAYER}/{scope}{operator}" if name is None else name, **attributes
    )


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    """`foreign(nodes, {name: (type, values)}, opset=21)`: a graph of one product as other tools write them, x [batch,
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


def findings(result: Any) -> list[tuple[str, str, str | None]]:
    assert result.out.count("\n") == 1
    return [(finding["rule"], finding["node"], finding["module"]) for finding in json.loads(result.out)["findings"]]


# Graphs of others.


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
        result.out
        == f"{path}: opset 21, 1 products, 1 on FP8 codes on both sides; nothing promised of it\nno findings\n"
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
        "error   F205 nothing-quantized: of its products (1) none takes FP8 on both sides; quantize weights and inputs",
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
    assert result.out.endswith(
        "opset 19, 1 products, 1 on FP8 codes on both sides; nothing promised of it\nno findings\n"
    )


def test_many_findings_of_one_rule_are_counted_and_json_has_them_all(fp8q: Fp8q, decoder: Callable[..., Any]) -> None:
    path = decoder(layers=2, scale_type=TensorProto.BFLOAT16).path
    result = fp8q("lint", path)
    assert [line.split()[1] for line in result.out.splitlines()[1:-1]] == ["F103"] * 8
    every = json.loads(fp8q("lint", path, "--json").out)["findings"]
    assert result.out.splitlines()[-1].strip() == f"F103: {len(every) - 8} more (--json has all)"


# A run's graph.


def test_the_graphs_of_a_run_are_held_against_its_promises(fp8q: Fp8q, demo_run: Run) -> None:
    for graph in (demo_run.onnx, demo_run.onnx_fp32):
        result = fp8q("lint", graph)
        assert result.code == 0
        assert result.out == (
            f"{graph}: opset 23, {products_of_the_demo(graph)} products, 28 on FP8 codes on both sides; held against "
            f"{demo_run.scales}\nno findings\n"
        )


def test_another_runs_graph_breaks_the_promise(fp8q: Fp8q, demo_run: Run, decoder: Callable[..., Any]) -> None:
    path = decoder().path
    assert fp8q("lint", path).code == 0
    result = fp8q("lint", path, "--run", demo_run.root, "--json")
    assert result.code == 3
    assert {"F203", "F206"} <= {rule for rule, _, _ in findings(result)}


def test_a_scale_that_was_changed_in_the_checkpoint_is_found(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    model = onnx.load_model(run.onnx, load_external_data=False)
    quantize = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == quantize.input[1])
    scale.CopyFrom(numpy_helper.from_array(np.array(3, np.float32), scale.name))
    run.onnx.write_bytes(model.SerializeToString())
    linted = api.lint(run.onnx)
    assert {finding.rule for finding in linted.findings} == {"F206"}
    assert isinstance(linted, Linted)
    assert linted.promised_by == run.scales


def test_weights_cut_short_or_gone_are_wrong_input(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    (shard,) = run.model.glob("*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    short = fp8q("lint", run.onnx, "--json")
    assert (short.code, "F403" in {rule for rule, _, _ in findings(short)}) == (2, True)
    assert short.err.startswith(f"fp8q: {run.onnx}: F403 external-bounds: ")
    assert short.err.endswith("; copy the graph's whole directory again\n")
    shard.unlink()
    gone = fp8q("lint", run.onnx)
    assert gone.code == 2
    assert f"its file {shard.name} is missing" in gone.err


def test_a_run_that_is_none(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    result = fp8q("lint", demo_run.onnx, "--run", tmp_path / "nowhere")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"fp8q: {tmp_path}/nowhere: there is no such directory; make a run with ")


# Files that are none.


def test_what_is_no_onnx_file_is_one_line_and_exit_code_2(
    fp8q: Fp8q, decoder: Callable[..., Any], tmp_path: Path
) -> None:
    good = decoder().path
    files = {
        tmp_path / "nowhere.onnx": "there is no such file",
        tmp_path: (
            "is a directory that holds neither run.json nor config.json nor models of Triton (folders with "
            "config.pbtxt); name an ONNX file, a Triton repository, a checkpoint or a run"
        ),
        tmp_path / "text.onnx": "is no ONNX model, or is cut short; export it again",
        tmp_path / "short.json": "is no ONNX model, or is cut short; export it again",
        tmp_path / "empty.onnx": "is no ONNX model, or holds no node; export it again",
    }
    (tmp_path / "text.onnx").write_text("a graph, one day")
    (tmp_path / "short.json").write_bytes(good.read_bytes()[:-500])
    (tmp_path / "empty.onnx").write_bytes(b"")
    for path, message in files.items():
        result = fp8q("lint", path, "--json")
        assert (result.code, result.out, result.err) == (2, "", f"fp8q: {path}: {message}\n")


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("graph.node.name", lambda model: setattr(model.graph.node[-1], "name", "MARK")),
        ("graph.node.op_type", lambda model: setattr(model.graph.node[-1], "op_type", "MARK")),
        ("graph.node.domain", lambda model: setattr(model.graph.node[-1], "domain", "MARK")),
        (
            "graph.node.attribute.g.node.output",
            lambda model: model.graph.node[-1].attribute.add(name="body", type=5).g.node.add().output.append("MARK"),
        ),
        (
            "graph.initializer.external_data.value",
            lambda model: setattr(model.graph.initializer[-1].external_data[0], "value", "MARK"),
        ),
        (
            "graph.input.type.tensor_type.shape.dim.dim_param",
            lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "MARK"),
        ),
    ],
)
def test_text_that_is_no_utf_8_is_damage_and_no_fault(
    fp8q: Fp8q, decoder: Callable[..., Any], field: str, spoil: Callable[[onnx.ModelProto], Any]
) -> None:
    path = decoder().path
    model = onnx.load_model(path, load_external_data=False)
    spoil(model)
    path.write_bytes(model.SerializeToString().replace(b"MARK", b"MAR\xff"))
    result = fp8q("lint", path)
    assert (result.code, result.out, result.err) == (
        2,
        "",
        f"fp8q: {path}: is damaged ({field} is no UTF-8); export it again\n",
    )


def test_cut_anywhere_a_graph_is_an_input_error_or_has_an_error_and_never_a_fault(
    decoder: Callable[..., Any], tmp_path: Path
) -> None:
    written = decoder()
    data = written.path.read_bytes()
    cut = written.path.with_name("cut.onnx")
    for size in range(0, len(data), 101):
        cut.write_bytes(data[:size])
        with pytest.raises(InputError, match="is no ONNX model, or "):
            api.lint(cut)


def test_a_graph_over_four_gigabytes_takes_no_memory(fp8q: Fp8q, tmp_path: Path) -> None:
    out, wide = 65_536, 65_536  # 4.3 GB of codes, in a file with a hole
    with open(tmp_path / "weights.bin", "wb") as handle:
        handle.truncate(4 + out * wide)
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT8E4M3FN, dims=[out, wide], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", "weights.bin"), ("offset", 4)):
        weight.external_data.add(key=key, value=str(value))
    scale = numpy_helper.from_array(np.array(0.5, np.float32), "s")
    nodes = [
        node("QuantizeLinear", "x s", "codes", name="q", output_dtype=17),
        node("DequantizeLinear", "codes s", "value", name="dq", output_dtype=1),
        node("DequantizeLinear", "w s", "wide", output_dtype=1),
        node("Gemm", "value wide", "y", transB=1),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", wide])] for name in "xy"]
    model = helper.make_model(
        helper.make_graph(nodes, "large", ends[0], ends[1], [scale, weight]),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=11,
    )
    (tmp_path / "large.onnx").write_bytes(model.SerializeToString())
    tracemalloc.start()
    try:
        assert fp8q("lint", tmp_path / "large.onnx", "--json").out == '{"findings": []}\n'
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_the_lint_needs_nothing_but_the_base_install(
    base_install: Callable[..., subprocess.CompletedProcess[str]], demo_run: Run
) -> None:
    shown = base_install("lint", demo_run.onnx)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.endswith(f"held against {demo_run.scales}\nno findings\n")
