"""Layers made from one of their kind: which are of a kind, what ends the attempt, and what the copies look like.

That the whole graph is byte for byte the one of a full trace is in tests/pipeline/test_stamped.py, for every
architecture.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from fp8q.export.graph.layer_copies import blocks_of, stamp
from fp8q.export.modules.graph_model import GraphPlan, prepare_graph
from fp8q.export.modules.layer_kinds import Kind, NotAlikeError, kinds_of, layer_prefix, skip
from fp8q.export.modules.operators import SKIPPED

SLIDING, FULL = "sliding_attention", "full_attention"


class ToyAttention(nn.Module):
    """What writes layer `layer_idx` of a cache that nobody reads."""

    def __init__(self, index: int, look: bool):
        super().__init__()
        self.layer_idx, self.look = index, look
        self.proj = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.look and self.layer_idx == 3:
            return x
        y: torch.Tensor = self.proj(x)
        return y


class ToyLayer(nn.Module):
    """A layer that adds its attention's output."""

    def __init__(self, index: int, look: bool):
        super().__init__()
        self.attn = ToyAttention(index, look)

    def forward(self, x: torch.Tensor, shift: object, pair: bool) -> Any:
        y = x + self.attn(x)
        return (y, x) if pair else y


class Toy(nn.Module):
    """Five layers, alike but for what they are handed (`shifts`); the model may read layer 3's attention itself."""

    def __init__(
        self, look: bool = False, shifts: tuple[float, ...] = (0.0,) * 5, pair: bool = False, reads: bool = False
    ):
        super().__init__()
        self.layers = nn.ModuleList([ToyLayer(index, look) for index in range(5)])
        self.shifts, self.pair, self.reads = shifts, pair, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads:
            x = x + self.get_parameter("layers.3.attn.proj.weight")[0]
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            y = layer(x, shift, self.pair)
            x = y[0] if self.pair else y
        return x


def qwen(types: list[str]) -> PreTrainedConfig:
    """Qwen3 with a layer of each of `types`."""
    return Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=len(types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=types,
    )


def kinds(config: PreTrainedConfig, change: Callable[[nn.Module], None] = lambda model: None) -> list[tuple[int, ...]]:
    """The layers of a model by kind, as `prepare_graph` left it and `change` changed it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    first = "model.layers.0.mlp.gate_proj"
    prepare_graph(model, GraphPlan({first: [first]} if config.num_hidden_layers == 4 else {}, (), torch.bfloat16))
    change(model)
    return [kind.members for kind in kinds_of(model, "model.layers.", {}, {})]


def test_layers_are_of_a_kind_by_their_attention() -> None:
    assert kinds(qwen([SLIDING, SLIDING, FULL, SLIDING, FULL])) == [(0, 1, 3), (2, 4)]


def test_a_layer_with_other_products_in_fp8_is_of_another_kind() -> None:
    assert kinds(qwen([FULL] * 4)) == [(0,), (1, 2, 3)]


def test_an_attribute_a_shape_or_a_class_makes_another_kind() -> None:
    def change(model: nn.Module) -> None:
        layers: Any = model.get_submodule("model.layers")
        layers[0].self_attn.scaling = 0.5
        layers[1].mlp.up_proj.weight = nn.Parameter(torch.empty(31, 32, device="meta"))
        layers[2].mlp.act_fn = nn.GELU()

    assert kinds(qwen([FULL] * 5), change) == [(0,), (1,), (2,), (3, 4)]


def test_a_tensor_stored_in_another_type_or_a_buffer_of_another_value_makes_another_kind() -> None:
    toy = Toy()
    for layer in toy.layers:
        layer.register_buffer("inv_freq", torch.zeros(1), persistent=False)
    stored = {f"layers.{index}.attn.proj.weight": ir.DataType.BFLOAT16 for index in range(5)}
    stored["layers.2.attn.proj.weight"] = ir.DataType.FLOAT
    computed = {f"layers.{index}.inv_freq": ir.tensor([float(index == 1)]) for index in range(5)}
    assert [kind.members for kind in kinds_of(toy, "layers.", stored, computed)] == [(0, 3, 4), (1,), (2,)]


def test_a_function_with_arguments_is_told_by_both() -> None:
    """As Gemma's activation, a `partial` in each layer."""
    toy = Toy()
    for index, layer in enumerate(toy.layers):
        act: Any = layer
        act.act = partial(nn.functional.gelu, approximate="none" if index == 3 else "tanh")
        act.step = act.attn.forward
    assert [kind.members for kind in kinds_of(toy, "layers.", {}, {})] == [(0, 1, 2, 4), (3,)]


def test_first_second_and_last_of_a_kind_are_traced() -> None:
    found = [(kind.traced, kind.skipped) for kind in (Kind((0, 2, 5)), Kind((1, 3, 4, 6, 7)), Kind((8,)))]
    assert found == [((0, 2, 5), ()), ((1, 3, 7), (4, 6)), ((8,), ())]


def test_layers_that_are_no_list_have_no_prefix() -> None:
    toy = Toy()
    assert layer_prefix(toy) == "layers."
    attention: Any = toy.layers[1]
    attention.attn.layer_idx = 7
    assert layer_prefix(toy) is None


