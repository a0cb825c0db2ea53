"""Rule F314: what every other rule takes for granted.

A file that breaks it is not looked at further: others' exporters, and editors of graphs, write such.
"""

from collections.abc import Iterator

from onnx import NodeProto, TensorProto, defs
from onnx.defs import OpSchema

from .indexed import READ, Indexed, constant_of
from .rules import Broken, rule

STANDARD = ("", "ai.onnx")
AGAIN = "export the graph again"
#: The attributes that name an element type.
TYPED = ("to", "output_dtype")
LARGEST_OPSET = 2**31 - 1
#: Characters of a path, and of each part of it, that a file system takes.
LONGEST_PATH, LONGEST_NAME = 4095, 255


@rule("F314", "form")
def form(graph: Indexed) -> Broken:
    """Nodes have the inputs, outputs and attributes that their operator takes, and tensors a known type, a size and a
    place that can be: else nothing else is checked.
    """
    if not 0 <= graph.opset <= LARGEST_OPSET:
        yield "", f"opset {graph.opset} is no opset; {AGAIN}"
        return
    for node in graph.nodes:
        if reason := _node(node, graph.opset):
            yield node.name, f"{node.op_type} {reason}; {AGAIN}"
    constants = [
        constant_of(node)
        for node in graph.nodes
        if node.op_type == "Constant" and any(entry.name == "value" for entry in node.attribute)
    ]
    for tensor in [*graph.model.graph.initializer, *constants]:
        for reason in _tensor(tensor):
            yield tensor.name, f"{reason}; {AGAIN}"


def _node(node: NodeProto, opset: int) -> str | None:
    """What a node lacks by its operator's schema (the newest, where its opset has none); None where nothing, or nothing
    is known.
    """
    if (node.domain not in STANDARD and node.op_type not in READ) or not defs.has(node.op_type, ""):
        return None
    schema = (
        defs.get_schema(node.op_type, opset, "")
        if defs.has(node.op_type, opset, "")
        else defs.get_schema(node.op_type, "")
    )
    for what, names, parameters, least, most in (
        ("inputs", node.input, schema.inputs, schema.min_input, schema.max_input),
        ("outputs", node.output, schema.outputs, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            return (
                f"has {len(names)} {what} and takes {least if least == most or len(names) < least else most} at "
                f"{'least' if len(names) < least else 'most'}"
            )
        if any(
            not name
            for name, parameter in zip(names, parameters, strict=False)
            if parameter.option == OpSchema.FormalParameterOption.Single
        ):
            return f"lacks one of its {what}"
    given = {entry.name for entry in node.attribute}
    if missing := [name for name, attribute in schema.attributes.items() if attribute.required and name not in given]:
        return f"has no attribute {missing[0]}"
    unknown = [
        entry.i for entry in node.attribute if entry.name in TYPED and entry.i not in TensorProto.DataType.values()
    ]
    return f"names the element type {unknown[0]}, which there is not" if unknown else None


def _tensor(tensor: TensorProto) -> Iterator[str]:
    """What cannot be of a tensor."""
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        yield f"its element type is {tensor.data_type}, which there is not"
    if any(size < 0 for size in tensor.dims):
        yield f"its shape is {list(tensor.dims)}"
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    if tensor.data_location == TensorProto.EXTERNAL and tensor.data_type == TensorProto.STRING:
        yield "it holds strings, which cannot lie in another file"
    if (
        "\0" in location
        or len(location) > LONGEST_PATH
        or any(len(part.encode()) > LONGEST_NAME for part in location.split("/"))
    ):
        yield f"the place of its data is no path ({len(location)} characters)"
