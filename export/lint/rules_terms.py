"""Rule F214: activations in two terms.

A BF16 value is exactly s·(a + b/16) where s is a power of two: a is its code, and b the code of sixteen times the
remainder. Both terms go through one GEMM, one behind the other along the batch:

    x ── Q ── DQ ── Sub from x ── Mul 16 ──┐
    └──────────────────────────────── Concat ── Q ── DQ ── MatMul ── Split ── first + second / 16

Quantizing x anew within the Concat gives a again. In the form `mul` the Mul of the scales is between MatMul and Split.
In FP8 attention the queries and the probabilities may have two terms too, along their rows.

With a tail of T positions only these have a second term, behind all S positions of a call (Slice clamps, so that T may
be more than S):

    x ─ Slice [-T:] ─ Q ─ DQ ─ Sub from it ─ Mul 16 ─┐
    └──────────────────────────────────────── Concat ── Q ── DQ ── MatMul ─┬─ Slice [:S] ─┬─ Slice [:-T] ───┐
                                                                           │              └─ Slice [-T:] ─┐ │
                                                                           └─ Slice [S:] ─ Mul 1/16 ──── Add Concat

A Reshape behind the Concat restores the sizes of x.
"""

from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from ...core.findings import Broken
from ...options import TWO
from ...quantize.codes.formats import TWO_TERMS
from ..onnx_file import names
from ..onnx_file.indexed import GraphGemm, Indexed
from ..onnx_file.tensors import attribute, type_name
from ..onnx_file.weight_scales import behind
from .rules import Expectation, expectation_rule
from .rules_gemms import activation_of, quantize_of

_AGAIN = "run `fp8q export` again"
_HALVES = 2
#: An end of a Slice beyond every axis: torch writes int64's largest number.
_BEYOND = 2**31 - 1
_SLICE_INPUTS = 4
_PARTS = 2


@dataclass(frozen=True)
class Slices:
    """Find out which slice of another tensor a tensor is, along one `axis`, and which multiple of it."""

    graph: Indexed
    axis: int = 1

    def times(self, value: str) -> tuple[str | None, float]:
        """Return the value that `value` is a multiple of, and the factor: itself and 1 if no Mul makes it."""
        node = self.graph.producers.get(value)
        if node is None or node.op_type != "Mul":
            return value, 1.0
        constants = {name: self.graph.constant(name) for name in node.input if self.graph.constants.is_stored(name)}
        number = next(
            (constant for constant in constants.values() if constant is not None and constant.size == 1), None
        )
        factor_of = next((name for name in node.input if name not in constants), None)
        if number is not None:
            return (factor_of, float(number.ravel()[0]))
        return (value, 1.0)

    def bounds(self, value: str, of: str) -> tuple[int | str, int | str] | None:
        """The bounds of the Slice along the axis that makes `value` from the tensor `of`: numbers, or names of computed
        numbers; None if no such Slice makes it.
        """
        node = self.graph.producers.get(value)
        if node is None or node.op_type != "Slice" or node.input[0] != of or len(node.input) != _SLICE_INPUTS:
            return None
        start, end, axis = (self._number(name) for name in node.input[1:])
        return None if axis != self.axis else (start, end)

    def last(self, value: str, of: str) -> int | None:
        """The number of last positions of the tensor `of` that `value` holds; None if it is no such slice."""
        start, end = self.bounds(value, of) or (0, 0)
        to_the_end = isinstance(start, int) and isinstance(end, int) and start < 0 and end >= _BEYOND
        if to_the_end and isinstance(start, int):
            return -start
        return None

    def counts(self, name: int | str, of: str) -> bool:
        """Tell whether a computed number is the size of a tensor's axis."""
        node = self.graph.producers.get(name) if isinstance(name, str) else None
        return (
            node is not None
            and node.op_type == "Shape"
            and node.input[0] == of
            and (attribute(node, "start", 0), attribute(node, "end", 0)) == (self.axis, self.axis + 1)
        )

    def _number(self, name: str) -> int | str:
        stored = self.graph.constant(name) if self.graph.constants.is_stored(name) else None
        if stored is None or stored.size != 1:
            return name
        return int(stored.ravel()[0])


@expectation_rule("F214", "two-terms")
def codes_of_two_terms(graph: Indexed, expected: Expectation) -> Broken:
    """An input that `scales.json` expects in two terms goes through one GEMM in both, and no other does: without
    the second it is as rounded as one term's, and what is added to the wrong share is another value. With a tail, the
    second terms are of the last positions of a call alone, and are added to these.
    """
    for gemm in graph.gemms if expected.forms else ():
        attends = gemm.node.name in expected.attention
        name = gemm.node.name if attends else names.module_of(gemm.node.name) or ""
        side = gemm.operands[0] if attends else activation_of(graph, gemm)
        quantize = quantize_of(graph, side) if side is not None else None
        form = expected.forms.get(name)
        if form is None or quantize is None or not (attends or name in expected.input_scales):
            continue
        joined = concat_of(graph, quantize)
        in_two = form.terms == TWO.terms
        if joined is None and in_two:
            yield gemm.node.name, f"is expected in two terms, and {quantize.name} reads no Concat of both; {_AGAIN}"
        elif joined is not None and not in_two:
            yield gemm.node.name, f"takes two terms, and scales.json expects one; {_AGAIN}"
        elif joined is not None and (reason := terms_fault(graph, gemm, (joined, quantize), form.tail)):
            yield gemm.node.name, f"is expected in two terms: {reason}; {_AGAIN}"


