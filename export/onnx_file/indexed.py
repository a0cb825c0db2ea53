"""Index an ONNX graph for the rules: producers and readers of values, values on FP8 codes, and the operands of each
GEMM.

Graphs have 100,000 nodes, and chains of any length. So properties of values are computed once for all values, in the
order of the nodes, from the properties of a node's inputs: no rule walks back from each GEMM.

ONNX asks for nodes in topological order (F313), and most files have it; a file that does not is sorted and checked all
the same (`in_order`).

No weight is read. Constants are read one at a time, and only scales and zero points.

The branches of an `If` count as parts of the graph around it: fp8q writes each expert as a branch, with its GEMMs. A
branch may read values from before it, and nothing outside reads its values. So its nodes are checked as if they stood
in front of the `If`, as long as no name in the file stands for two values. The bodies of loops are not checked: their
nodes run several times, on other values.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

from . import names
from .constants import Constants, Numbers
from .external import Storage
from .tensors import attribute, constant_of, every_tensor

_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def branches(node: NodeProto) -> list[GraphProto]:
    """The branches of an If; none for any other node."""
    if node.op_type == "If":
        return [entry.g for entry in node.attribute if entry.type == AttributeProto.GRAPH]
    return []


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
    if inside:
        return all(count == 1 for name, count in Counter(made_in(graph)).items() if name in inside)
    return True


#: The FP8 element types of ONNX.
FP8_TYPES = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ)
GEMM_OPS = ("MatMul", "Gemm", "Conv")
#: Operators that only move values or change their type. These, and arithmetic with a constant, may stand between a GEMM
#: and the DequantizeLinear of its operand.
_MOVING = frozenset(
    (
        "Transpose",
        "Cast",
        "Reshape",
        "Identity",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Slice",
        "Split",
        "Gather",
        "Expand",
    )
)
#: Operators whose result holds the values of their first input, and so FP8 codes if these are codes.
_CARRYING = _MOVING - {"Cast"} | {"Concat", "TensorScatter"}
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
#: Operators whose inputs are checked in any domain.
READ = (*GEMM_OPS, "QuantizeLinear", "DequantizeLinear", "Cast", "Identity", "Constant")


@dataclass(frozen=True)
class Operand:
    """One side of a GEMM: the DequantizeLinear of FP8 codes that it comes from, if any, whether only Transposes lie in
    between (`clean`), and their number.

    `other`: the DequantizeLinear of other codes, such as INT8, that it comes from, if any.
    """

    dequantize: NodeProto | None = None
    other: NodeProto | None = None
    clean: bool = False
    transposes: int = 0

    def through(self, node: NodeProto) -> "Operand":
        """Return this operand behind one more operator that moves it, or computes with constants."""
        turn = node.op_type == "Transpose"
        return Operand(self.dequantize, self.other, self.clean and turn, self.transposes + turn)


@dataclass(frozen=True)
class GraphGemm:
    """A GEMM and its two operands, in order."""

    node: NodeProto
    operands: tuple[Operand, Operand]


@dataclass(frozen=True)
class Indexed:
    """A model, with the directory of its external data."""

    model: onnx.ModelProto
    directory: Path

    @cached_property
    def graphs(self) -> list[GraphProto]:
        """The graph, and before it the branches that are indexed with it (`bodies`)."""
        if one_value_a_name(self.model.graph):
            return [*graph_and_branches(self.model.graph)]
        return [self.model.graph]

    @property
    def nodes(self) -> Iterator[NodeProto]:
        """The nodes in the order of the file; those of a branch come before its If."""
        if len(self.graphs) > 1:
            return nodes_of(self.model.graph)
        return iter(self.model.graph.node)

    @cached_property
    def ordered(self) -> list[NodeProto]:
        """The nodes, sorted so that each comes behind the producers of its inputs."""
        return in_order([*self.nodes], self.producers)

    @cached_property
    def opset(self) -> int:
        """The version of the standard domain; 0 where it is not imported."""
        return next((entry.version for entry in self.model.opset_import if entry.domain in ("", "ai.onnx")), 0)

    @cached_property
    def initializers(self) -> Mapping[str, TensorProto]:
        """The tensors of the file by name, external ones and `Constant` nodes included."""
        tensors = {tensor.name: tensor for graph in self.graphs for tensor in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant" and node.output:
                tensors[node.output[0]] = constant_of(node)
        return tensors

    @cached_property
    def tensors(self) -> list[tuple[str, TensorProto]]:
        """Every tensor of the file, with its name for messages (`every_tensor`)."""
        return list(every_tensor(self.model))

    @cached_property
    def storage(self) -> Storage:
        """The tensors whose data lie in other files, and those files."""
        return Storage(self.tensors, self.directory)

    @cached_property
    def inputs(self) -> Mapping[str, ValueInfoProto]:
        """The graph's inputs, initializers left out."""
        stored = {tensor.name for tensor in self.model.graph.initializer}
        return {value.name: value for value in self.model.graph.input if value.name not in stored}

    @cached_property
    def outputs(self) -> Mapping[str, ValueInfoProto]:
        """The graph's outputs."""
        return {value.name: value for value in self.model.graph.output}

    @cached_property
    def producers(self) -> Mapping[str, NodeProto]:
        """Value -> the node that makes it."""
        return {output: node for node in self.nodes for output in node.output if output}

    @cached_property
    def readers(self) -> Mapping[str, list[tuple[NodeProto, int]]]:
        """Value -> the nodes that read it, with the number of the input."""
        readers: dict[str, list[tuple[NodeProto, int]]] = {}
        for node in self.nodes:
            for index, name in enumerate(node.input):
                readers.setdefault(name, []).append((node, index))
        return readers

    @cached_property
    def codes(self) -> Mapping[str, int]:
        """Every value that holds FP8 codes -> their element type; operators that only move data pass codes on."""
        types = {name: tensor.data_type for name, tensor in self.initializers.items() if tensor.data_type in FP8_TYPES}
        types |= {
            name: value.type.tensor_type.elem_type
            for name, value in self.inputs.items()
            if value.type.tensor_type.elem_type in FP8_TYPES
        }
        for node in self.ordered:
            kind = self.quantized_type(node) if node.op_type in ("QuantizeLinear", "Cast") else 0
            if node.op_type in _CARRYING and node.input:
                kind = types.get(node.input[0], 0)
            if kind in FP8_TYPES:
                types |= dict.fromkeys(filter(None, node.output), kind)
        return types

    def code_type(self, value: str) -> int:
        """The element type of the input of a DequantizeLinear: stored, of a graph input, or made by a QuantizeLinear
        (UINT8 by default).
        """
        if value in self.initializers:
            return self.initializers[value].data_type
        if value in self.inputs:
            return self.inputs[value].type.tensor_type.elem_type
        return (self.quantized_type(self.producers[value]) if value in self.producers else 0) or TensorProto.UINT8

    def quantized_type(self, node: NodeProto) -> int:
        """The element type that a QuantizeLinear or Cast makes: its attribute, else its zero point's type, else 0."""
        if stated := attribute(node, "output_dtype", 0) or attribute(node, "to", 0):
            return stated
        zero_point = self.initializers.get(node.input[2]) if len(node.input) > 2 else None
        if zero_point is not None:
            return zero_point.data_type
        return 0

    @cached_property
    def quantizers(self) -> list[NodeProto]:
        """Every QuantizeLinear and DequantizeLinear of FP8 codes."""
        return [
            node
            for node in self.nodes
            if (node.op_type == "QuantizeLinear" and node.output[0] in self.codes)
            or (node.op_type == "DequantizeLinear" and node.input[0] in self.codes)
        ]

    @cached_property
    def gemms(self) -> list[GraphGemm]:
        """Every GEMM of the graph, quantized or not."""
        return [
            GraphGemm(node, (self.operand(node.input[0]), self.operand(node.input[1])))
            for node in self.nodes
            if node.op_type in GEMM_OPS
        ]

    def operand(self, value: str) -> Operand:
        """The operand of a GEMM behind one of its inputs."""
        return self._operands.get(value, Operand())

    @cached_property
    def _operands(self) -> Mapping[str, Operand]:
        """Every value that comes from a DequantizeLinear through operators that move it or compute with constants."""
        operands: dict[str, Operand] = {}
        for node in self.ordered:
            operand = None
            if node.op_type == "DequantizeLinear":
                operand = Operand(node, clean=True) if node.input[0] in self.codes else Operand(other=node)
            elif node.op_type in _MOVING or node.op_type in _ARITHMETIC:
                computed = self._computed(node)
                before = operands.get(computed[0]) if computed else None
                if before and (node.op_type in _MOVING or len(computed) == 1):
                    operand = before.through(node)
            if operand is not None:
                operands |= dict.fromkeys(node.output, operand)
        return operands

    def _computed(self, node: NodeProto) -> list[str]:
        """The inputs of a node that are not tensors of the file."""
        return [name for name in node.input if name and name not in self.initializers]

    @cached_property
    def movers(self) -> Mapping[str, NodeProto]:
        """The producer of each value, looking through Transposes."""
        movers: dict[str, NodeProto] = {}
        for node in self.ordered:
            mover = movers.get(node.input[0]) if node.op_type == "Transpose" and node.input else node
            if mover is not None:
                movers |= dict.fromkeys(node.output, mover)
        return movers

    @cached_property
    def folded(self) -> set[str]:
        """The tensors of the file, and every value that is computed from them alone."""
        constants = set(self.initializers)
        for node in self.ordered:
            if node.input and constants.issuperset(filter(None, node.input)):
                constants.update(node.output)
        return constants

    def behind(self, value: str) -> NodeProto | None:
        """The only DequantizeLinear of FP8 codes that a value is computed from, by any operators but GEMMs; None
        where there is none or several.
        """
        return self._behind.get(value)

    @cached_property
    def _behind(self) -> Mapping[str, NodeProto]:
        sources: dict[str, NodeProto] = {}
        for node in self.ordered:
            if node.op_type in GEMM_OPS:
                continue
            if node.op_type == "DequantizeLinear" and node.input[0] in self.codes:
                sources |= dict.fromkeys(node.output, node)
                continue
            computed = self._computed(node)
            if len(computed) == 1 or not self.folded.isdisjoint(node.output):
                first = next((sources[name] for name in computed if name in sources), None)
                sources |= dict.fromkeys(node.output, first) if first is not None else {}
        return sources

    def module_near(self, name: str) -> str | None:
        """The module of the named node that is nearest to the node `name`, in steps up or down the graph; None where
        there is none.
        """
        waiting = deque(node for node in self.nodes if node.name == name)
        seen = {node.name for node in waiting}
        while waiting:
            node = waiting.popleft()
            if module := names.module_of(node.name):
                return module
            around = [self.producers[value] for value in node.input if value in self.producers]
            around += [reader for value in node.output for reader, _ in self.readers.get(value, [])]
            waiting += [other for other in around if other.name not in seen]
            seen |= {other.name for other in around}
        return None

    def is_constant(self, value: str) -> bool:
        """Tell whether a value is a tensor of the file."""
        return value in self.initializers

    @cached_property
    def constants(self) -> Constants:
        """The small constants: scales and zero points."""
        return Constants(self.initializers, self.producers, self.storage.places)

    def constant(self, value: str) -> Numbers | None:
        """The values of a small constant as FP32, through Cast and Identity; None where it is computed or not read."""
        return self.constants.get(value)


def in_order(nodes: Sequence[NodeProto], makers: Mapping[str, NodeProto]) -> list[NodeProto]:
    """Sort the nodes so that each comes behind the producers of its inputs, and otherwise keep the file's order.

    Nodes in a cycle, and nodes that depend on one, come last. `makers`: value -> the node that makes it.
    """
    made: set[str] = set()
    readers: dict[str, list[int]] = {}
    missing: list[int] = []
    ordered: list[NodeProto] = []
    for index, node in enumerate(nodes):
        lacking = {name for name in node.input if name in makers and name not in made}
        for name in lacking:
            readers.setdefault(name, []).append(index)
        missing.append(len(lacking))
        free = [] if lacking else [index]
        while free:
            ready = nodes[free.pop()]
            ordered.append(ready)
            for name in ready.output:
                made.add(name)
                for waiting in readers.pop(name, ()):
                    missing[waiting] -= 1
                    free += [] if missing[waiting] else [waiting]
    return ordered + [node for node, lacking in zip(nodes, missing, strict=True) if lacking]
