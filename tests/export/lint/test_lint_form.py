"""Files that no exporter should write and that a lint must survive: each gets a finding, or none where it is valid, and
never a fault or an endless walk.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from fp8q.export.lint.check import lint_file

Change = Callable[[ModelProto], Any]


def quantized(change: Change, directory: Path) -> Path:
    """A GEMM of FP8 codes (x [batch, 32] quantized with `s`, `w` [32, 16] with the scales `ws`), changed."""
    weight = helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [32, 16], bytes(512), raw=True)
    scales = [
        helper.make_tensor("s", TensorProto.FLOAT, [], [0.5]),
        helper.make_tensor("ws", TensorProto.FLOAT, [16], [1.0] * 16),
    ]
    nodes = [
        node("QuantizeLinear", "x s", "q", output_dtype=TensorProto.FLOAT8E4M3FN),
        node("DequantizeLinear", "q s", "v", output_dtype=TensorProto.FLOAT),
        node("DequantizeLinear", "w ws", "wv", axis=1, output_dtype=TensorProto.FLOAT),
        node("MatMul", "v wv", "y"),
    ]
    x, y = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])]
        for name, size in (("x", 32), ("y", 16))
    )
    model = helper.make_model(
        helper.make_graph(nodes, "product", x, y, [weight, *scales]),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=11,
    )
    change(model)
    (directory / "data.bin").write_bytes(bytes(64))
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return directory / "model.onnx"


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    return helper.make_node(
        operator, inputs.split(), outputs.split(), name=f"{outputs or inputs}_{operator}", **attributes
    )


def with_nodes(*nodes: NodeProto) -> Change:
    return lambda model: model.graph.node.extend(nodes)


def constant(name: str, **value: Any) -> Change:
    """The initializer `name` as a Constant node instead."""

    def change(model: ModelProto) -> None:
        model.graph.initializer.remove(next(tensor for tensor in model.graph.initializer if tensor.name == name))
        model.graph.node.insert(0, node("Constant", "", name, **value))

    return change


def with_tensor(kind: int = TensorProto.FLOAT, dims: tuple[int, ...] = (1,), location: str = "data.bin") -> Change:
    def change(model: ModelProto) -> None:
        tensor = model.graph.initializer.add(name="u", data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=location)

    return change


@pytest.mark.parametrize("change", [constant("s", value_float=0.5), constant("ws", value_floats=[1.0] * 16)])
def test_a_constant_is_read_whichever_attribute_holds_it(tmp_path: Path, change: Change) -> None:
    assert lint_file(quantized(change, tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("s", {"value_float": 0.0}),
        ("s", {"value_int": 0}),
        ("ws", {"value_floats": [0.0] * 16}),
        ("ws", {"value_ints": [0] * 16}),
    ],
)
def test_a_constants_numbers_are_held_against_the_rules(tmp_path: Path, name: str, value: dict[str, Any]) -> None:
    found = {finding.rule for finding in lint_file(quantized(constant(name, **value), tmp_path))}
    assert found == {"F104", "F103"} if next(iter(value)).startswith("value_int") else {"F104"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            with_nodes(node("Transpose", "b", "a"), node("Transpose", "a", "b"), node("MatMul", "a wv", "z")),
            {"F202", "F313"},
        ),
        (
            with_nodes(
                node("Identity", "b", "a"),
                node("Identity", "a", "b"),
                node("DequantizeLinear", "q a", "z", output_dtype=1),
            ),
            {"F104", "F313"},
        ),
    ],
)
def test_a_graph_that_runs_in_a_circle_ends(tmp_path: Path, change: Change, expected: set[str]) -> None:
    assert {finding.rule for finding in lint_file(quantized(change, tmp_path))} == expected


FORM = [
    (with_nodes(node("MatMul", "v", "z")), "z_MatMul: MatMul has 1 inputs and takes 2 at least"),
    (
        with_nodes(node("DequantizeLinear", "", "z")),
        "z_DequantizeLinear: DequantizeLinear has 0 inputs and takes 2 at least",
    ),
    (
        with_nodes(node("QuantizeLinear", "x s", "")),
        "x s_QuantizeLinear: QuantizeLinear has 0 outputs and takes 1 at least",
    ),
    (with_nodes(node("Constant", "q", "z", value_float=1.0)), "z_Constant: Constant has 1 inputs and takes 0 at most"),
    (with_nodes(node("Constant", "", "", value_float=1.0)), "_Constant: Constant has 0 outputs and takes 1 at least"),
    (with_nodes(helper.make_node("Transpose", [""], ["z"], name="t")), "t: Transpose lacks one of its inputs"),
    (with_nodes(node("Cast", "x", "z")), "z_Cast: Cast has no attribute to"),
    (with_nodes(node("Cast", "x", "z", to=99)), "z_Cast: Cast names the element type 99, which there is not"),
    (with_tensor(kind=99), "u: its element type is 99, which there is not"),
    (with_tensor(kind=0), "u: its element type is 0, which there is not"),
    (with_tensor(kind=TensorProto.STRING), "u: it holds strings, which cannot lie in another file"),
    (with_tensor(dims=(-4,)), "u: its shape is [-4]"),
    (with_tensor(location="a\0b"), "u: the place of its data is no path (3 characters)"),
    (with_tensor(location="a" * 5000), "u: the place of its data is no path (5000 characters)"),
    (lambda model: setattr(model.opset_import[0], "version", 2**40), "opset 1099511627776 is no opset"),
]


@pytest.mark.parametrize(("change", "message"), FORM, ids=lambda case: case[:40] if isinstance(case, str) else "")
def test_what_the_other_rules_take_for_granted_is_said_and_nothing_else(
    fp8q: Callable[..., Any], tmp_path: Path, change: Change, message: str
) -> None:
    path = quantized(change, tmp_path)
    assert [str(finding) for finding in lint_file(path)] == [f"F314 form: {message}; export the graph again"]
    assert fp8q("lint", path).code == 3


@pytest.mark.parametrize("dims", [(2**62,), (2**62, 2**62)])
def test_a_tensor_larger_than_any_file_is_out_of_bounds(tmp_path: Path, dims: tuple[int, ...]) -> None:
    assert [finding.rule for finding in lint_file(quantized(with_tensor(dims=dims), tmp_path))] == ["F403"]


def test_a_scale_larger_than_any_is_not_read(tmp_path: Path) -> None:
    def change(model: ModelProto) -> None:
        with_tensor(dims=(2**40,))(model)
        model.graph.node[2].input[1] = "u"

    unread, outside = lint_file(quantized(change, tmp_path))
    assert str(unread) == (
        "F104 scale-value: wv_DequantizeLinear: scale u has 1099511627776 numbers and is not read: no scale has more "
        "than 4194304; store scales that fit what they scale"
    )
    assert outside.rule == "F403"


def test_an_operator_between_q_dq_and_a_wide_product_is_no_finding(tmp_path: Path) -> None:
    def change(model: ModelProto) -> None:
        model.graph.initializer.append(helper.make_tensor("wide", TensorProto.FLOAT, [32, 16], [1.0] * 512))
        with_nodes(node("Relu", "v", "r"), node("MatMul", "r wide", "z"))(model)

    assert lint_file(quantized(change, tmp_path)) == []


def test_an_operator_of_another_domain_may_take_what_it_likes(tmp_path: Path) -> None:
    def change(model: ModelProto) -> None:
        model.opset_import.append(helper.make_opsetid("theirs", 1))
        model.graph.node.append(helper.make_node("Attention", [], ["z"], name="attend", domain="theirs"))

    assert [finding.rule for finding in lint_file(quantized(change, tmp_path))] == ["F303"]


def test_a_type_that_the_safetensors_table_lacks_is_no_error(tmp_path: Path) -> None:
    header = json.dumps({"u": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "data.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))

    def change(model: ModelProto) -> None:
        with_tensor(TensorProto.UINT16, (2,), "data.safetensors")(model)
        model.graph.initializer[-1].external_data.add(key="offset", value=str(8 + len(header)))

    assert lint_file(quantized(change, tmp_path)) == []
