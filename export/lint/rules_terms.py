"""Rule F214: activations in two terms.

A BF16 value is exactly s·(a + b/16) where s is a power of two: a its code, b that of sixteen times what a leaves of it.
Both go through one product, one behind the other along the batch:

    x ── Q ── DQ ── Sub from x ── Mul 16 ──┐
    └──────────────────────────────── Concat ── Q ── DQ ── MatMul ── Split ── first + second / 16

Quantizing x anew within the Concat gives a again. In the form `mul` the Mul of the scales is between MatMul and Split.
Of attention in FP8 the first inputs, queries and probabilities, are such, along their rows.
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

_AGAIN = "run `fp8q export` again"
_HALVES = 2


@promise_rule("F214", "two-terms")
def two_terms(graph: Indexed, promise: Promise) -> Broken:
    """An input that `scales.json` promises in two terms goes through one product in both, and no other does: without
    the second it is as rounded as one term's, and what is added to the wrong share is another value.
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
            reason := second_fault(graph, joined, quantize) or halves_fault(graph, product, joined)
        ):
            yield product.node.name, f"is promised in two terms: {reason}; {_AGAIN}"


def concat_of(graph: Indexed, quantize: NodeProto) -> NodeProto | None:
    """The Concat of two terms that a QuantizeLinear reads; None where it reads one term."""
    node = graph.producers.get(quantize.input[0])
    return node if node is not None and node.op_type == "Concat" and len(node.input) == _HALVES else None


def second_fault(graph: Indexed, joined: NodeProto, quantize: NodeProto) -> str | None:
    """Describe how a Concat differs from x and sixteen times what the codes of x leave of it; None where all is."""
    x, second = joined.input
    times, number = _times(graph, second)
    if times is None or number != TWO_TERMS.divisor:
        return f"its second term is multiplied by {number:g} and not by {TWO_TERMS.divisor:g}"
    left = graph.producers.get(times)
    taken = graph.producers.get(left.input[1]) if left is not None and left.op_type == "Sub" else None
    if left is None or taken is None or left.input[0] != x or taken.op_type != "DequantizeLinear":
        return "its second term is not of what the codes leave of the first"
    first = graph.producers.get(taken.input[0])
    if first is None or first.op_type != "QuantizeLinear" or first.input[0] != x:
        return "its second term is not of what the codes leave of the first"
    scale = graph.constants.fingerprint(quantize.input[1])
    if other := next((node for node in (first, taken) if graph.constants.fingerprint(node.input[1]) != scale), None):
        return f"{other.name} has another scale than {quantize.name}"
    return None


def halves_fault(graph: Indexed, product: Product, joined: NodeProto) -> str | None:
    """Describe how a product of two terms is not cut in halves and added with the second's share; None where all is."""
    for dequantize in (side.dequantize for side in product.operands if side.dequantize is not None):
        if (kind := attribute(dequantize, "output_dtype", 0)) not in (0, TensorProto.FLOAT):
            return f"{dequantize.name} answers in {type_name(kind)}, and the halves are added in FLOAT"
    made = [product.node, *behind(graph, product)][-1].output[0]
    readers = [node for node, _ in graph.readers.get(made, ())]
    if len(readers) != 1 or readers[0].op_type != "Split" or len(readers[0].output) != _HALVES:
        return "no Split alone reads its product"
    (split,) = readers
    if attribute(split, "axis", 0) != attribute(joined, "axis", 0):
        return f"{split.name} cuts along axis {attribute(split, 'axis', 0)}, and {joined.name} joins another"
    if (added := _sum_of(graph, split)) is None:
        return "its halves are not added"
    shares = [_times(graph, value)[1] for value in added.input if value != split.output[0]]
    if shares != [1 / TWO_TERMS.divisor]:
        return f"the second half is added {shares[0] if shares else 1:g} times, and not {1 / TWO_TERMS.divisor:g}"
    return None


def end_of(graph: Indexed, product: Product) -> NodeProto:
    """The node that makes the result of a product: its own, the last of the form `mul`, or the sum of two terms."""
    last = [product.node, *behind(graph, product)][-1]
    split = next((node for node, _ in graph.readers.get(last.output[0], ()) if node.op_type == "Split"), None)
    added = _sum_of(graph, split) if split is not None and len(split.output) == _HALVES else None
    return last if added is None else added


def _sum_of(graph: Indexed, split: NodeProto) -> NodeProto | None:
    """The Add of the first half and of a number of times the second; None where there is none."""
    for node, _ in graph.readers.get(split.output[0], ()):
        others = [value for value in node.input if value != split.output[0]]
        if node.op_type == "Add" and len(others) == 1 and _times(graph, others[0])[0] == split.output[1]:
            return node
    return None


def _times(graph: Indexed, value: str) -> tuple[str | None, float]:
    """Return the value that another is a multiple of, and the factor: itself and 1 where no Mul makes it."""
    node = graph.producers.get(value)
    if node is None or node.op_type != "Mul":
        return value, 1.0
    constants = {name: graph.constant(name) for name in node.input if graph.constants.is_stored(name)}
    number = next((each for each in constants.values() if each is not None and each.size == 1), None)
    of = next((name for name in node.input if name not in constants), None)
    return (of, float(number.ravel()[0])) if number is not None else (value, 1.0)
