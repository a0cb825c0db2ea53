"""Make the layers that were not traced, by copying a traced layer of their kind.

In the small graph (`layer_kinds.skip`) a node `SKIPPED` takes the place of each of these layers. It is replaced by a
copy of the nodes of the kind's second layer, with another layer index in every name, between the hidden states that
enter and leave the node. Values that the layer shares with others (masks, rotary embeddings, constants) are read from
the same place.

The copy is checked: made for the last layer of the kind, it must equal that layer as it was traced, node by node and
name by name. If it does not, or if the graph is not a chain of layers with one tensor between them, `NotAlikeError` is
raised and the model is traced in full.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..modules.layer_kinds import Kind, NotAlikeError
from ..modules.operators import SKIPPED

#: A function from the name of a stored tensor, and a tensor of another layer like it, to the tensor with its place.
Place = Callable[[str, ir.TensorProtocol], ir.TensorProtocol]
_CACHE = re.compile(r"(past_key_values|new_key_values)\.(\d+)\.(key|value)")


@dataclass(frozen=True)
class Block:
    """The nodes of one traced layer, in order."""

    prefix: str
    index: int
    nodes: tuple[ir.Node, ...]

    def renamed(self, name: str | None, index: int) -> str | None:
        """Translate `name` of this layer to layer `index`; None for a name that belongs to no layer, or to another."""
        prefix = f"{self.prefix}{self.index}."
        if name is not None and name.startswith(prefix):
            return f"{self.prefix}{index}.{name.removeprefix(prefix)}"
        match = _CACHE.fullmatch(name or "")
        if match and int(match[2]) == self.index:
            return f"{match[1]}.{index}.{match[3]}"
        return None


@dataclass(frozen=True)
class LayerPattern:
    """The block that the layers of a kind are copied from, with its interface: the inputs (node, input) that read the
    hidden states, and the name of the hidden states that leave.
    """

    block: Block
    entering: frozenset[tuple[int, int]]
    leaving: str


def stamp(model: ir.Model, prefix: str, kinds: Sequence[Kind], place: Place) -> None:
    """Put the layers that `kinds` skipped into the graph, whose names are final (`renaming.name_the_rest`).

    `place` locates a stored tensor by its name. Raises NotAlikeError.
    """
    blocks = blocks_of(model, prefix)
    patterns: dict[int, LayerPattern] = {}
    for kind in kinds:
        if kind.skipped:
            patterns |= dict.fromkeys(kind.skipped, _pattern(blocks, kind))
    for marker in [node for node in model.graph if (node.domain, node.op_type) == SKIPPED]:
        index = marker.attributes["index"].as_int()
        _replace(model, marker, patterns.pop(index), index, place)
    if patterns:
        raise NotAlikeError(f"layers {sorted(patterns)} left no trace")
    order_interface(model)


def _pattern(blocks: Mapping[int, Block], kind: Kind) -> LayerPattern:
    """The second layer of a kind as a pattern, after the check that its copy equals the kind's last layer."""
    if missing := {*kind.traced} - {*blocks}:
        raise NotAlikeError(f"layers {sorted(missing)} left no trace")
    second, last = (blocks[index] for index in kind.traced[1:])
    leaving = _leaving(second)
    if second.renamed(leaving, last.index) != _leaving(last):
        raise NotAlikeError(f"layers {second.index} and {last.index} hand on different values")
    return LayerPattern(second, _entering(second, last), leaving)


def blocks_of(model: ir.Model, prefix: str) -> dict[int, Block]:
    """The layers of the graph, each a contiguous run of nodes. Raises NotAlikeError for other nodes between them."""
    row: list[tuple[int | None, ir.Node]] = []
    for node in model.graph:
        match = re.match(rf"{re.escape(prefix)}(\d+)\.", node.name or "")
        row.append((int(match[1]) if match else None, node))
    inside = [at for at, (index, _) in enumerate(row) if index is not None]
    nodes: dict[int, list[ir.Node]] = {}
    previous = -1
    for index, node in row[inside[0] : inside[-1] + 1] if inside else []:
        at = node.attributes["index"].as_int() if (node.domain, node.op_type) == SKIPPED else index
        if at is None or at < previous:
            raise NotAlikeError(f"{node.name} lies between the layers")
        previous = at
        if index is not None:
            nodes.setdefault(index, []).append(node)
    return {index: Block(prefix, index, tuple(members)) for index, members in nodes.items()}


