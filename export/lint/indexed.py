"""An ONNX graph as the rules ask for it: who makes a value, who reads it, which values are FP8 codes, what each matrix
product multiplies.

No weight is read. Constants are looked up one at a time, and only scales and zero points are: those may lie in files,
at an offset.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from ...errors import InputError
from .. import names

Array = npt.NDArray[np.generic]
#: The FP8 element types of ONNX.
FP8_TYPES = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ)
PRODUCTS = ("MatMul", "Gemm", "Conv")
#: Looked through on the way from a product back to what it multiplies: operators that only move values or change their
#: type, and arithmetic with a constant.
_MOVING = (
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
#: Operators whose result holds the values they are given first, and so FP8 codes where those are.
_CARRYING = {
    "Transpose",
    "Reshape",
    "Identity",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Concat",
    "Slice",
    "Split",
    "Gather",
    "Expand",
    "TensorScatter",
}
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
#: Element types narrower than a byte, and their bits.
_PACKED: dict[int, int] = {
    TensorProto.DataType.Value(name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if name in TensorProto.DataType.DESCRIPTOR.values_by_name
}
#: Operators whose inputs are looked at whatever their domain.
READ = (*PRODUCTS, "QuantizeLinear", "DequantizeLinear", "Cast", "Identity", "Constant")


@dataclass(frozen=True)
class Operand:
    """One side of a product: the DequantizeLinear of FP8 codes it comes from (None: it does not), and the operators
    `between`, from the product back.

    `other`: a DequantizeLinear of codes that are not FP8 (INT8, say), where it comes from one.
    """

    dequantize: NodeProto | None
    between: tuple[NodeProto, ...]
    other: NodeProto | None = None

    @property
    def clean(self) -> bool:
        """Whether at most a Transpose lies between."""
        return self.dequantize is not None and all(node.op_type == "Transpose" for node in self.between)


@dataclass(frozen=True)
class Product:
    """A matrix product and its two operands, in order."""

    node: NodeProto
    operands: tuple[Operand, Operand]


@dataclass(frozen=True)
class Indexed:
    """A model and the directory its external data lie in."""

    model: onnx.ModelProto
    directory: Path
    _constants: dict[str, Array | None] = field(default_factory=dict, repr=False)

    @property
    def nodes(self) -> Iterator[NodeProto]:
        """The nodes, in the order of the file."""
        return iter(self.model.graph.node)

    @cached_property
    def opset(self) -> int:
        """The version of the standard domain; 0 where it is not imported."""
        return next((entry.version for entry in self.model.opset_import if entry.domain in ("", "ai.onnx")), 0)

    @cached_property
    def initializers(self) -> Mapping[str, TensorProto]:
        """Tensors in the file, or pointed at by it, by name; `Constant` nodes included."""
        found = {tensor.name: tensor for tensor in self.model.graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant" and node.output:
                found[node.output[0]] = constant_of(node)
        return found

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
        """The node that makes a value."""
        return {output: node for node in self.nodes for output in node.output if output}

    @cached_property
    def readers(self) -> Mapping[str, list[tuple[NodeProto, int]]]:
        """The nodes that read a value, and as which of their inputs."""
        found: dict[str, list[tuple[NodeProto, int]]] = {}
        for node in self.nodes:
            for index, name in enumerate(node.input):
                found.setdefault(name, []).append((node, index))
        return found

    @cached_property
    def codes(self) -> Mapping[str, int]:
        """Every value that holds FP8 codes, and their element type; operators that only move data pass them on."""
        found = {name: tensor.data_type for name, tensor in self.initializers.items() if tensor.data_type in FP8_TYPES}
        found |= {
            name: value.type.tensor_type.elem_type
            for name, value in self.inputs.items()
            if value.type.tensor_type.elem_type in FP8_TYPES
        }
        for node in self.nodes:
            kind = self.quantized_type(node) if node.op_type in ("QuantizeLinear", "Cast") else 0
            if node.op_type in _CARRYING and node.input:
                kind = found.get(node.input[0], 0)
            if kind in FP8_TYPES:
                found |= dict.fromkeys(node.output, kind)
        return found

    def code_type(self, value: str) -> int:
        """The element type of what a DequantizeLinear reads: stored, an input's, or what a QuantizeLinear makes (UINT8
        where it does not say).
        """
        if value in self.initializers:
            return self.initializers[value].data_type
        if value in self.inputs:
            return self.inputs[value].type.tensor_type.elem_type
        return (self.quantized_type(self.producers[value]) if value in self.producers else 0) or TensorProto.UINT8

    def quantized_type(self, node: NodeProto) -> int:
        """The element type a QuantizeLinear or Cast makes: what it states, else its zero point's, else none (0)."""
        if stated := attribute(node, "output_dtype", 0) or attribute(node, "to", 0):
            return stated
        zero_point = self.initializers.get(node.input[2]) if len(node.input) > 2 else None
        return zero_point.data_type if zero_point is not None else 0

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
    def products(self) -> list[Product]:
        """Every matrix product of the graph, quantized or not."""
        return [
            Product(node, (self.operand(node.input[0]), self.operand(node.input[1])))
            for node in self.nodes
            if node.op_type in PRODUCTS
        ]

    def operand(self, value: str) -> Operand:
        """Follow one input of a product back to the DequantizeLinear it comes from, if it does."""
        between: list[NodeProto] = []
        passed: set[str] = set()
        while value not in passed and (node := self.producers.get(value)) is not None:
            passed.add(value)
            if node.op_type == "DequantizeLinear":
                return (
                    Operand(node, tuple(between))
                    if node.input[0] in self.codes
                    else Operand(None, tuple(between), node)
                )
            computed = [name for name in node.input if name and name not in self.initializers]
            if not computed or (node.op_type not in _MOVING and (node.op_type not in _ARITHMETIC or len(computed) > 1)):
                break
            between.append(node)
            value = computed[0]
        return Operand(None, ())

    @cached_property
    def folded(self) -> set[str]:
        """The tensors of the file, and every value made of them alone, by whatever operators."""
        found = set(self.initializers)
        for node in self.nodes:
            if node.input and found.issuperset(filter(None, node.input)):
                found.update(node.output)
        return found

    def behind(self, value: str) -> NodeProto | None:
        """The DequantizeLinear of FP8 codes that alone, or with constants alone, a value is computed from, by any
        operators but products; None where there is none.
        """
        waiting, passed = [value], set[str]()
        while waiting:
            value = waiting.pop()
            node = self.producers.get(value)
            if node is None or value in passed or node.op_type in PRODUCTS:
                continue
            passed.add(value)
            if node.op_type == "DequantizeLinear" and node.input[0] in self.codes:
                return node
            computed = [name for name in node.input if name and name not in self.initializers]
            if len(computed) == 1 or value in self.folded:
                waiting += reversed(computed)
        return None

    def module_near(self, name: str) -> str | None:
        """The module of the named node that is the fewest steps from the node `name`, up or down the graph; None where
        there is none.
        """
        waiting = [node for node in self.nodes if node.name == name]
        seen = {node.name for node in waiting}
        while waiting:
            node = waiting.pop(0)
            if module := names.module_of(node.name):
                return module
            around = [self.producers[value] for value in node.input if value in self.producers]
            around += [reader for value in node.output for reader, _ in self.readers.get(value, [])]
            waiting += [other for other in around if other.name not in seen]
            seen |= {other.name for other in around}
        return None

    def is_constant(self, value: str) -> bool:
        """Whether a value is a tensor of the file."""
        return value in self.initializers

    def constant(self, value: str) -> Array | None:
        """The numbers of a small constant (a scale, a zero point), through Cast and Identity; None where it is
        computed, or its data cannot be read.
        """
        if value not in self._constants:
            self._constants[value] = self._read(value)
        return self._constants[value]

    def _read(self, value: str) -> Array | None:
        types: list[int] = []
        passed: set[str] = set()
        while value not in self.initializers:
            node = self.producers.get(value)
            if value in passed or node is None or node.op_type not in ("Cast", "Identity"):
                return None
            passed.add(value)
            types += [attribute(node, "to", 0)] if node.op_type == "Cast" else []
            value = node.input[0]
        numbers = read_tensor(self.initializers[value], self.directory)
        for kind in reversed(types):
            numbers = (
                None
                if numbers is None or kind == TensorProto.STRING
                else numbers.astype(helper.tensor_dtype_to_np_dtype(kind))
            )
        return numbers


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


