"""The tensors of an ONNX file: where they are kept in it, how many bytes their data take, and where those lie.

A file may come from anywhere, and say of its external data what it likes. So a place is looked at before anything there
is opened: it must be a regular file in the graph's directory or below, symbolic links followed. And only so much is
read as a scale can be.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from ...errors import InputError
from ...files import regular_file

Array = npt.NDArray[np.generic]
#: Element types narrower than a byte, and their bits.
_PACKED: dict[int, int] = {
    TensorProto.DataType.Value(name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if name in TensorProto.DataType.DESCRIPTOR.values_by_name
}
#: A number as it may stand for an offset or a length.
_NUMBER = re.compile(r"-?[0-9]{1,4000}", re.ASCII)


def every_tensor(model: ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Every tensor of a file and what to call it: initializers, sparse ones, and those in attributes, in bodies and in
    functions too, since whoever loads the file opens the external data of all.
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
    """The tensors in a node's attributes; the bodies there are added to `graphs`."""
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
    """The tensor of a `Constant`, whichever attribute holds it; an empty one for strings and sparse tensors."""
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
    """An integer attribute of a node."""
    return next((int(entry.i) for entry in node.attribute if entry.name == name), default)


def elements_of(tensor: TensorProto) -> int:
    """How many numbers a tensor's shape says that it has."""
    return math.prod(tensor.dims)


def bytes_of(tensor: TensorProto) -> int:
    """The size of a tensor's data in bytes, from its type and shape."""
    bits = _PACKED.get(tensor.data_type) or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return -(-elements_of(tensor) * bits // 8)


@dataclass(frozen=True)
class Stored:
    """Where a tensor's data lie outside the ONNX file: `location` relative to it, `offset` and `length` in bytes
    (length None: to the end of the file).
    """

    location: str
    offset: int
    length: int | None


def stored_at(tensor: TensorProto) -> Stored | None:
    """Where a tensor's external data lie; None for a tensor inside the ONNX file.

    Raises ValueError for numbers that are none, and for a place that is named twice: readers differ in which they take.
    """
    if not uses_external_data(tensor):
        return None
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entries.setdefault(entry.key, entry.value) != entry.value:
            raise ValueError(f"has two values for {entry.key}")
    numbers = {key: entries[key] for key in ("offset", "length") if key in entries}
    for key, text in numbers.items():
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"has the {key} {text!r}, which is no number")
    length = numbers.get("length")
    return Stored(entries.get("location", ""), int(numbers.get("offset", 0)), None if length is None else int(length))


@dataclass(frozen=True)
class Place:
    """A file that external data are said to lie in.

    `inside`: whether it is in the graph's directory or below; `size` in bytes, None where it is no file: `why`, as "is
    missing".
    """

    path: Path
    inside: bool
    size: int | None
    why: str = ""


class Places:
    """The files that external data are said to lie in, each looked at once and not opened."""

    def __init__(self, directory: Path):
        """`directory`: the graph's."""
        self._directory, self._root = directory, os.path.realpath(directory)
        self._known: dict[str, Place] = {}

    def at(self, location: str) -> Place:
        """What there is at a location; nothing is asked of one that lies outside the directory."""
        if location not in self._known:
            self._known[location] = self._look(location)
        return self._known[location]

    def _look(self, location: str) -> Place:
        path = self._directory / location
        try:
            inside = bool(location) and Path(os.path.realpath(path)).is_relative_to(self._root)
            if inside and not os.path.lexists(path):
                return Place(path, True, None, "is missing")
            return Place(path, inside, regular_file(path) if inside else None)
        except InputError as error:
            return Place(path, True, None, str(error).removeprefix(f"{path}: ").partition(";")[0])
        except (OSError, ValueError) as error:
            return Place(path, False, None, str(error))


def read_tensor(tensor: TensorProto, places: Places) -> Array | None:
    """A tensor's numbers, those in a file included; None where the file does not hold them, or they are none."""
    if tensor.data_type == TensorProto.STRING:
        return None
    try:
        if (where := stored_at(tensor)) is None:
            return numpy_helper.to_array(tensor)
        found = places.at(where.location)
        if found.size is None or where.offset < 0 or where.offset + bytes_of(tensor) > found.size:
            return None
        with open(found.path, "rb") as handle:
            handle.seek(where.offset)
            data = handle.read(bytes_of(tensor))
        return np.frombuffer(data, helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