def test_a_skipped_layer_hands_on_what_it_gets() -> None:
    toy, x = Toy(), torch.ones(1, 2)
    kind = kinds_of(toy, layer_prefix(toy) or "", {}, {})
    assert [each.members for each in kind] == [(0, 1, 2, 3, 4)]
    expected = x
    for index in (0, 1, 4):
        expected = toy.layers[index](expected, 0.0, False)
    skip(toy, "layers.", kind)
    torch.testing.assert_close(toy(x), expected, rtol=0, atol=0)
    assert [len([*layer.parameters()]) for layer in toy.layers] == [2, 2, 0, 0, 2]


@pytest.mark.parametrize(
    ("toy", "reason"),
    [
        (Toy(look=True), "layer 0 compares its index"),
        (Toy(shifts=(0.0, 0.0, 0.0, 1.0, 0.0)), "layer 3 is handed something else than its kind"),
        (Toy(pair=True), "layer 2 gives back more than its hidden states"),
        (Toy(reads=True), "a layer that is not traced is asked for `attn`, which it has no longer"),
    ],
    ids=["index", "argument", "output", "attribute"],
)
def test_what_a_layer_does_ends_the_attempt(toy: Toy, reason: str) -> None:
    skip(toy, "layers.", kinds_of(toy, "layers.", {}, {}))
    with pytest.raises(NotAlikeError, match=re.escape(reason)):
        toy(torch.ones(1, 2))


def test_a_skipped_layer_lacks_an_attribute_that_it_never_had_as_any_module_does() -> None:
    toy = Toy()
    skip(toy, "layers.", kinds_of(toy, "layers.", {}, {}))
    assert isinstance(toy.layers[2], ToyLayer)
    assert not hasattr(toy.layers[2], "norm")
    with pytest.raises(AttributeError, match=r"^'ToyLayer' object has no attribute 'norm'$"):
        _ = toy.layers[2].norm


def small_graph(scales: tuple[float, float, float] = (1.0, 2.0, 2.0), between: bool = False) -> ir.Model:
    """Layers 0, 1 and 4 of five, each x -> x * (its own scale) + past; two nodes stand for 2 and 3.

    The scales of layers are constants of the graph. `between`: a node of no layer before the last.
    """
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes, inputs, constants, value = [], [x], [], x
    for index, scale in zip((0, 1, 4), scales, strict=True):
        prefix = f"layers.{index}."
        constant = ir.Value(name=f"{prefix}Mul_1.constant_1", const_value=ir.tensor([scale]))
        past = ir.Value(name=f"past_key_values.{index}.key", shape=x.shape, type=x.type)
        inputs.append(past)
        constants.append(constant)
        mul = ir.node("Mul", [value, constant], name=f"{prefix}Mul_1")
        add = ir.node("Add", [mul.outputs[0], past], name=f"{prefix}Add_1")
        nodes += [mul, add]
        value = add.outputs[0]
        if index == 1:
            for skipped in (2, 3):
                domain, name = SKIPPED
                nodes.append(ir.node(name, [value], {"index": skipped}, domain=domain, name=f"Layer_{skipped}"))
                value = nodes[-1].outputs[0]
            if between:
                nodes.append(ir.node("Relu", [value], name="Relu_1"))
                value = nodes[-1].outputs[0]
    tail = ir.node("Relu", [value], name="Relu_2")
    for node in [*nodes, tail]:
        for output in node.outputs:
            output.name = f"{node.name}.output"
    graph = ir.Graph(
        inputs, tail.outputs, nodes=[*nodes, tail], initializers=constants, opset_imports={"": 23, SKIPPED[0]: 1}
    )
    return ir.Model(graph, ir_version=11)


ALL = [Kind((0, 1, 2, 3, 4))]


def test_a_copy_differs_in_the_index_alone() -> None:
    model = small_graph()
    stamp(model, "layers.", ALL, lambda name, tensor: ir.tensor(tensor.numpy(), name=name))
    rows = [(node.name, [value.name if value else None for value in node.inputs]) for node in model.graph]
    assert rows[4:8] == [
        ("layers.2.Mul_1", ["layers.1.Add_1.output", "layers.2.Mul_1.constant_1"]),
        ("layers.2.Add_1", ["layers.2.Mul_1.output", "past_key_values.2.key"]),
        ("layers.3.Mul_1", ["layers.2.Add_1.output", "layers.3.Mul_1.constant_1"]),
        ("layers.3.Add_1", ["layers.3.Mul_1.output", "past_key_values.3.key"]),
    ]
    assert rows[8] == ("layers.4.Mul_1", ["layers.3.Add_1.output", "layers.4.Mul_1.constant_1"])
    assert [value.name for value in model.graph.inputs] == ["x", *(f"past_key_values.{n}.key" for n in range(5))]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (small_graph(scales=(1.0, 2.0, 3.0)), "layers.1.Mul_1 and layers.4.Mul_1 read different values"),
        (small_graph(between=True), "Relu_1 lies between the layers"),
    ],
    ids=["a constant of its own", "a node between"],
)
def test_a_graph_that_is_no_row_of_like_layers_is_refused(model: ir.Model, reason: str) -> None:
    with pytest.raises(NotAlikeError, match=re.escape(reason)):
        stamp(model, "layers.", ALL, lambda name, tensor: tensor)


def test_a_value_that_jumps_over_a_layer_is_refused() -> None:
    model = small_graph()
    jump = ir.node("Add", [blocks_of(model, "layers.")[1].nodes[0].outputs[0], model.graph.inputs[0]], name="Add_9")
    model.graph.append(jump)
    with pytest.raises(NotAlikeError, match=re.escape("of layer 1, 2 values are read by others")):
        stamp(model, "layers.", ALL, lambda name, tensor: tensor)