def terms_fault(graph: Indexed, gemm: GraphGemm, made: tuple[NodeProto, NodeProto], tail: int | None) -> str | None:
    """Describe the first fault of a GEMM in two terms; None if there is none.

    `made`: the Concat of both and its QuantizeLinear; `tail`: the last positions that alone have the second (None:
    all).
    """
    joined, _ = made
    slices = Slices(graph, attribute(joined, "axis", 0))
    if reason := second_fault(graph, slices, made, tail) or narrow_fault(gemm):
        return reason
    if tail is None:
        return halves_fault(graph, gemm, joined)
    return tail_fault(slices, result_of(graph, gemm), joined, tail)


def concat_of(graph: Indexed, quantize: NodeProto) -> NodeProto | None:
    """The Concat of two terms that a QuantizeLinear reads; None where it reads one term."""
    node = graph.producers.get(quantize.input[0])
    if node is not None and node.op_type == "Concat" and len(node.input) == _HALVES:
        return node
    return None


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


def result_of(graph: Indexed, gemm: GraphGemm) -> str:
    """The GEMM of the codes with all scales applied, before the terms are added."""
    result: str = [gemm.node, *behind(graph, gemm)][-1].output[0]
    return result


def narrow_fault(gemm: GraphGemm) -> str | None:
    """Name a side of a GEMM of two terms that is not FP32; None where none is."""
    for dequantize in (side.dequantize for side in gemm.operands if side.dequantize is not None):
        if (kind := attribute(dequantize, "output_dtype", 0)) not in (0, TensorProto.FLOAT):
            return f"{dequantize.name} answers in {type_name(kind)}, and the halves are added in FLOAT"
    return None


def halves_fault(graph: Indexed, gemm: GraphGemm, joined: NodeProto) -> str | None:
    """Describe the fault in the nodes that split a GEMM in two terms and add its halves; None if there is none."""
    readers = [node for node, _ in graph.readers.get(result_of(graph, gemm), ())]
    if len(readers) != 1 or readers[0].op_type != "Split" or len(readers[0].output) != _HALVES:
        return "no Split alone reads its GEMM"
    (split,) = readers
    if attribute(split, "axis", 0) != attribute(joined, "axis", 0):
        return f"{split.name} cuts along axis {attribute(split, 'axis', 0)}, and {joined.name} joins another"
    if (added := _sum_of(graph, split)) is None:
        return "its halves are not added"
    shares = [Slices(graph).times(value)[1] for value in added.input if value != split.output[0]]
    if shares != [1 / TWO_TERMS.divisor]:
        return f"the second half is added {shares[0] if shares else 1:g} times, and not {1 / TWO_TERMS.divisor:g}"
    return None


def end_of(graph: Indexed, gemm: GraphGemm) -> NodeProto:
    """The node that makes the result of a GEMM: its own, the last of the form `mul`, or the sum of two terms."""
    last = [gemm.node, *behind(graph, gemm)][-1]
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


def tail_fault(slices: Slices, gemm: str, joined: NodeProto, tail: int) -> str | None:
    """Describe the fault in the nodes that split a GEMM with a tail and add its second terms; None if there is none.

    `joined`: the Concat of x and the second terms of its last `tail` positions.
    """
    graph = slices.graph
    x = joined.input[0]
    parts = [node.output[0] for node, _ in graph.readers.get(gemm, ())]
    bounds = {value: slices.bounds(value, gemm) for value in parts}
    first = next(
        (value for value, bound in bounds.items() if bound and bound[0] == 0 and slices.counts(bound[1], x)), None
    )
    second = next((value for value, bound in bounds.items() if bound and slices.counts(bound[0], x)), None)
    if len(parts) != _PARTS or first is None or second is None:
        return "its GEMM is not cut behind the positions of the call"
    for node, _ in (
        reader for part in graph.readers.get(first, ()) for reader in graph.readers.get(part[0].output[0], ())
    ):
        others = [value for value in node.input if slices.last(value, first) is None]
        if node.op_type != "Add" or len(others) != 1 or slices.times(others[0])[0] != second:
            continue
        added = next(slices.last(value, first) for value in node.input if value not in others)
        share = slices.times(others[0])[1]
        if added != tail:
            return f"its second term is added to the last {added} positions, and not to {tail}"
        if share != 1 / TWO_TERMS.divisor:
            return f"the second half is added {share:g} times, and not {1 / TWO_TERMS.divisor:g}"
        if _joins(slices, node, first, tail):
            return None
        return "its last positions do not follow the others"
    return "its second term is not added to its last positions"


def _joins(slices: Slices, added: NodeProto, first: str, tail: int) -> bool:
    """Tell whether a Concat puts the sum `added` behind the positions of `first` before the last `tail`."""
    for node, _ in slices.graph.readers.get(added.output[0], ()):
        if node.op_type == "Concat" and attribute(node, "axis", 0) == slices.axis and len(node.input) == _PARTS:
            return slices.bounds(node.input[0], first) == (0, -tail) and node.input[1] == added.output[0]
    return False


def end_of_tail(graph: Indexed, gemm: str) -> NodeProto | None:
    """The Concat that makes the result of a `gemm` with a tail; None for other GEMMs."""
    for part, _ in graph.readers.get(gemm, ()):
        for last, _ in graph.readers.get(part.output[0], ()) if part.op_type == "Slice" else ():
            for added, _ in graph.readers.get(last.output[0], ()) if last.op_type in ("Slice", "Mul") else ():
                ends = [node for node, _ in graph.readers.get(added.output[0], ()) if node.op_type == "Concat"]
                if added.op_type == "Add" and ends:
                    sized = [node for node, _ in graph.readers.get(ends[0].output[0], ()) if node.op_type == "Reshape"]
                    return (sized or ends)[0]
    return None
