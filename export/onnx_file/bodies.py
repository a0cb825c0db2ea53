"""Treat the branches of an `If` as parts of the graph around it: fp8q writes each expert as a branch, with its
products.

A branch may read values from before it, and nothing outside reads its values. So its nodes are checked as if they stood
in front of the `If`, as long as no name in the file stands for two values. The bodies of loops are not checked: their
nodes run several times, on other values.
"""

from collections import Counter
from collections.abc import Iterator

from onnx import AttributeProto, GraphProto, NodeProto

_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def branches(node: NodeProto) -> list[GraphProto]:
    """The branches of an If; none for any other node."""
    return [entry.g for entry in node.attribute if entry.type == AttributeProto.GRAPH] if node.op_type == "If" else []


def has_body(node: NodeProto) -> bool:
    """Tell whether a node has a body of any kind."""
    return any(entry.type in _BODIES for entry in node.attribute)


def graph_and_branches(graph: GraphProto) -> Iterator[GraphProto]:
    """Return `graph` and all branches in it, inner branches first."""
    for node in graph.node:
        for branch in branches(node):
            yield from graph_and_branches(branch)
    yield graph


def nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of `graph` and of all branches in it; those of a branch come before its If."""
    for node in graph.node:
        for branch in branches(node):
            yield from nodes_of(branch)
        yield node


def made_in(graph: GraphProto) -> list[str]:
    """The names of all values and tensors of `graph` and its branches, with repetitions."""
    stored = [tensor.name for part in graph_and_branches(graph) for tensor in part.initializer]
    return [*stored, *(name for node in nodes_of(graph) for name in node.output if name)]


def one_value_a_name(graph: GraphProto) -> bool:
    """Tell whether every value and tensor in the graph and its branches has a name of its own."""
    inside = {name for node in graph.node for branch in branches(node) for name in made_in(branch)}
    return all(count == 1 for name, count in Counter(made_in(graph)).items() if name in inside) if inside else True
