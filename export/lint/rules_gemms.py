"""Rules F2xx: GEMMs (and convolutions, which other tools quantize), compared with `scales.json`."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from ...core.findings import Broken
from ..onnx_file import names
from ..onnx_file.indexed import GraphGemm, Indexed, Operand
from ..onnx_file.tensors import attribute, type_name
from ..onnx_file.weight_scales import factors_of, output_axis, rescale_of, weight_of, weight_scales
from .rules import Expectation, expectation_rule, rule

#: FP8 tensor cores work on 16 bytes at a time.
ALIGNMENT = 16
_AGAIN = "run `fp8q export` again"


def activation_of(graph: Indexed, gemm: GraphGemm) -> Operand | None:
    """The operand that is quantized at run time."""
    return next(
        (side for side in gemm.operands if side.dequantize is not None and quantize_of(graph, side) is not None),
        None,
    )


def quantize_of(graph: Indexed, side: Operand) -> NodeProto | None:
    """The QuantizeLinear behind an operand's DequantizeLinear."""
    node = graph.producers.get(side.dequantize.input[0]) if side.dequantize is not None else None
    if node is not None and node.op_type == "QuantizeLinear":
        return node
    return None


def is_fp8(gemm: GraphGemm) -> bool:
    """Tell whether both sides come from FP8 codes; operators in between are the subject of F201."""
    return all(side.dequantize is not None for side in gemm.operands)


def why_not_fp8(graph: Indexed, gemm: GraphGemm) -> str | None:
    """Say why the GEMM of a weight is not FP8 on both sides; None if it is."""
    weight = weight_of(graph, gemm)
    activation = activation_of(graph, gemm)
    if weight is None and activation is None:
        return "neither its weight nor its input comes from FP8 codes"
    if weight is None:
        return "its weight is no FP8 constant behind a DequantizeLinear"
    if activation is None:
        return "its weight is FP8 but its input is not, so it multiplies in the compute type"
    return None


