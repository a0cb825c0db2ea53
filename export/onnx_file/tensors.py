"""The tensors of an ONNX file: their places in it, types and sizes."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

Array = npt.NDArray[np.generic]
#: Element types narrower than a byte, and their bits.
_PACKED: dict[int, int] = {
    TensorProto.DataType.Value(name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if name in TensorProto.DataType.DESCRIPTOR.values_by_name
}


def every_tensor(model: ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Every tensor of a file with a name for messages: initializers, sparse ones, and tensors in attributes, bodies and
    functions, since a loader opens the external data of all.
    """
    graphs = [
        model.graph,
        *(graph for entry in model.training_info for graph in (entry.initialization, entry.algorithm)),
    ]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        for node in nodes:
            yield from _in_attributes(node, graphs)
        nodes = []
        if graphs:
            graph = graphs.pop()
            yield from ((tensor.name, tensor) for tensor in graph.initializer)
            for sparse in graph.sparse_initializer:
                yield sparse.values.name, sparse.values
                yield sparse.values.name, sparse.indices
            nodes = list(graph.node)


def _in_attributes(node: NodeProto, graphs: list[GraphProto]) -> Iterator[tuple[str, TensorProto]]:
    """The tensors in a node's attributes; graphs in attributes are appended to `graphs`."""
    for entry in node.attribute:
        if entry.type in (AttributeProto.TENSOR, AttributeProto.TENSORS):
            for tensor in [*([entry.t] if entry.HasField("t") else []), *entry.tensors]:
                yield tensor.name or node.name, tensor
        elif entry.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            graphs += [*([entry.g] if entry.HasField("g") else []), *entry.graphs]
        elif entry.type in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
            for sparse in [*([entry.sparse_tensor] if entry.HasField("sparse_tensor") else []), *entry.sparse_tensors]:
                yield from ((node.name, sparse.values), (node.name, sparse.indices))


def constant_of(node: NodeProto) -> TensorProto:
    """The tensor of a `Constant`, from whichever attribute holds it; an empty one for strings and sparse tensors."""
    for entry in node.attribute:
        if entry.name == "value":
            held: TensorProto = entry.t
            return held
        if entry.name in ("value_float", "value_int"):
            return helper.make_tensor(
                "",
                *(
                    (TensorProto.FLOAT, [], [entry.f])
                    if entry.name == "value_float"
                    else (TensorProto.INT64, [], [entry.i])
                ),
            )
        if entry.name in ("value_floats", "value_ints"):
            kind, values = (
                (TensorProto.FLOAT, entry.floats) if entry.name == "value_floats" else (TensorProto.INT64, entry.ints)
            )
            return helper.make_tensor("", kind, [len(values)], values)
    return TensorProto()


def attribute(node: NodeProto, name: str, default: int) -> int:
    """The value of an integer attribute of a node."""
    return next((int(entry.i) for entry in node.attribute if entry.name == name), default)


def elements_of(tensor: TensorProto) -> int:
    """Count the elements of a tensor by its shape."""
    return math.prod(tensor.dims)


def bytes_of(tensor: TensorProto) -> int:
    """The size of a tensor's data in bytes, from its type and shape."""
    bits = _PACKED.get(tensor.data_type) or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return -(-elements_of(tensor) * bits // 8)


def type_name(kind: int) -> str:
    """An element type's name, as FLOAT8E4M3FN."""
    return TensorProto.DataType.Name(kind) if kind in TensorProto.DataType.values() else str(kind)
