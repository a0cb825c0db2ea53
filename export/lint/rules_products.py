"""Rules F2xx: matrix products (and convolutions, which other tools quantize), compared with `scales.json`."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from ...core.findings import Broken
from ..onnx_file import names
from ..onnx_file.indexed import Indexed, Operand, Product
from ..onnx_file.tensors import attribute, type_name
from ..onnx_file.weight_scales import factors_of, output_axis, rescale_of, weight_of, weight_scales
from .rules import Promise, promise_rule, rule

#: FP8 tensor cores work on 16 bytes at a time.
ALIGNMENT = 16
_AGAIN = "run `fp8q export` again"


def activation_of(graph: Indexed, product: Product) -> Operand | None:
    """The operand that is quantized at run time."""
    return next(
        (side for side in product.operands if side.dequantize is not None and quantize_of(graph, side) is not None),
        None,
    )


def quantize_of(graph: Indexed, side: Operand) -> NodeProto | None:
    """The QuantizeLinear behind an operand's DequantizeLinear."""
    node = graph.producers.get(side.dequantize.input[0]) if side.dequantize is not None else None
    return node if node is not None and node.op_type == "QuantizeLinear" else None


def is_fp8(product: Product) -> bool:
    """Tell whether both sides come from FP8 codes; operators in between are the subject of F201."""
    return all(side.dequantize is not None for side in product.operands)


def why_wide(graph: Indexed, product: Product) -> str | None:
    """Say why the GEMM of a weight is not FP8 on both sides; None if it is."""
    weight, activation = weight_of(graph, product), activation_of(graph, product)
    if weight is None and activation is None:
        return "neither its weight nor its input comes from FP8 codes"
    if weight is None:
        return "its weight is no FP8 constant behind a DequantizeLinear"
    return (
        "its weight is FP8 but its input is not, so it multiplies in the compute type" if activation is None else None
    )


