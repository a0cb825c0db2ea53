"""Rules F1xx: FP8 codes, their scales and zero points."""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from onnx import NodeProto, TensorProto

from ...core.findings import Broken
from ..onnx_file.indexed import FP8_TYPES, Indexed
from ..onnx_file.schemas import STANDARD, schema_of
from ..onnx_file.tensors import attribute, type_name
from .rules import rule

#: DequantizeLinear has `output_dtype` from this opset on.
FIRST_STATED = 23
#: Operators that a runtime refuses on FP8, even where the standard allows it.
REFUSED = {"TensorScatter": "TensorRT refuses FP8 there", "Concat": "ONNX Runtime refuses FP8 there"}
#: The FP8 element types as operators' schemas have them.
FP8_NAMES = frozenset(f"tensor({TensorProto.DataType.Name(kind).lower()})" for kind in FP8_TYPES)


@rule("F101", "constant-feeds-dequantize")
def constant_feeds_dequantize(graph: Indexed) -> Broken:
    """A quantized constant must feed a DequantizeLinear, and nothing else.

    TensorRT takes FP8 weights from the pair constant -> DequantizeLinear; through anything between the two they are
    widened first.
    """
    for name in graph.initializers:
        if name in graph.codes:
            for node, index in graph.readers.get(name, []):
                is_zero_point = index == 2 and node.op_type in ("QuantizeLinear", "DequantizeLinear")  # F106's business
                if (node.op_type, index) != ("DequantizeLinear", 0) and not is_zero_point:
                    yield (
                        name,
                        f"FP8 constant is read by {node.op_type} {node.name}; let a DequantizeLinear alone read it",
                    )


@rule("F102", "code-format")
def code_format(graph: Indexed) -> Broken:
    """Codes are E4M3 as in ONNX's FLOAT8E4M3FN: the FP8 GEMMs of TensorRT take no other format."""
    for node in graph.quantizers:
        kind = graph.codes[node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]]
        if kind != TensorProto.FLOAT8E4M3FN:
            yield node.name, f"codes are {type_name(kind)}; quantize to FLOAT8E4M3FN"


@rule("F103", "scale-type")
def scale_type(graph: Indexed) -> Broken:
    """Scales are FP32, also where the graph computes in BF16 or FP16.

    With scales in BF16 or FP16 the engine multiplies activations by a reciprocal rounded to that type, and writes the
    unscaled GEMM in it: 448² a term overflows FP16.
    """
    for scale, node in distinct_scales(graph).items():
        kind = _element_type(graph, scale)
        if kind not in (0, TensorProto.FLOAT):
            yield (
                node.name,
                f"scale {scale} is {type_name(kind)}; store it as FLOAT and state output_dtype{_stateable(graph)}",
            )


def _stateable(graph: Indexed) -> str:
    """Extend a message if the opset cannot state the output type: below 23 a DequantizeLinear returns its scale's
    type.
    """
    if graph.opset >= FIRST_STATED:
        return ""
    return f" (from opset {FIRST_STATED} on)"


def distinct_scales(graph: Indexed) -> dict[str, NodeProto]:
    """Every scale of FP8 codes by name, and the first node that uses it: equal scales may be one tensor."""
    return {node.input[1]: node for node in reversed(graph.quantizers)}


def _element_type(graph: Indexed, value: str) -> int:
    """The element type of a constant, or of one that is cast; 0 where it is not known."""
    if value in graph.initializers:
        return graph.initializers[value].data_type
    node = graph.producers.get(value)
    if node is not None and node.op_type == "Cast":
        return attribute(node, "to", 0)
    return 0


@rule("F104", "scale-value")
def scale_value(graph: Indexed) -> Broken:
    """Scales are constants, positive and finite: a zero, NaN or infinite scale makes every value it touches NaN or
    zero.
    """
    for name, node in distinct_scales(graph).items():
        scale = graph.constant(name)
        if scale is None:
            if why := graph.constants.unread(name):
                yield node.name, f"scale {name} {why}; store scales that fit what they scale"
            elif not graph.constants.is_stored(name):
                yield node.name, f"scale {name} is computed when the graph runs; quantize with a constant scale"
            continue
        values = scale.ravel()
        bad = values[~((values > 0) & np.isfinite(values))]
        if bad.size:
            yield (
                node.name,
                (
                    f"scale {name} holds {bad[0]:g} ({bad.size} of {values.size} are not positive and finite); leave "
                    "the "
                    "module in BF16 (`fp8q calibrate --skip`)"
                ),
            )


