"""Rule F314: nodes, names and tensors are well-formed, which every other rule takes for granted.

A file that breaks it is not checked further. Some exporters and graph editors write such files.
"""

from collections.abc import Iterator

from onnx import AttributeProto, NodeProto, TensorProto

from ...core.findings import LONGEST_TEXT, Broken
from ..onnx_file.indexed import READ, Indexed
from ..onnx_file.schemas import STANDARD, Schema, newest_schema, schema_of
from .rules import rule

AGAIN = "export the graph again"
#: The attributes that name an element type.
TYPED = ("to", "output_dtype")
#: The element types there are; 0, which is none, may be stated for "as the operator says".
STATED = frozenset(TensorProto.DataType.values())
ELEMENTS = STATED - {TensorProto.UNDEFINED}
LARGEST_OPSET = 2**31 - 1
#: Characters of a path, and of each part of it, that a file system takes.
LONGEST_PATH = 4095
LONGEST_NAME = 255
#: The most dimensions that NumPy's arrays have; TensorRT's have eight.
LARGEST_RANK = 64


@rule("F314", "form")
def form(graph: Indexed) -> Broken:
    """Nodes have the inputs, outputs and attributes that their operator takes, names are no longer than a name is, and
    tensors have a known type, a size and a place that can be: else nothing else is checked.
    """
    if not 0 <= graph.opset <= LARGEST_OPSET:
        yield "", f"opset {graph.opset} is no opset; {AGAIN}"
        return
    for node in graph.nodes:
        if reason := _node(node, graph.opset):
            yield node.name, f"{node.op_type} {reason}; {AGAIN}"
    for name, tensor in graph.tensors:
        for reason in _tensor(tensor):
            yield name, f"{reason}; {AGAIN}"
    for value in (*graph.model.graph.input, *graph.model.graph.output):
        if reason := too_long(value.name):
            yield value.name, f"{reason}; {AGAIN}"


def too_long(*names: str) -> str | None:
    """Say why one of `names` is too long for a name; None if none is."""
    longest = max(map(len, names), default=0)
    if longest > LONGEST_TEXT:
        return f"has a name of {longest} characters, of at most {LONGEST_TEXT}"
    return None


def _node(node: NodeProto, opset: int) -> str | None:
    """Describe how a node differs from its operator's schema (the newest one if its opset has none); None if it does
    not, or if the operator is unknown.
    """
    if reason := too_long(node.name, node.op_type, node.domain, *node.input, *node.output):
        return reason
    schema = schema_of(node.op_type, opset) or newest_schema(node.op_type)
    if schema is None or (node.domain not in STANDARD and node.op_type not in READ):
        return None
    for what, names, parameters, (least, most) in zip(
        ("inputs", "outputs"),
        (node.input, node.output),
        (schema.inputs, schema.outputs),
        schema.least_most,
        strict=True,
    ):
        if not least <= len(names) <= most:
            return (
                f"has {len(names)} {what} and takes {least if least == most or len(names) < least else most} at "
                f"{'least' if len(names) < least else 'most'}"
            )
        if any(not name for name, parameter in zip(names, parameters, strict=False) if parameter.single):
            return f"lacks one of its {what}"
    return _attributes(node, schema)


def _attributes(node: NodeProto, schema: Schema) -> str | None:
    """Describe how a node's attributes differ from its operator's schema; None if they do not."""
    names: set[str] = set()
    for entry in node.attribute:
        if entry.name in names:
            return f"has the attribute {entry.name} twice"
        names.add(entry.name)
        wanted = schema.attributes.get(entry.name, entry.type)
        if entry.type != wanted:
            return f"has the attribute {entry.name} as {type_of(entry.type)} and takes {type_of(wanted)}"
        if entry.name in TYPED and entry.i not in (ELEMENTS if entry.name == "to" else STATED):
            return f"names the element type {entry.i}, which there is not"
    missing = next((name for name in schema.required if name not in names), None)
    if missing is not None:
        return f"has no attribute {missing}"
    return None


def type_of(kind: int) -> str:
    """The name of an attribute's type."""
    return AttributeProto.AttributeType.Name(kind) if kind in AttributeProto.AttributeType.values() else str(kind)


def _tensor(tensor: TensorProto) -> Iterator[str]:
    """Yield the faults of a tensor."""
    if reason := too_long(tensor.name):
        yield reason
    if tensor.data_type not in ELEMENTS:
        yield f"its element type is {tensor.data_type}, which there is not"
    if len(tensor.dims) > LARGEST_RANK:
        yield f"its shape has {len(tensor.dims)} dimensions, of at most {LARGEST_RANK}"
    elif any(size < 0 for size in tensor.dims):
        yield f"its shape is {list(tensor.dims)}"
    if tensor.data_location == TensorProto.EXTERNAL and tensor.data_type == TensorProto.STRING:
        yield "it holds strings, which cannot lie in another file"
    for location in (entry.value for entry in tensor.external_data if entry.key == "location"):
        if (
            "\0" in location
            or len(location) > LONGEST_PATH
            or any(len(part.encode()) > LONGEST_NAME for part in location.split("/"))
        ):
            yield f"the place of its data is no path ({len(location)} characters)"