def bytes_of(tensor: TensorProto) -> int:
    """The size of a tensor's data in bytes, from its type and shape."""
    bits = _PACKED.get(tensor.data_type) or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    elements: int = math.prod(tensor.dims)
    return -(-elements * bits // 8)


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

    Raises ValueError for numbers that are none.
    """
    if not uses_external_data(tensor):
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Stored(
        entries.get("location", ""),
        int(entries.get("offset", 0)),
        int(entries["length"]) if "length" in entries else None,
    )


def read_tensor(tensor: TensorProto, directory: Path) -> Array | None:
    """A tensor's numbers, those in a file included; None where the file does not hold them, or they are none."""
    if tensor.data_type == TensorProto.STRING:
        return None
    try:
        if (where := stored_at(tensor)) is None:
            return numpy_helper.to_array(tensor)
        with open(directory / where.location, "rb") as handle:
            if where.offset + bytes_of(tensor) > os.fstat(handle.fileno()).st_size:
                return None
            handle.seek(where.offset)
            data = handle.read(bytes_of(tensor))
        return np.frombuffer(data, helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def load_graph(path: Path) -> Indexed:
    """Read an ONNX file, leaving its external data where they are; raises InputError when there is none or it does not
    read.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name the ONNX file in it, such as {path / 'model.onnx'}")
    try:
        model = onnx.load_model(path, format="protobuf", load_external_data=False)  # whatever the file's name ends in
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except DecodeError:
        raise InputError(f"{path}: is no ONNX model, or is cut short; export it again") from None
    if not model.graph.node:
        raise InputError(f"{path}: is no ONNX model, or holds no node; export it again")
    if field := damaged_text(model):
        raise InputError(f"{path}: is damaged ({field} is no UTF-8); export it again")
    return Indexed(model, path.parent)


def damaged_text(message: Message) -> str | None:
    """The first field of text, as `graph.node.name`, that holds no UTF-8: protobuf gives out its bytes, which no rule
    and no operator's schema takes.
    """
    for name, repeated, kind in _fields(message.DESCRIPTOR):
        held = getattr(message, name) if repeated else [getattr(message, name)] if message.HasField(name) else ()
        for value in held:
            if kind == FieldDescriptor.TYPE_MESSAGE:
                if (inside := damaged_text(value)) is not None:
                    return f"{name}.{inside}"
            elif isinstance(value, bytes):
                return name
    return None


@cache
def _fields(descriptor: Descriptor) -> list[tuple[str, bool, int]]:
    """Name, whether repeated, and type of the fields that are text or hold some; data are left alone, as they may be
    gigabytes.
    """
    kinds = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
    return [(field.name, field.is_repeated, field.type) for field in descriptor.fields if field.type in kinds]