@rule("F105", "output-type-stated")
def output_type_stated(graph: Indexed) -> Broken:
    """DequantizeLinear states its output type, with output_dtype.

    Where it does not, the result has the scale's type: FP32 scales would make an FP32 GEMM, and leaving it to the
    scale is what brings narrow scales about. Below opset 23 it cannot be stated, and is not asked for.
    """
    for node in graph.quantizers:
        if (
            graph.opset >= FIRST_STATED
            and node.op_type == "DequantizeLinear"
            and not attribute(node, "output_dtype", 0)
        ):
            yield node.name, "states no output_dtype; set it to the type the graph computes in"


@rule("F106", "zero-point")
def zero_point(graph: Indexed) -> Broken:
    """A zero point of FP8 codes is left out, or is zero and of the codes' type: FP8 is symmetric."""
    zero = cache(lambda name: (values := graph.constant(name)) is not None and not np.any(values))
    for node in graph.quantizers:
        if len(node.input) < 3 or not node.input[2]:
            continue
        kind = graph.codes[node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]]
        stored = _element_type(graph, node.input[2])
        if stored not in (0, kind):
            yield (
                node.name,
                f"zero point {node.input[2]} is {type_name(stored)} but the codes are {type_name(kind)}; leave it out",
            )
        elif not zero(node.input[2]):
            yield node.name, f"zero point {node.input[2]} is not zero; leave it out"


@rule("F107", "scale-shape")
def scale_shape(graph: Indexed) -> Broken:
    """A scale is one number, or one number for each index of the axis it runs along: for a constant, and for keys and
    values whose heads have scales, of which the file states how many there are. Products take no activations with
    several scales.
    """
    for node in graph.quantizers:
        scale = graph.constant(node.input[1])
        if scale is None or scale.size == 1:
            continue
        scaled = _scaled(graph, node)
        if scaled is None:
            yield (
                node.name,
                f"scale {node.input[1]} has {scale.size} values; store one for the tensor, as activations take",
            )
            continue
        name, dims = scaled
        axis = attribute(node, "axis", 1)
        size = dims[axis] if -len(dims) <= axis < len(dims) else 0
        if scale.shape != (size,):
            yield (
                node.name,
                (
                    f"scale {node.input[1]} has shape {list(scale.shape)} but axis {axis} of {name} {list(dims)} has "
                    f"{size}; store one scale for each"
                ),
            )


def _scaled(graph: Indexed, node: NodeProto) -> tuple[str, Sequence[int | str]] | None:
    """The name and sizes of the tensor that a QuantizeLinear or DequantizeLinear scales; None for a value of which the
    file states no sizes.

    It is a constant, stored as codes or quantized when the graph is built (F111), or codes that are an input or output
    of the graph, as those of a cache. A past in blocks has the heads of the new keys or values, by which it is viewed.
    """
    codes = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
    value = node.input[0]
    maker = graph.producers.get(codes)
    if maker is not None and maker.op_type == "QuantizeLinear":
        value = maker.input[0]
    if value in graph.initializers:
        return value, graph.initializers[value].dims
    if maker is not None and maker.op_type == "Reshape" and maker.input[0].startswith("past_key_values."):
        codes = maker.input[0].replace("past_", "new_", 1)
    bound = graph.inputs.get(codes) or graph.outputs.get(codes)
    if bound is None:
        return None
    return codes, [dim.dim_param or dim.dim_value for dim in bound.type.tensor_type.shape.dim]