def blocked(graph: Indexed, product: Product) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Yield each operator other than a Transpose between a GEMM and a DequantizeLinear of codes, and that
    DequantizeLinear.

    An operator that computes or joins leaves no codes to multiply. It is reported only if the GEMM's other side has
    codes: a GEMM without any is not meant to run on FP8.
    """
    for value, side, other in zip(product.node.input, product.operands, reversed(product.operands), strict=False):
        dequantize = side.dequantize or (graph.behind(value) if other.dequantize is not None else None)
        if dequantize is None or side.clean:
            continue
        if (operator := graph.movers.get(value)) is not None:
            yield operator, dequantize


@rule("F201", "transpose-alone-between")
def transpose_alone_between(graph: Indexed) -> Broken:
    """Nothing but a Transpose lies between a DequantizeLinear and the product.

    Through what computes, the scale cannot be moved behind the product, which is then of no codes; through the rest one
    compiler moves it and another does not.
    """
    for product in graph.products:
        for operator, dequantize in blocked(graph, product):
            yield (
                product.node.name,
                f"{operator.op_type} {operator.name} lies between {dequantize.name} and the product; move it elsewhere",
            )


@rule("F202", "weight-only", "warning", "foreign")
def weight_only(graph: Indexed) -> Broken:
    """A product with an FP8 weight and no Q/DQ on its input multiplies in the compute type: it saves memory, and no
    time.
    """
    for product in graph.products:
        if weight_of(graph, product) is not None and not is_fp8(product) and not any(blocked(graph, product)):
            yield (
                product.node.name,
                "its weight is FP8 but its input is not, so it multiplies in the compute type; quantize its input too",
            )


@promise_rule("F203", "promised-product")
def promised_product(graph: Indexed, promise: Promise) -> Broken:
    """Every product that `scales.json` promises is in the graph and FP8 on both sides.

    Nothing promised is a failure.
    """
    products = {product.node.name: product for product in graph.products}
    if not promise.input_scales and not promise.bf16_inputs:
        yield "", "nothing is promised on FP8; calibrate with fewer --skip"
    for module in promise.input_scales:
        product = products.get(names.matmul(module))
        if product is None:
            yield names.matmul(module), f"is promised on FP8, and there is no such product; {_AGAIN}"
        elif reason := why_wide(graph, product):
            yield product.node.name, f"is promised on FP8: {reason}; {_AGAIN}"


@promise_rule("F204", "unpromised-product")
def unpromised_product(graph: Indexed, promise: Promise) -> Broken:
    """Every product with an FP8 weight is promised: a module that `scales.json` keeps in BF16 stays so."""
    known = {*promise.input_scales, *promise.bf16_inputs}
    for product in graph.products:
        if weight_of(graph, product) is not None and names.module_of(product.node.name) not in known:
            yield product.node.name, f"its weight is FP8, which scales.json does not promise; {_AGAIN}"


@promise_rule("F215", "weights-alone")
def weights_alone(graph: Indexed, promise: Promise) -> Broken:
    """The weight of each module in `scales.json`'s `bf16_inputs` is FP8 codes, and its input is not quantized.

    Codes for that input would round what was measured as exact.
    """
    products = {product.node.name: product for product in graph.products}
    for module in promise.bf16_inputs:
        product = products.get(names.matmul(module))
        if product is None or weight_of(graph, product) is None:
            fault = "there is no such product" if product is None else "its weight is not FP8 codes"
            yield names.matmul(module), f"is promised with its weight in FP8: {fault}; {_AGAIN}"
        elif is_fp8(product):
            yield product.node.name, f"is promised with its weight alone in FP8, and its input is quantized; {_AGAIN}"


@rule("F205", "nothing-quantized", scope="foreign")
def nothing_quantized(graph: Indexed) -> Broken:
    """At least one product takes FP8 on both sides: a graph without any is no FP8 model, whatever its name."""
    if not any(is_fp8(product) for product in graph.products):
        yield "", f"of its products ({len(graph.products)}) none takes FP8 on both sides; quantize weights and inputs"


@promise_rule("F206", "input-scale")
def input_scale(graph: Indexed, promise: Promise) -> Broken:
    """The scales of activations are the numbers in `scales.json` and `attention.json`, to the last bit: what is
    serialized is what was used.
    """
    for side, expected, file in _sides(graph, promise):
        for node in filter(None, (quantize_of(graph, side), side.dequantize)):
            scale = graph.constant(node.input[1])
            if scale is not None and scale.size and (scale.size != 1 or np.float32(expected) != scale.ravel()[0]):
                yield (
                    node.name,
                    f"scale is {scale.ravel()[0]:.9g}, and {file} has {expected:.9g}; {_AGAIN}",
                )


def _sides(graph: Indexed, promise: Promise) -> Iterator[tuple[Operand, float, str]]:
    """Yield the operands whose scale a run states, the scale, and the file that states it."""
    for product in graph.products:
        side, expected = (
            activation_of(graph, product),
            promise.input_scales.get(names.module_of(product.node.name) or ""),
        )
        if side is not None and expected is not None:
            yield side, expected, "scales.json"
        for side, expected in zip(product.operands, promise.attention.get(product.node.name, ()), strict=False):
            yield side, expected, "attention.json"


@promise_rule("F207", "weight-scale")
def weight_scale(graph: Indexed, promise: Promise) -> Broken:
    """The scales of weights are those of the checkpoint, to the last bit, whether DequantizeLinear has them all or a
    Mul behind the product has them, or the rest of them.
    """
    for product in graph.products:
        side, expected = weight_of(graph, product), promise.weight_scales.get(names.module_of(product.node.name) or "")
        scales = weight_scales(graph, product)
        if scales is None or expected is None or side is None or side.dequantize is None:
            continue
        stored, node = np.asarray(expected, np.float32).ravel(), rescale_of(graph, product) or side.dequantize
        if scales.size == 1 < stored.size:
            yield (
                node.name,
                f"has one scale for all, and no Mul behind the product the checkpoint's {stored.size}; {_AGAIN}",
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
    """The scales of a weight run along its output channels: only then can they be applied to the product, and the
    product be of codes.
    """
    for product in graph.products:
        side = weight_of(graph, product)
        if side is None or side.dequantize is None:
            continue
        scale, weight = graph.constant(side.dequantize.input[1]), graph.initializers[side.dequantize.input[0]]
        axis, rank = attribute(side.dequantize, "axis", 1), len(weight.dims)
        wanted = output_axis(product, side, rank)
        if scale is not None and scale.size > 1 and rank >= 2 and axis % rank != wanted:
            yield (
                side.dequantize.name,
                (
                    f"scales run along axis {axis} of {weight.name} {list(weight.dims)}, which the product sums over; "
                    f"take axis {wanted}"
                ),
            )
        if (rescale := rescale_of(graph, product)) is not None:
            shape = (factors := graph.constant(factors_of(graph, rescale))) is not None and factors.shape
            if shape and shape != (weight.dims[wanted],):
                yield (
                    rescale.name,
                    f"multiplies by {list(shape)} numbers; the product's columns take [{weight.dims[wanted]}]",
                )


@rule("F209", "alignment", "warning")
def alignment(graph: Indexed) -> Broken:
    """Both dimensions of an FP8 weight are multiples of 16, the width of an FP8 tensor core instruction.

    Others build, and are padded: 65 gave a much larger engine. Products of one shape are one finding.
    """
    padded: dict[tuple[int, ...], list[str]] = {}
    for product in graph.products:
        side = weight_of(graph, product)
        if side is not None and side.dequantize is not None and is_fp8(product):
            dims = tuple(graph.initializers[side.dequantize.input[0]].dims)
            if any(size % ALIGNMENT for size in (dims[:2] if product.node.op_type == "Conv" else dims[-2:])):
                padded.setdefault(dims, []).append(product.node.name)
    for dims, (first, *others) in padded.items():
        like = f", as those of {len(others)} more products are" if len(others) > 1 else ""
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
    """What a product multiplies comes from FP8 codes or from none: "FP8" models that were quantized to INT8 are met
    with, and are another trade.
    """
    for product in graph.products:
        for dequantize in filter(None, (side.other for side in product.operands)):
            kind = type_name(graph.code_type(dequantize.input[0]))
            yield product.node.name, f"multiplies {kind} codes ({dequantize.name}); quantize to FLOAT8E4M3FN for FP8"


@rule("F211", "input-only", "warning", "foreign")
def input_only(graph: Indexed) -> Broken:
    """A product with Q/DQ on its input and no FP8 weight multiplies in the compute type: its input is rounded for
    nothing.
    """
    for product in graph.products:
        for value, side, other in zip(product.node.input, product.operands, reversed(product.operands), strict=False):
            wide = value in graph.folded and side.dequantize is None and side.other is None
            if wide and quantize_of(graph, other) is not None and not any(blocked(graph, product)):
                yield (
                    product.node.name,
                    (
                        "its input is FP8 but its weight is not, so it multiplies in the compute type; quantize its "
                        "weight too, or leave its input as it is"
                    ),
                )


@promise_rule("F212", "promised-attention")
def attention_promised(graph: Indexed, promise: Promise) -> Broken:
    """Both products of each attention that `attention.json` promises are in the graph and FP8 on both sides."""
    products = {product.node.name: product for product in graph.products}
    for name in promise.attention:
        if name not in products:
            yield name, f"is promised on FP8, and there is no such product; {_AGAIN}"
        elif not is_fp8(products[name]):
            side = next(
                place
                for place, operand in zip(("first", "second"), products[name].operands, strict=True)
                if operand.dequantize is None
            )
            yield name, f"is promised on FP8: its {side} input does not come from FP8 codes; {_AGAIN}"


@promise_rule("F213", "scaled-behind")
def scaled_behind(graph: Indexed, promise: Promise) -> Broken:
    """Where a Mul behind the product applies the weight's scales, the product is FP32 and the Mul alone reads it.

    In BF16 the sum would be rounded twice, and in FP16 it can overflow: what is not scaled yet is up to 448² a term.
    """
    for product in graph.products:
        rescale = rescale_of(graph, product)
        if rescale is None or names.module_of(product.node.name) not in promise.input_scales:
            continue
        for dequantize in (side.dequantize for side in product.operands if side.dequantize is not None):
            if (kind := attribute(dequantize, "output_dtype", 0)) not in (0, TensorProto.FLOAT):
                yield (
                    dequantize.name,
                    f"answers in {type_name(kind)}, and {rescale.name} scales the product only behind it; {_AGAIN}",
                )
        for node, _ in graph.readers[product.node.output[0]]:
            if node is not rescale:
                yield (
                    product.node.name,
                    f"is read by {node.op_type} {node.name} before {rescale.name} scales it; {_AGAIN}",
                )
