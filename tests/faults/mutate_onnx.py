"""Mutations of an ONNX file: any field of any message, and the structures that a walk over a graph can trip on."""

import random
from typing import Any

import onnx
from mutate_bytes import mutate_bytes
from onnx import TensorProto, helper

STRINGS = (
    "", "x", "logits", "input_ids", "\x1b[2K\x1b[1A", "../secret", "/dev/zero", "/etc/passwd", "pipe", "long" * 5000,
    "model.safetensors", "a\nb\rc", "com.microsoft", "MatMul", "DequantizeLinear", "Transpose", "ai.onnx", "..", ".",
    "\u202e", "sub/../../secret", "0", "-1", "99999999999999999999", "nan",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 5, 23, 1000, 2**31 - 1, 2**40, 2**62, -(2**63), 10**9)
REPEATED = ("delete", "twice", "swap", "clear")


def mutate_onnx(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A description, and the model with one mutation."""
    if draw.random() < 0.15:
        return mutate_bytes(draw, content)
    model = onnx.ModelProto.FromString(content)
    if draw.random() < 0.3:
        return structure(draw, model)
    for _ in range(20):
        if what := field(draw, model):
            return what, model.SerializeToString()
    return mutate_bytes(draw, content)


def field(draw: random.Random, model: onnx.ModelProto) -> str:
    """Change one field of a message that a random descent ends at; what was done, empty where nothing was."""
    message: Any = model
    path = ""
    while True:
        fields = [(descriptor, value) for descriptor, value in message.ListFields()]
        if not fields:
            return ""
        descriptor, value = draw.choice(fields)
        path += f".{descriptor.name}"
        repeated = hasattr(value, "extend")
        if descriptor.message_type is None:
            return change_scalar(draw, message, descriptor, repeated, path)
        if repeated and draw.random() < 0.2:
            return change_repeated(draw, value, path)
        if not repeated and draw.random() < 0.05:
            message.ClearField(descriptor.name)
            return f"{path} gone"
        if repeated:
            at = draw.randrange(len(value))
            message, path = value[at], f"{path}[{at}]"
        else:
            message = value


def change_repeated(draw: random.Random, values: Any, path: str) -> str:
    """Take away, repeat or exchange messages."""
    kind, at = draw.choice(REPEATED), draw.randrange(len(values))
    if kind == "delete":
        del values[at]
    elif kind == "twice":
        values.add().CopyFrom(values[at])
    elif kind == "clear":
        del values[:]
    else:
        other = draw.randrange(len(values))
        kept = type(values[at]).FromString(values[at].SerializeToString())
        values[at].CopyFrom(values[other])
        values[other].CopyFrom(kept)
    return f"{path}[{at}] {kind}"


def change_scalar(draw: random.Random, message: Any, descriptor: Any, repeated: bool, path: str) -> str:
    """Another value of the field's type."""
    old = getattr(message, descriptor.name)
    example = old[0] if repeated else old
    value: object
    if isinstance(example, str):
        value = draw.choice([*STRINGS, example + "x", example[::-1]])
    elif isinstance(example, bytes):
        value = draw.choice([b"", b"\xff", example[:-1], example * 2, draw.choice(STRINGS).encode()])
    elif isinstance(example, float):
        value = draw.choice([0.0, -1.0, float("nan"), float("inf"), 1e38, -example])
    else:
        value = draw.choice(NUMBERS)
    try:
        if not repeated:
            setattr(message, descriptor.name, value)
        elif draw.random() < 0.5:
            old[draw.randrange(len(old))] = value
        elif draw.random() < 0.5:
            old.append(value)
        else:
            message.ClearField(descriptor.name)
    except ValueError:  # out of the range of an int32 field
        return ""
    return f"{path} {str(value)[:40]!r}"


def structure(draw: random.Random, model: onnx.ModelProto) -> tuple[str, bytes]:
    """A cycle, a chain, a pile of graphs, external data in odd places."""
    graph = model.graph
    kind = draw.choice(["cycle", "chain", "fan", "nested", "external", "external", "two outputs", "unsorted", "types"])
    if kind == "cycle":
        first, last = graph.node[draw.randrange(len(graph.node))], graph.node[draw.randrange(len(graph.node))]
        first.input.append(last.output[0])
    elif kind == "chain":
        length, before = draw.choice([100, 3000]), graph.node[-1].output[0]
        for index in range(length):
            graph.node.append(helper.make_node(draw.choice(CHAINED), [before], [f"c{index}"], f"chain{index}"))
            before = f"c{index}"
    elif kind == "fan":
        for index in range(2000):
            graph.node.append(helper.make_node("MatMul", ["logits", "logits"], [f"f{index}"], "fan"))
    elif kind == "nested":
        inner = helper.make_graph([], "inner", [], [])
        for _ in range(draw.choice([5, 28])):
            node = helper.make_node("If", ["c"], ["o"], then_branch=inner, else_branch=inner if _ < 3 else None)
            inner = helper.make_graph([node], "inner", [], [])
        graph.node.extend(inner.node)
    elif kind == "external":
        place_data(draw, model)
    elif kind == "two outputs":
        graph.node[-1].output[0] = graph.node[0].output[0]
    elif kind == "unsorted":
        nodes = list(graph.node)
        draw.shuffle(nodes)
        del graph.node[:]
        graph.node.extend(nodes)
    else:
        for tensor in graph.initializer[: draw.choice([1, 100])]:
            tensor.data_type = draw.choice([0, 1, 2, 7, 10, 16, 17, 99])
    try:
        return kind, model.SerializeToString()
    except ValueError:
        return "empty", b""


CHAINED = ("Transpose", "Identity", "Cast", "DequantizeLinear")


def place_data(draw: random.Random, model: onnx.ModelProto) -> None:
    """External data of one tensor at a place, an offset or a length that are not theirs."""
    tensor = draw.choice(list(model.graph.initializer))
    tensor.data_location = TensorProto.EXTERNAL
    entries = {entry.key: entry for entry in tensor.external_data}
    key = draw.choice(["location", "location", "offset", "length", "checksum"])
    value = draw.choice(STRINGS) if key in ("location", "checksum") else str(draw.choice([*NUMBERS, "x", "", "1e3"]))
    if key in entries:
        entries[key].value = value
    else:
        tensor.external_data.add(key=key, value=value)