@rule("F108", "quantized-twice")
def quantized_twice(graph: Indexed) -> Broken:
    """One tensor is quantized once with one scale: a second time is the same work again, and keeps GEMMs of one
    input apart.
    """
    seen: dict[tuple[str, bytes], NodeProto] = {}
    for node in graph.quantizers:
        scale = graph.constants.fingerprint(node.input[1])
        if scale is None:
            continue
        if node.op_type == "DequantizeLinear":
            seen.setdefault((node.output[0], scale), node)
        else:
            first = seen.setdefault((node.input[0], scale), node)
            if first.op_type == "DequantizeLinear":
                yield (
                    node.name,
                    (
                        f"quantizes {node.input[0]} with the scale that {first.name} has dequantized it with; use its "
                        "codes"
                    ),
                )
            elif first is not node:
                yield (
                    node.name,
                    f"quantizes {node.input[0]} with the scale that {first.name} has quantized it with; use its codes",
                )


@rule("F109", "operator-takes-fp8")
def operator_takes_fp8(graph: Indexed) -> Broken:
    """FP8 codes go only through operators that take them: Concat and TensorScatter, among others, do not.

    Dequantize first.
    """
    refusal = cache(lambda operator, index: _refusal(operator, index, graph.opset))
    for node in graph.nodes:
        for index, name in enumerate(node.input):
            if name in graph.codes and node.domain in STANDARD and (reason := refusal(node.op_type, index)):
                yield node.name, f"{node.op_type} reads FP8 codes {name} ({reason}); dequantize them first"


def _refusal(operator: str, index: int, opset: int) -> str | None:
    """Say why an operator takes no FP8 codes as its input `index`; None if it does, or if that is not known."""
    if operator in REFUSED:
        return REFUSED[operator]
    schema = schema_of(operator, opset)
    if schema is None or not schema.inputs:
        return None
    allowed = schema.inputs[min(index, len(schema.inputs) - 1)].types
    if allowed & FP8_NAMES:
        return None
    return f"opset {opset} allows no FP8 there"


@rule("F110", "attention-inputs", "warning")
def attention_inputs(graph: Indexed) -> Broken:
    """Q/DQ on the inputs of Attention does not give FP8 attention: TensorRT dequantizes them and runs the BF16 kernel,
    so precision is lost for nothing.
    """
    for node in graph.nodes:
        if node.op_type == "Attention":
            for name in _dequantized(graph, list(node.input[:3])):
                yield (
                    node.name,
                    (
                        f"its input {name} comes from Q/DQ, which does not make it FP8 attention; leave it out, or use "
                        "plain GEMMs"
                    ),
                )


@rule("F111", "constant-quantized", "warning")
def constant_quantized(graph: Indexed) -> Broken:
    """A constant is stored as codes: one that a QuantizeLinear reads is stored in full, twice or four times the size,
    and each runtime rounds it anew.
    """
    for node in graph.quantizers:
        if node.op_type == "QuantizeLinear" and graph.is_constant(node.input[0]):
            yield (
                node.name,
                (
                    f"quantizes the constant {node.input[0]} when the graph is built; store its codes, behind a "
                    "DequantizeLinear"
                ),
            )


@rule("F112", "pair-scales")
def pair_scales(graph: Indexed) -> Broken:
    """A DequantizeLinear multiplies by the number that its QuantizeLinear divided by: another one makes every value
    wrong by the same factor, in silence.
    """
    for node in graph.quantizers:
        quantize = graph.producers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if quantize is None or quantize.op_type != "QuantizeLinear":
            continue
        divided = graph.constant(quantize.input[1])
        multiplied = graph.constant(node.input[1])
        if divided is None or multiplied is None or not 0 < divided.size == multiplied.size:  # F104, F107 have those
            continue
        pairs = np.stack([multiplied.ravel(), divided.ravel()], axis=1)
        for ours, theirs in pairs[(pairs[:, 0] != pairs[:, 1]) & np.isfinite(pairs).all(1)][:1]:
            yield (
                node.name,
                f"multiplies by {ours:.9g}, and {quantize.name} has divided by {theirs:.9g}; use one scale for both",
            )


def _dequantized(graph: Indexed, values: list[str]) -> Iterator[str]:
    for value in values:
        dequantize = graph.operand(value).dequantize
        source = graph.producers.get(dequantize.input[0]) if dequantize is not None else None
        if source is not None and source.op_type == "QuantizeLinear":
            yield value
