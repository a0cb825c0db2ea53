"""The branches of an If count as a part of the graph: GEMMs in them are found, values in them are made in order."""

from pathlib import Path

import pytest
from onnx import ModelProto, TensorProto, helper

from fp8q.export.lint.check import lint_file
from fp8q.export.onnx_file.indexed import nodes_of, one_value_a_name

from .test_lint_form import node, quantized


def with_choice(then: str, otherwise: str, reads: str = "x") -> ModelProto:
    """A model whose If makes one value in each branch, of what it `reads`."""
    branches = [
        helper.make_graph([node("Identity", reads, name)], name, [], [helper.make_tensor_value_info(name, 1, None)])
        for name in (then, otherwise)
    ]
    choice = helper.make_node("If", ["c"], ["y"], "choice", then_branch=branches[0], else_branch=branches[1])
    inputs = [helper.make_tensor_value_info("c", TensorProto.BOOL, []), helper.make_tensor_value_info("x", 1, ["n"])]
    return helper.make_model(helper.make_graph([choice], "g", inputs, [helper.make_tensor_value_info("y", 1, ["n"])]))


def test_the_nodes_of_branches_stand_before_their_if() -> None:
    model = with_choice("a", "b")
    assert [each.name for each in nodes_of(model.graph)] == [
        "b_Identity",
        "a_Identity",
        "choice",
    ]  # attributes are sorted


@pytest.mark.parametrize(("names", "expected"), [(("a", "b"), True), (("a", "a"), False), (("a", "y"), False)])
def test_branches_are_looked_at_where_no_name_means_two_values(names: tuple[str, str], expected: bool) -> None:
    assert one_value_a_name(with_choice(*names).graph) is expected


def into_branch(model: ModelProto) -> None:
    """Put the GEMM, and the DequantizeLinear of its weight, into a branch."""
    *before, weight, product = model.graph.node
    product.output[0] = "made"
    branches = [
        helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)])
        for name, nodes, out in (
            ("then", [weight, product], "made"),
            ("else", [node("MatMul", "x plain", "other")], "other"),
        )
    ]
    choice = helper.make_node("If", ["c"], ["y"], "choice", then_branch=branches[0], else_branch=branches[1])
    del model.graph.node[:]
    model.graph.node.extend([*before, choice])
    model.graph.initializer.append(helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    model.graph.initializer.append(helper.make_tensor("plain", TensorProto.FLOAT, [32, 16], [0.0] * 512))


def test_a_product_in_a_branch_is_a_product(tmp_path: Path) -> None:
    assert lint_file(quantized(into_branch, tmp_path)) == []


def test_what_is_made_in_a_branch_is_not_read_outside_it(tmp_path: Path) -> None:
    def change(model: ModelProto) -> None:
        into_branch(model)
        model.graph.node.append(node("Identity", "made", "outside"))

    (found,) = lint_file(quantized(change, tmp_path))
    assert (found.rule, found.node) == ("F313", "outside_Identity")
