"""What is worked out once for all values is what a walk back from each gives, which is slow and easily understood."""

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper

from fp8q.export.onnx_file.indexed import GEMM_OPS, Indexed, in_order

OPERATORS = ["Transpose", "Relu", "Mul", "Identity", "DequantizeLinear", "MatMul", "Add", "Concat"]


def graphs() -> st.SearchStrategy[list[NodeProto]]:
    """Nodes v0, v1 … that read tensors of the file (c: FP8 codes, k: FP32), an input x, and values before them."""

    def made(choices: list[tuple[str, int, int]]) -> list[NodeProto]:
        names = ["x", "c", "k"]
        nodes = []
        for index, (operator, first, second) in enumerate(choices):
            inputs = [names[first % len(names)], names[second % len(names)]]
            inputs = inputs[:1] if operator in ("Transpose", "Relu", "Identity") else inputs
            inputs = [inputs[0] if index % 3 else "c", "k"] if operator == "DequantizeLinear" else inputs
            nodes.append(helper.make_node(operator, inputs, [f"v{index}"], name=f"v{index}"))
            names.append(f"v{index}")
        return nodes

    choice = st.tuples(st.sampled_from(OPERATORS), st.integers(0, 40), st.integers(0, 40))
    return st.lists(choice, max_size=30).map(made)


def indexed(nodes: list[NodeProto]) -> Indexed:
    stored = [
        helper.make_tensor("c", TensorProto.FLOAT8E4M3FN, [4], bytes(4), raw=True),
        helper.make_tensor("k", TensorProto.FLOAT, [], [1.0]),
    ]
    value = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])]
    model: ModelProto = helper.make_model(helper.make_graph(nodes, "graph", value, [], stored))
    return Indexed(model, Path())


def computed(graph: Indexed, node: NodeProto) -> list[str]:
    return [name for name in node.input if name not in graph.initializers]


def walked(graph: Indexed, value: str) -> tuple[str | None, bool, int]:
    """The DequantizeLinear of FP8 codes that a value comes from, whether but Transpose lies between, how many."""
    between: list[str] = []
    while (node := graph.producers.get(value)) is not None:
        if node.op_type == "DequantizeLinear":
            if node.input[0] not in graph.codes:
                return None, False, 0
            return node.name, set(between) <= {"Transpose"}, between.count("Transpose")
        names = computed(graph, node)
        if not names or not (
            node.op_type in ("Transpose", "Identity") or (node.op_type in ("Mul", "Add") and len(names) == 1)
        ):
            break
        between.append(node.op_type)
        value = names[0]
    return None, False, 0


def folded(graph: Indexed, value: str) -> bool:
    node = graph.producers.get(value)
    return value in graph.initializers or (node is not None and all(folded(graph, name) for name in node.input))


def searched(graph: Indexed, value: str) -> str | None:
    """The first DequantizeLinear of FP8 codes that a value is computed from, alone or with constants."""
    node = graph.producers.get(value)
    if node is None or node.op_type in GEMM_OPS:
        return None
    if node.op_type == "DequantizeLinear" and node.input[0] in graph.codes:
        return str(node.name)
    names = computed(graph, node)
    if len(names) != 1 and not folded(graph, value):
        return None
    return next((found for name in names if (found := searched(graph, name)) is not None), None)


def untransposed(graph: Indexed, value: str) -> str | None:
    node = graph.producers.get(value)
    while node is not None and node.op_type == "Transpose":
        node = graph.producers.get(node.input[0])
    return None if node is None else node.name


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_what_is_behind_a_value_is_what_a_walk_finds_in_any_order_of_the_file(
    nodes: list[NodeProto], shuffled: random.Random
) -> None:
    shuffled.shuffle(nodes)
    graph = indexed(nodes)
    for value in graph.producers:
        operand, behind, mover = graph.operand(value), graph.behind(value), graph.movers.get(value)
        found = operand.dequantize.name if operand.dequantize is not None else None
        expected = walked(graph, value)
        assert found == expected[0]
        assert found is None or (operand.clean, operand.transposes) == expected[1:]
        assert (behind.name if behind is not None else None) == searched(graph, value)
        assert (mover.name if mover is not None else None) == untransposed(graph, value)
        assert (value in graph.folded) == folded(graph, value)


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_each_node_comes_once_and_behind_those_that_make_what_it_reads(
    nodes: list[NodeProto], shuffled: random.Random
) -> None:
    in_file = [node.name for node in nodes]
    makers = {node.output[0]: node for node in nodes}
    assert [node.name for node in in_order(nodes, makers)] == in_file
    shuffled.shuffle(nodes)
    ordered = [node.name for node in in_order(nodes, makers)]
    assert sorted(ordered) == sorted(in_file)
    for node in nodes:
        assert all(ordered.index(name) < ordered.index(node.name) for name in node.input if name in makers)


def test_nodes_in_a_circle_come_last() -> None:
    made = [("a", "c"), ("b", "a"), ("c", "b"), ("d", "x"), ("e", "a")]
    nodes = [helper.make_node("Relu", [read], [name], name=name) for name, read in made]
    ordered = in_order(nodes, {node.output[0]: node for node in nodes})
    assert [node.name for node in ordered] == ["d", "a", "b", "c", "e"]
