"""Rule F214: activations in two terms.

A BF16 value is exactly s·(a + b/16) where s is a power of two: a its code, b that of sixteen times what a leaves of it.
Both go through one product, one behind the other along the batch:

    x ── Q ── DQ ── Sub from x ── Mul 16 ──┐
    └──────────────────────────────── Concat ── Q ── DQ ── MatMul ── Split ── first + second / 16

Quantizing x anew within the Concat gives a again. In the form `mul` the Mul of the scales is between MatMul and Split.
Of attention in FP8 the first inputs, queries and probabilities, are such, along their rows.

With a tail of T positions only these have a second term, behind all S positions of a call (`rules_tail`).
"""

from onnx import NodeProto, TensorProto

from ...core.findings import Broken
from ...quantize.codes.formats import TWO_TERMS
from ..onnx_file import names
from ..onnx_file.indexed import Indexed, Product
from ..onnx_file.tensors import attribute, type_name
from ..onnx_file.weight_scales import behind
from .rules import Promise, promise_rule
from .rules_products import activation_of, quantize_of
from .rules_tail import Slices, end_of_tail, tail_fault

_AGAIN = "run `fp8q export` again"
_HALVES = 2


@promise_rule("F214", "two-terms")
def two_terms(graph: Indexed, promise: Promise) -> Broken:
    """An input that `scales.json` promises in two terms goes through one product in both, and no other does: without
    the second it is as rounded as one term's, and what is added to the wrong share is another value. With a tail, the
    second terms are of the last positions of a call alone, and are added to these.
    """
    for product in graph.products if promise.two_terms is not None else ():
        attends = product.node.name in promise.attention
        name = product.node.name if attends else names.module_of(product.node.name) or ""
        side = product.operands[0] if attends else activation_of(graph, product)
        quantize = quantize_of(graph, side) if side is not None else None
        if promise.two_terms is None or quantize is None or not (attends or name in promise.input_scales):
            continue
        joined = concat_of(graph, quantize)
        if joined is None and name in promise.two_terms:
            yield product.node.name, f"is promised in two terms, and {quantize.name} reads no Concat of both; {_AGAIN}"
        elif joined is not None and name not in promise.two_terms:
            yield product.node.name, f"takes two terms, and scales.json promises one; {_AGAIN}"
        elif joined is not None and (
            reason := terms_fault(graph, product, (joined, quantize), promise.tails.get(name))
        ):
            yield product.node.name, f"is promised in two terms: {reason}; {_AGAIN}"


def terms_fault(graph: Indexed, product: Product, made: tuple[NodeProto, NodeProto], tail: int | None) -> str | None:
    """Describe what is wrong with both terms of a product; None where nothing is.

    `made`: the Concat of both and its QuantizeLinear; `tail`: the last positions that alone have the second (None:
    all).
    """
    joined, _ = made
    slices = Slices(graph, attribute(joined, "axis", 0))
    if reason := second_fault(graph, slices, made, tail) or narrow_fault(product):
        return reason
    if tail is None:
        return halves_fault(graph, product, joined)
    return tail_fault(slices, result_of(graph, product), joined, tail)


def concat_of(graph: Indexed, quantize: NodeProto) -> NodeProto | None:
    """The Concat of two terms that a QuantizeLinear reads; None where it reads one term."""
    node = graph.producers.get(quantize.input[0])
    return node if node is not None and node.op_type == "Concat" and len(node.input) == _HALVES else None


def second_fault(graph: Indexed, slices: Slices, made: tuple[NodeProto, NodeProto], tail: int | None) -> str | None:
    """Describe how a Concat differs from x and sixteen times what the codes of x leave of it, or of its last `tail`
    positions; None where it does not.
    """
    joined, quantize = made
    x, second = joined.input
    times, number = slices.times(second)
    if times is None or number != TWO_TERMS.divisor:
        return f"its second term is multiplied by {number:g} and not by {TWO_TERMS.divisor:g}"
    left = graph.producers.get(times)
    taken = graph.producers.get(left.input[1]) if left is not None and left.op_type == "Sub" else None
    if left is None or taken is None or taken.op_type != "DequantizeLinear":
        return "its second term is not of what the codes leave of the first"
    first = graph.producers.get(taken.input[0])
    part = slices.last(left.input[0], x)
    if (part is None and left.input[0] != x) or first is None or first.op_type != "QuantizeLinear":
        return "its second term is not of what the codes leave of the first"
    if first.input[0] != left.input[0] and slices.last(first.input[0], x) != part:
        return "its second term is not of what the codes leave of the first"
    if part != tail:
        places = ["all positions" if count is None else f"the last {count} positions" for count in (part, tail)]
        return f"its second term is of {places[0]}, and not of {places[1]}"
    scale = graph.constants.fingerprint(quantize.input[1])
    if other := next((node for node in (first, taken) if graph.constants.fingerprint(node.input[1]) != scale), None):
        return f"{other.name} has another scale than {quantize.name}"
    return None


def result_of(graph: Indexed, product: Product) -> str:
    """The product of the codes with all scales applied, before the terms are added."""
    result: str = [product.node, *behind(graph, product)][-1].output[0]
    return result


def narrow_fault(product: Product) -> str | None:
    """Name a side of a product of two terms that is not FP32; None where none is."""
    for dequantize in (side.dequantize for side in product.operands if side.dequantize is not None):
        if (kind := attribute(dequantize, "output_dtype", 0)) not in (0, TensorProto.FLOAT):
            return f"{dequantize.name} answers in {type_name(kind)}, and the halves are added in FLOAT"
    return None


def halves_fault(graph: Indexed, product: Product, joined: NodeProto) -> str | None:
    """Describe how a product of two terms is not cut in halves and added with the second's share; None where all is."""
    readers = [node for node, _ in graph.readers.get(result_of(graph, product), ())]
    if len(readers) != 1 or readers[0].op_type != "Split" or len(readers[0].output) != _HALVES:
        return "no Split alone reads its product"
    (split,) = readers
    if attribute(split, "axis", 0) != attribute(joined, "axis", 0):
        return f"{split.name} cuts along axis {attribute(split, 'axis', 0)}, and {joined.name} joins another"
    if (added := _sum_of(graph, split)) is None:
        return "its halves are not added"
    shares = [Slices(graph).times(value)[1] for value in added.input if value != split.output[0]]
    if shares != [1 / TWO_TERMS.divisor]:
        return f"the second half is added {shares[0] if shares else 1:g} times, and not {1 / TWO_TERMS.divisor:g}"
    return None


def end_of(graph: Indexed, product: Product) -> NodeProto:
    """The node that makes the result of a product: its own, the last of the form `mul`, or the sum of two terms."""
    last = [product.node, *behind(graph, product)][-1]
    split = next((node for node, _ in graph.readers.get(last.output[0], ()) if node.op_type == "Split"), None)
    added = _sum_of(graph, split) if split is not None and len(split.output) == _HALVES else None
    return added or end_of_tail(graph, last.output[0]) or last


def _sum_of(graph: Indexed, split: NodeProto) -> NodeProto | None:
    """The Add of the first half and of a number of times the second; None where there is none."""
    for node, _ in graph.readers.get(split.output[0], ()):
        others = [value for value in node.input if value != split.output[0]]
        if node.op_type == "Add" and len(others) == 1 and Slices(graph).times(others[0])[0] == split.output[1]:
            return node
    return None
