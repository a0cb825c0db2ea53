"""Make a branch for each expert from the expert that was traced (`traced_experts`).

    chosen[N] -> If ─ then: shares[:, N] -> the nodes of an expert, which add to the total
                    └ else: the total, unchanged

All weights and GEMMs of an expert lie inside its branch, so a step that routes no token to it reads none of its
weights. Quantization lies inside too: outside, TensorRT-RTX multiplies in BF16, and where several branches quantize the
same tensor its builder fails. The total passes through the experts in the order of their numbers, which is the order of
the reference's additions.
"""

from dataclasses import dataclass

import onnx_ir as ir

from ..modules.operators import EXPERT_BEGINS, EXPERT_ENDS
from .layer_copies import Place, like


@dataclass(frozen=True)
class ExpertPattern:
    """A traced expert, named after `place` and its `number`: its `nodes` in order, between the nodes that mark its
    begin and its end.
    """

    place: str
    number: int
    begins: ir.Node
    nodes: tuple[ir.Node, ...]
    ends: ir.Node

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of all experts that are made from this one."""
        return tuple(self.begins.attributes["members"].as_ints())

    def renamed(self, name: str | None, number: int) -> str | None:
        """Translate `name` of this expert to expert `number`; None for a name that belongs to no expert."""
        prefix = f"{self.place}.{self.number}."
        if name and name.startswith(prefix):
            return f"{self.place}.{number}.{name.removeprefix(prefix)}"
        return None


def branch_experts(model: ir.Model, place: Place) -> None:
    """Replace the marked experts of the graph by branches. Names are final before this pass; `place` locates stored
    tensors.

    1. Experts whose totals are chained belong to one layer, one for each kind of expert. 2. The marks and the traced
    experts are removed.
    """
    numbers: dict[int, ir.Value] = {}
    for last in [node for node in model.graph if _is(node, EXPERT_ENDS) and not _goes_on(node)]:
        patterns = _patterns(model.graph, last)
        total = patterns[0].begins.inputs[0]
        assert total is not None, "a mark reads a total"
        for number, pattern in sorted((number, traced) for traced in patterns for number in traced.members):
            index = numbers.get(number) or numbers.setdefault(number, _number(model, pattern, number))
            nodes, total = _branch(model, pattern, index, total, place)
            model.graph.insert_before(last, nodes)
        last.outputs[0].replace_all_uses_with(total)
        model.graph.remove(
            [node for pattern in patterns for node in (pattern.begins, *pattern.nodes, pattern.ends)], safe=True
        )


def _is(node: ir.Node | None, operator: tuple[str, str]) -> bool:
    return node is not None and (node.domain, node.op_type) == operator


def _goes_on(mark: ir.Node) -> bool:
    """Tell whether another expert continues the total at this end mark."""
    return any(_is(usage.node, EXPERT_BEGINS) for usage in mark.outputs[0].uses())


def _patterns(graph: ir.Graph, last: ir.Node) -> list[ExpertPattern]:
    """The traced experts of one layer, in order, found from the mark that ends its `last` expert."""
    patterns: list[ExpertPattern] = []
    ends: ir.Node | None = last
    while ends is not None and _is(ends, EXPERT_ENDS):
        prefix = (ends.name or "").rpartition(".")[0]
        place, _, number = prefix.rpartition(".")
        begins, *nodes = (node for node in graph if (node.name or "").startswith(f"{prefix}.") and node is not ends)
        assert _is(begins, EXPERT_BEGINS), f"{begins.name} begins an expert"
        patterns.insert(0, ExpertPattern(place, int(number), begins, tuple(nodes), ends))
        ends = begins.inputs[0].producer() if begins.inputs[0] is not None else None
    return patterns


def _number(model: ir.Model, pattern: ExpertPattern, number: int) -> ir.Value:
    """Make the constant `number`, named after its first reader."""
    name = f"{pattern.place}.{number}.chosen.constant_1"
    tensor = ir.tensor(number, ir.DataType.INT64, name=name)
    value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _branch(
    model: ir.Model, pattern: ExpertPattern, index: ir.Value, total: ir.Value, place: Place
) -> tuple[list[ir.Node], ir.Value]:
    """Make the branch of the expert whose number is the constant `index`; it adds to `total`.

    Returns its nodes and the new total.
    """
    assert index.const_value is not None, "the number of an expert is a constant"
    number = int(index.const_value.numpy())
    _, shares, chosen = pattern.begins.inputs
    old_total, old_share = pattern.begins.outputs
    name = f"{pattern.place}.{number}"
    share = _node("Gather", [shares, index], f"{name}.share", old_share, axis=1)
    known = {old_total: total, old_share: share.outputs[0]}
    nodes = [share, *_copies(model, pattern, number, known, place)]
    unchanged = _node("Identity", [total], f"{name}.kept", old_total)
    output = pattern.ends.inputs[0]
    assert output is not None, "a mark reads a total"
    condition = ir.node("Gather", [chosen, index], {"axis": 0}, name=f"{name}.chosen")
    value = condition.outputs[0]
    value.name = f"{name}.chosen.output"
    value.dtype = ir.DataType.BOOL
    value.shape = ir.Shape([])
    branches = {
        "then_branch": ir.Graph([], [known[output]], nodes=nodes, name=f"{name}.then"),
        "else_branch": ir.Graph([], [unchanged.outputs[0]], nodes=[unchanged], name=f"{name}.else"),
    }
    choice = _node("If", [value], f"{name}.If", old_total, **branches)
    return [condition, choice], choice.outputs[0]


def _node(operator: str, inputs: list[ir.Value | None], name: str, as_value: ir.Value, **attributes: object) -> ir.Node:
    """Make a node whose output has the type and shape of `as_value`."""
    outputs = [like(as_value, f"{name}.output")]
    return ir.node(operator, inputs, attributes, outputs=outputs, name=name)  # type: ignore[arg-type]


def _copies(
    model: ir.Model, pattern: ExpertPattern, number: int, known: dict[ir.Value, ir.Value], place: Place
) -> list[ir.Node]:
    """Copy the nodes of a pattern for expert `number`. `known` maps values of the pattern to the expert's."""
    copies = []
    for node in pattern.nodes:
        inputs = [
            None if value is None else _read(model, pattern, number, value, known, place) for value in node.inputs
        ]
        outputs = [like(value, pattern.renamed(value.name, number)) for value in node.outputs]
        known |= dict(zip(node.outputs, outputs, strict=True))
        attributes = [*node.attributes.values()]
        name = pattern.renamed(node.name, number)
        copies.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name))
    return copies


def _read(
    model: ir.Model, pattern: ExpertPattern, number: int, value: ir.Value, known: dict[ir.Value, ir.Value], place: Place
) -> ir.Value:
    """Return the value that expert `number` reads in place of `value`: its own copy, its own stored tensor, or a value
    that all experts share.
    """
    if value in known:
        return known[value]
    name = pattern.renamed(value.name, number)
    if name in (None, value.name) or not isinstance(value.const_value, ir.ExternalTensor):
        return value
    tensor = known[value] = like(value, name)
    tensor.const_value = place(name, value.const_value)
    model.graph.register_initializer(tensor)
    return tensor