def _entering(second: Block, last: Block) -> frozenset[tuple[int, int]]:
    """Find the inputs by which `second` reads its hidden states: the only value that differs from `last`'s otherwise
    equal inputs.
    """
    if len(second.nodes) != len(last.nodes):
        raise NotAlikeError(
            f"layers {second.index} and {last.index} have {len(second.nodes)} and {len(last.nodes)} nodes"
        )
    entering: dict[tuple[ir.Value, ir.Value], list[tuple[int, int]]] = {}
    for at, (one, other) in enumerate(zip(second.nodes, last.nodes, strict=True)):
        if _described(second, one, last.index) != _described(last, other, last.index):
            raise NotAlikeError(f"{one.name} and {other.name} differ")
        for number, (mine, theirs) in enumerate(zip(one.inputs, other.inputs, strict=True)):
            if mine is theirs or mine is None or theirs is None:
                continue
            if (name := second.renamed(mine.name, last.index)) is None:
                entering.setdefault((mine, theirs), []).append((at, number))
            elif name != theirs.name or not _alike(mine, theirs):
                raise NotAlikeError(f"{one.name} and {other.name} read different values")
    if len(entering) != 1:
        raise NotAlikeError(f"layers {second.index} and {last.index} get {len(entering)} values from the layers before")
    return frozenset(*entering.values())


def _described(block: Block, node: ir.Node, index: int) -> object:
    """Describe a node without its inputs, with its names translated to layer `index`."""
    attributes = sorted((key, attribute.type, repr(attribute.value)) for key, attribute in node.attributes.items())
    outputs = [
        (block.renamed(value.name, index), str(value.type), str(value.shape), value.is_graph_output())
        for value in node.outputs
    ]
    inputs = [None if value is None else value.producer() is None for value in node.inputs]
    return node.domain, node.op_type, block.renamed(node.name, index), attributes, outputs, inputs


def _alike(one: ir.Value, other: ir.Value) -> bool:
    """Tell whether two values of two layers have the same type and shape, and are equal where they are constants."""
    if (str(one.type), str(one.shape), one.is_initializer()) != (
        str(other.type),
        str(other.shape),
        other.is_initializer(),
    ):
        return False
    mine = one.const_value
    theirs = other.const_value
    if mine is None or theirs is None or isinstance(mine, ir.ExternalTensor) or isinstance(theirs, ir.ExternalTensor):
        return type(mine) is type(theirs) and (mine is None or theirs is None or mine.dtype == theirs.dtype)
    return (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def _leaving(block: Block) -> str:
    """The name of the only value of `block` that is read outside it."""
    inside = set(block.nodes)
    leaving = [
        value.name or ""
        for node in block.nodes
        for value in node.outputs
        if any(usage.node not in inside for usage in value.uses())
    ]
    if len(leaving) != 1:
        raise NotAlikeError(f"of layer {block.index}, {len(leaving)} values are read by others")
    return leaving[0]


def _replace(model: ir.Model, marker: ir.Node, pattern: LayerPattern, index: int, place: Place) -> None:
    """Put layer `index`, a copy of its pattern, in the place of `marker`."""
    block = pattern.block
    made: dict[str, ir.Value] = {}

    def read(value: ir.Value | None) -> ir.Value | None:
        name = block.renamed(value.name, index) if value is not None else None
        if value is None or name is None:
            return value
        if name in made:
            return made[name]
        return made.setdefault(name, _counterpart(model, value, name, place))

    for at, node in enumerate(block.nodes):
        inputs = [
            marker.inputs[0] if (at, number) in pattern.entering else read(value)
            for number, value in enumerate(node.inputs)
        ]
        outputs = [like(value, block.renamed(value.name, index)) for value in node.outputs]
        name = block.renamed(node.name, index)
        attributes = [*node.attributes.values()]
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name)
        model.graph.insert_before(marker, copy)
        made |= {value.name or "": value for value in outputs}
        pairs = zip(outputs, node.outputs, strict=True)
        model.graph.outputs.extend(mine for mine, theirs in pairs if theirs.is_graph_output())
    marker.outputs[0].replace_all_uses_with(made[block.renamed(pattern.leaving, index) or ""])
    model.graph.remove(marker, safe=True)


def like(value: ir.Value, name: str | None) -> ir.Value:
    """Make a value of the type and shape of another, with another name."""
    return ir.Value(name=name, shape=None if value.shape is None else ir.Shape([*value.shape]), type=value.type)


def _counterpart(model: ir.Model, value: ir.Value, name: str, place: Place) -> ir.Value:
    """Make the input or stored tensor `name` of a layer that corresponds to `value` of another layer."""
    counterpart = like(value, name)
    if value.is_graph_input():
        model.graph.inputs.append(counterpart)
    else:
        assert value.const_value is not None, f"{value.name} is neither made nor stored"
        counterpart.const_value = place(name, value.const_value)
        model.graph.register_initializer(counterpart)
    return counterpart


def order_interface(model: ir.Model) -> None:
    """Sort the inputs and outputs of the cache by layer."""
    for values in (model.graph.inputs, model.graph.outputs):
        ordered = sorted(values, key=_place_in_interface)
        values.clear()
        values.extend(ordered)


def _place_in_interface(value: ir.Value) -> tuple[int, str]:
    match = _CACHE.fullmatch(value.name or "")
    if match:
        return (int(match[2]), match[3])
    return (-1, "")
