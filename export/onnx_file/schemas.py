"""Look up the schemas of ONNX's operators, cached, as onnx makes a new schema at every look."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import defs
from onnx.defs import OpSchema

STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class Parameter:
    """An input or output of an operator: whether it is required, and its allowed types."""

    single: bool
    types: frozenset[str]


@dataclass(frozen=True)
class Schema:
    """An operator's inputs and outputs with their least and largest numbers, its attributes with their types
    (onnx.AttributeProto.AttributeType), and the required attributes.
    """

    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    least_most: tuple[tuple[int, int], tuple[int, int]]
    attributes: dict[str, int]
    required: tuple[str, ...]


@cache
def schema_of(operator: str, opset: int) -> Schema | None:
    """The schema of a standard operator in an opset; None where it has none."""
    if defs.has(operator, opset, ""):
        return _read(defs.get_schema(operator, opset, ""))
    return None


@cache
def newest_schema(operator: str) -> Schema | None:
    """The newest schema of a standard operator; None where there never was one."""
    if defs.has(operator, ""):
        return _read(defs.get_schema(operator, ""))
    return None


def _read(schema: OpSchema) -> Schema:
    kinds: dict[str, Any] = {name: attribute.type for name, attribute in schema.attributes.items()}
    single = OpSchema.FormalParameterOption.Single
    inputs, outputs = (
        tuple(Parameter(entry.option == single, frozenset(entry.types)) for entry in entries)
        for entries in (schema.inputs, schema.outputs)
    )
    return Schema(
        inputs,
        outputs,
        ((schema.min_input, schema.max_input), (schema.min_output, schema.max_output)),
        {name: int(kind) for name, kind in kinds.items()},
        tuple(name for name, attribute in schema.attributes.items() if attribute.required),
    )