def blocked(graph: Indexed, gemm: GraphGemm) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Yield each operator other than a Transpose between a GEMM and a DequantizeLinear of codes, and that
    DequantizeLinear.

    An operator that computes or joins leaves no codes to multiply. It is reported only if the GEMM's other side has
    codes: a GEMM without any is not meant to run on FP8.
    """
    for value, side, other in zip(gemm.node.input, gemm.operands, reversed(gemm.operands), strict=False):
        dequantize = side.dequantize or (graph.behind(value) if other.dequantize is not None else None)
        if dequantize is None or side.clean:
            continue
        if (operator := graph.movers.get(value)) is not None:
            yield operator, dequantize


@rule("F201", "transpose-alone-between")
def transpose_alone_between(graph: Indexed) -> Broken:
    """Nothing but a Transpose lies between a DequantizeLinear and the GEMM.

    Through what computes, the scale cannot be moved behind the GEMM, which is then of no codes; through the rest one
    compiler moves it and another does not.
    """
    for gemm in graph.gemms:
        for operator, dequantize in blocked(graph, gemm):
            yield (
                gemm.node.name,
                f"{operator.op_type} {operator.name} lies between {dequantize.name} and the GEMM; move it elsewhere",
            )


@rule("F202", "weight-only", "warning", foreign=True)
def weight_only(graph: Indexed) -> Broken:
    """A GEMM with an FP8 weight and no Q/DQ on its input multiplies in the compute type: it saves memory, and no
    time.
    """
    for gemm in graph.gemms:
        if weight_of(graph, gemm) is not None and not is_fp8(gemm) and not any(blocked(graph, gemm)):
            yield (
                gemm.node.name,
                "its weight is FP8 but its input is not, so it multiplies in the compute type; quantize its input too",
            )


@expectation_rule("F203", "promised-product")
def expected_gemm_in_fp8(graph: Indexed, expected: Expectation) -> Broken:
    """Every GEMM that `scales.json` expects is in the graph and FP8 on both sides.

    Nothing expected is a failure.
    """
    gemms = {gemm.node.name: gemm for gemm in graph.gemms}
    if not expected.input_scales and not expected.weights_alone:
        yield "", "nothing is expected on FP8; calibrate with fewer --skip"
    for module in expected.input_scales:
        gemm = gemms.get(names.matmul(module))
        if gemm is None:
            yield names.matmul(module), f"is expected on FP8, and there is no such GEMM; {_AGAIN}"
        elif reason := why_not_fp8(graph, gemm):
            yield gemm.node.name, f"is expected on FP8: {reason}; {_AGAIN}"


@expectation_rule("F204", "unpromised-product")
def unexpected_gemm(graph: Indexed, expected: Expectation) -> Broken:
    """Every GEMM with an FP8 weight is expected: a module that `scales.json` keeps in BF16 stays so."""
    known = {*expected.input_scales, *expected.weights_alone}
    for gemm in graph.gemms:
        if weight_of(graph, gemm) is not None and names.module_of(gemm.node.name) not in known:
            yield gemm.node.name, f"its weight is FP8, which scales.json does not expect; {_AGAIN}"


@expectation_rule("F215", "weights-alone")
def weights_alone(graph: Indexed, expected: Expectation) -> Broken:
    """The weight of each module that `scales.json` has with weights alone in FP8 is codes, and its input is not.

    Codes for that input would round what was measured as exact.
    """
    gemms = {gemm.node.name: gemm for gemm in graph.gemms}
    for module in expected.weights_alone:
        gemm = gemms.get(names.matmul(module))
        if gemm is None or weight_of(graph, gemm) is None:
            fault = "there is no such GEMM" if gemm is None else "its weight is not FP8 codes"
            yield names.matmul(module), f"is expected with its weight in FP8: {fault}; {_AGAIN}"
        elif is_fp8(gemm):
            yield gemm.node.name, f"is expected with its weight alone in FP8, and its input is quantized; {_AGAIN}"


@rule("F205", "nothing-quantized", foreign=True)
def nothing_quantized(graph: Indexed) -> Broken:
    """At least one GEMM takes FP8 on both sides: a graph without any is no FP8 model, whatever its name."""
    if not any(is_fp8(gemm) for gemm in graph.gemms):
        yield "", f"of its GEMMs ({len(graph.gemms)}) none takes FP8 on both sides; quantize weights and inputs"


@expectation_rule("F206", "input-scale")
def input_scale(graph: Indexed, expected: Expectation) -> Broken:
    """The scales of activations are the numbers in `scales.json` and `attention.json`, to the last bit: what is
    serialized is what was used.
    """
    for side, run_scale, file in _sides(graph, expected):
        for node in filter(None, (quantize_of(graph, side), side.dequantize)):
            scale = graph.constant(node.input[1])
            if scale is not None and scale.size and (scale.size != 1 or np.float32(run_scale) != scale.ravel()[0]):
                yield (
                    node.name,
                    f"scale is {scale.ravel()[0]:.9g}, and {file} has {run_scale:.9g}; {_AGAIN}",
                )


def _sides(graph: Indexed, expected: Expectation) -> Iterator[tuple[Operand, float, str]]:
    """Yield the operands whose scale a run states, the scale, and the file that states it."""
    for gemm in graph.gemms:
        side = activation_of(graph, gemm)
        run_scale = expected.input_scales.get(names.module_of(gemm.node.name) or "")
        if side is not None and run_scale is not None:
            yield side, run_scale, "scales.json"
        for side, run_scale in zip(gemm.operands, expected.attention.get(gemm.node.name, ()), strict=False):
            yield side, run_scale, "attention.json"


@expectation_rule("F207", "weight-scale")
def weight_scale(graph: Indexed, expected: Expectation) -> Broken:
    """The scales of weights are those of the checkpoint, to the last bit, whether DequantizeLinear has them all or a
    Mul behind the GEMM has them, or the rest of them.
    """
    for gemm in graph.gemms:
        side = weight_of(graph, gemm)
        run_scales = expected.weight_scales.get(names.module_of(gemm.node.name) or "")
        scales = weight_scales(graph, gemm)
        if scales is None or run_scales is None or side is None or side.dequantize is None:
            continue
        stored = np.asarray(run_scales, np.float32).ravel()
        node = rescale_of(graph, gemm) or side.dequantize
        if scales.size == 1 < stored.size:
            yield (
                node.name,
                f"has one scale for all, and no Mul behind the GEMM the checkpoint's {stored.size}; {_AGAIN}",
            )
        elif scales.shape != stored.shape:
            yield node.name, f"has {scales.size} scales, and the checkpoint {stored.size}; {_AGAIN}"
        elif (different := np.flatnonzero(scales != stored)).size:
            first = different[0]
            yield (
                node.name,
                f"scale {first} is {scales[first]:.9g}, and the checkpoint has {stored[first]:.9g}; {_AGAIN}",
            )


@rule("F208", "scale-axis")
def scale_axis(graph: Indexed) -> Broken:
    """The scales of a weight run along its output channels: only then can they be applied to the GEMM, and the
    GEMM be of codes.
    """
    for gemm in graph.gemms:
        side = weight_of(graph, gemm)
        if side is None or side.dequantize is None:
            continue
        scale = graph.constant(side.dequantize.input[1])
        weight = graph.initializers[side.dequantize.input[0]]
        axis = attribute(side.dequantize, "axis", 1)
        rank = len(weight.dims)
        wanted = output_axis(gemm, side, rank)
        if scale is not None and scale.size > 1 and rank >= 2 and axis % rank != wanted:
            yield (
                side.dequantize.name,
                (
                    f"scales run along axis {axis} of {weight.name} {list(weight.dims)}, which the GEMM sums over; "
                    f"take axis {wanted}"
                ),
            )
        if (rescale := rescale_of(graph, gemm)) is not None:
            shape = (factors := graph.constant(factors_of(graph, rescale))) is not None and factors.shape
            if shape and shape != (weight.dims[wanted],):
                yield (
                    rescale.name,
                    f"multiplies by {list(shape)} numbers; the GEMM's columns take [{weight.dims[wanted]}]",
                )


@rule("F209", "alignment", "warning")
def alignment(graph: Indexed) -> Broken:
    """Both dimensions of an FP8 weight are multiples of 16, the width of an FP8 tensor core instruction.

    Others build, and are padded: 65 gave a much larger engine. Products of one shape are one finding.
    """
    padded: dict[tuple[int, ...], list[str]] = {}
    for gemm in graph.gemms:
        side = weight_of(graph, gemm)
        if side is not None and side.dequantize is not None and is_fp8(gemm):
            dims = tuple(graph.initializers[side.dequantize.input[0]].dims)
            if any(size % ALIGNMENT for size in (dims[:2] if gemm.node.op_type == "Conv" else dims[-2:])):
                padded.setdefault(dims, []).append(gemm.node.name)
    for dims, (first, *others) in padded.items():
        like = f", as those of {len(others)} more GEMMs are" if len(others) > 1 else ""
        like = f", as that of {others[0]} is" if len(others) == 1 else like
        yield (
            first,
            (
                f"its weight is {list(dims)}{like}, not in multiples of {ALIGNMENT}, so the engine pads it; leave the "
                "module in BF16 where the padding costs more than FP8 gives"
            ),
        )


@rule("F210", "other-codes", "warning")
def other_codes(graph: Indexed) -> Broken:
    """What a GEMM multiplies comes from FP8 codes or from none: "FP8" models that were quantized to INT8 are met
    with, and are another trade.
    """
    for gemm in graph.gemms:
        for dequantize in filter(None, (side.other for side in gemm.operands)):
            kind = type_name(graph.code_type(dequantize.input[0]))
            yield gemm.node.name, f"multiplies {kind} codes ({dequantize.name}); quantize to FLOAT8E4M3FN for FP8"


@rule("F211", "input-only", "warning", foreign=True)
def input_only(graph: Indexed) -> Broken:
    """A GEMM with Q/DQ on its input and no FP8 weight multiplies in the compute type: its input is rounded for
    nothing.
    """
    for gemm in graph.gemms:
        for value, side, other in zip(gemm.node.input, gemm.operands, reversed(gemm.operands), strict=False):
            unquantized = value in graph.folded and side.dequantize is None and side.other is None
            if unquantized and quantize_of(graph, other) is not None and not any(blocked(graph, gemm)):
                yield (
                    gemm.node.name,
                    (
                        "its input is FP8 but its weight is not, so it multiplies in the compute type; quantize its "
                        "weight too, or leave its input as it is"
                    ),
                )


@expectation_rule("F212", "promised-attention")
def attention_in_fp8(graph: Indexed, expected: Expectation) -> Broken:
    """Both GEMMs of each attention that `attention.json` expects are in the graph and FP8 on both sides."""
    gemms = {gemm.node.name: gemm for gemm in graph.gemms}
    for name in expected.attention:
        if name not in gemms:
            yield name, f"is expected on FP8, and there is no such GEMM; {_AGAIN}"
        elif not is_fp8(gemms[name]):
            side = next(
                place
                for place, operand in zip(("first", "second"), gemms[name].operands, strict=True)
                if operand.dequantize is None
            )
            yield name, f"is expected on FP8: its {side} input does not come from FP8 codes; {_AGAIN}"


@expectation_rule("F213", "scaled-behind")
def scaled_behind(graph: Indexed, expected: Expectation) -> Broken:
    """Where a Mul behind the GEMM applies the weight's scales, the GEMM is FP32 and the Mul alone reads it.

    In BF16 the sum would be rounded twice, and in FP16 it can overflow: what is not scaled yet is up to 448² a term.
    """
    for gemm in graph.gemms:
        rescale = rescale_of(graph, gemm)
        if rescale is None or names.module_of(gemm.node.name) not in expected.input_scales:
            continue
        for dequantize in (side.dequantize for side in gemm.operands if side.dequantize is not None):
            if (kind := attribute(dequantize, "output_dtype", 0)) not in (0, TensorProto.FLOAT):
                yield (
                    dequantize.name,
                    f"answers in {type_name(kind)}, and {rescale.name} scales the GEMM only behind it; {_AGAIN}",
                )
        for node, _ in graph.readers[gemm.node.output[0]]:
            if node is not rescale:
                yield (
                    gemm.node.name,
                    f"is read by {node.op_type} {node.name} before {rescale.name} scales it; {_AGAIN}",
                )
