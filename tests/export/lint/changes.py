"""Ways to change a good graph, for the cases of the rules' files; and what a case is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from fp8q.options import Form

Decoders = Callable[..., Any]
Edit = Callable[[Path, Callable[[ModelProto], None]], None]
LAYER = "model.layers.0"
Q, GATE, UP, DOWN = (
    f"{LAYER}.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
)
KEY = f"{LAYER}.self_attn.k"
AGAIN = "run `fp8q export` again"
EXPORT = "export the graph again"


@dataclass(frozen=True)
class Case:
    """One way to break a rule. `foreign`: without a promise; `expected`: another promise than the graph's own."""

    rule: str
    expected: tuple[str, ...]
    change: Callable[[ModelProto], None] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    foreign: bool = False
    promised: dict[str, float | None] | None = None
    weight_scales: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, tuple[float, float]] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)


def node(model: ModelProto, name: str) -> NodeProto:
    found: NodeProto = next(node for node in model.graph.node if node.name == name)
    return found


def tensor(model: ModelProto, name: str) -> TensorProto:
    found: TensorProto = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return found


def set_attribute(name: str, attribute: str, number: int) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        next(entry for entry in node(model, name).attribute if entry.name == attribute).i = number

    return change


def each(*changes: Callable[[ModelProto], None]) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        for one in changes:
            one(model)

    return change


def versions(opset: int, ir_version: int) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        model.opset_import[0].version, model.ir_version = opset, ir_version

    return change


def set_tensor(name: str, values: Any) -> Callable[[ModelProto], None]:
    """Put other numbers in the place of a tensor, inside the ONNX file."""
    return lambda model: tensor(model, name).CopyFrom(numpy_helper.from_array(np.asarray(values), name))


def add_tensor(model: ModelProto, name: str, values: Any) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    return name


def insert(model: ModelProto, reader: str, index: int, *made: NodeProto) -> None:
    """Put nodes before `reader`, the last of which makes its input `index`."""
    nodes = list(model.graph.node)
    at = next(i for i, entry in enumerate(nodes) if entry.name == reader)
    nodes[at].input[index] = made[-1].output[0]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *made, *nodes[at:]])


def zero_point(values: Any) -> Callable[[ModelProto], None]:
    return lambda model: node(model, f"{DOWN}.input.quantize").input.append(add_tensor(model, "zero", values))


def set_place(name: str, **entries: object) -> Callable[[ModelProto], None]:
    """Change where a tensor's data are said to lie."""

    def change(model: ModelProto) -> None:
        for entry in tensor(model, name).external_data:
            entry.value = str(entries.get(entry.key, entry.value))

    return change
