"""The form of a product whose last positions alone have a second term, which rule F214 holds graphs to.

With a tail of T positions, of a call of S (Slice clamps, so that T may be more than S):

    x ─ Slice [-T:] ─ Q ─ DQ ─ Sub from it ─ Mul 16 ─┐
    └──────────────────────────────────────── Concat ── Q ── DQ ── MatMul ─┬─ Slice [:S] ─┬─ Slice [:-T] ───┐
                                                                           │              └─ Slice [-T:] ─┐ │
                                                                           └─ Slice [S:] ─ Mul 1/16 ──── Add Concat

A Reshape behind the Concat tells the sizes of x again.
"""

from dataclasses import dataclass

from onnx import NodeProto

from ...quantize.codes.formats import TWO_TERMS
from ..onnx_file.indexed import Indexed
from ..onnx_file.tensors import attribute

#: An end of a Slice beyond every axis: torch writes int64's largest number.
_BEYOND = 2**31 - 1
_SLICE_INPUTS, _PARTS = 4, 2


@dataclass(frozen=True)
class Slices:
    """Read which part of a tensor another is, along one `axis`, and which multiple."""

    graph: Indexed
    axis: int = 1

    def times(self, value: str) -> tuple[str | None, float]:
        """Return the value that another is a multiple of, and the factor: itself and 1 where no Mul makes it."""
        node = self.graph.producers.get(value)
        if node is None or node.op_type != "Mul":
            return value, 1.0
        constants = {name: self.graph.constant(name) for name in node.input if self.graph.constants.is_stored(name)}
        number = next(
            (constant for constant in constants.values() if constant is not None and constant.size == 1), None
        )
        factor_of = next((name for name in node.input if name not in constants), None)
        return (factor_of, float(number.ravel()[0])) if number is not None else (value, 1.0)

    def bounds(self, value: str, of: str) -> tuple[int | str, int | str] | None:
        """The bounds of the part that `value` is `of` another: numbers, or names of computed ones; None where no Slice
        along the axis makes it.
        """
        node = self.graph.producers.get(value)
        if node is None or node.op_type != "Slice" or node.input[0] != of or len(node.input) != _SLICE_INPUTS:
            return None
        start, end, axis = (self._number(name) for name in node.input[1:])
        return None if axis != self.axis else (start, end)

    def last(self, value: str, of: str) -> int | None:
        """The number of last positions `of` a tensor that `value` is; None where it is no such part."""
        start, end = self.bounds(value, of) or (0, 0)
        to_the_end = isinstance(start, int) and isinstance(end, int) and start < 0 and end >= _BEYOND
        return -start if to_the_end and isinstance(start, int) else None

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
        return name if stored is None or stored.size != 1 else int(stored.ravel()[0])


def tail_fault(slices: Slices, product: str, joined: NodeProto, tail: int) -> str | None:
    """Describe how a `product` of a tail is not cut behind all positions and added; None where it is.

    `joined`: the Concat of x and the second terms of its last `tail` positions.
    """
    graph, x = slices.graph, joined.input[0]
    parts = [node.output[0] for node, _ in graph.readers.get(product, ())]
    bounds = {value: slices.bounds(value, product) for value in parts}
    first = next(
        (value for value, bound in bounds.items() if bound and bound[0] == 0 and slices.counts(bound[1], x)), None
    )
    second = next((value for value, bound in bounds.items() if bound and slices.counts(bound[0], x)), None)
    if len(parts) != _PARTS or first is None or second is None:
        return "its product is not cut behind the positions of the call"
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
        return None if _joins(slices, node, first, tail) else "its last positions do not follow the others"
    return "its second term is not added to its last positions"


def _joins(slices: Slices, added: NodeProto, first: str, tail: int) -> bool:
    """Tell whether a Concat puts the sum `added` behind the positions of `first` before the last `tail`."""
    for node, _ in slices.graph.readers.get(added.output[0], ()):
        if node.op_type == "Concat" and attribute(node, "axis", 0) == slices.axis and len(node.input) == _PARTS:
            return slices.bounds(node.input[0], first) == (0, -tail) and node.input[1] == added.output[0]
    return False


def end_of_tail(graph: Indexed, product: str) -> NodeProto | None:
    """The Concat that makes the result of a `product` with a tail; None for other products."""
    for part, _ in graph.readers.get(product, ()):
        for last, _ in graph.readers.get(part.output[0], ()) if part.op_type == "Slice" else ():
            for added, _ in graph.readers.get(last.output[0], ()) if last.op_type in ("Slice", "Mul") else ():
                ends = [node for node, _ in graph.readers.get(added.output[0], ()) if node.op_type == "Concat"]
                if added.op_type == "Add" and ends:
                    sized = [node for node, _ in graph.readers.get(ends[0].output[0], ()) if node.op_type == "Reshape"]
                    return (sized or ends)[0]
    return None
