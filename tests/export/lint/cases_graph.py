"""Rules F3xx, each broken in one way."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from .changes import AGAIN, DOWN, EXPORT, KEY, LAYER, Case, add_tensor, each, node, set_tensor, tensor, versions


def only(model: ModelProto, operator: str) -> NodeProto:
    found: NodeProto = next(node for node in model.graph.node if node.op_type == operator)
    return found


def value(model: ModelProto, name: str) -> Any:
    (found,) = [value for value in [*model.graph.input, *model.graph.output] if value.name == name]
    return found.type.tensor_type


def unname(*operators: str) -> Callable[[ModelProto], None]:
    """Take the name from the first node of each operator."""

    def change(model: ModelProto) -> None:
        for operator in operators:
            only(model, operator).name = ""

    return change


def branch(model: ModelProto) -> None:
    """An If both of whose branches make `same`."""
    bodies = [
        helper.make_graph(
            [helper.make_node("Identity", ["logits"], ["same"], name)], name, [], [onnx.ValueInfoProto(name="same")]
        )
        for name in ("one", "two")
    ]
    add_tensor(model, "yes", np.array(True))
    model.graph.node.append(
        helper.make_node("If", ["yes"], ["either"], name="branch", then_branch=bodies[0], else_branch=bodies[1])
    )


def late(model: ModelProto) -> None:
    """Move what makes the input of the last GEMM to the end."""
    gated = node(model, f"{DOWN}.input.quantize").input[0]
    maker = next(entry for entry in model.graph.node if gated in entry.output)
    model.graph.node.append(maker)
    model.graph.node.remove(maker)


def rename(name: str, other: str) -> Callable[[ModelProto], None]:
    return lambda model: setattr(node(model, name), "name", other)


def rename_value(name: str, other: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        for entry in [*model.graph.input, *model.graph.output]:
            entry.name = other if entry.name == name else entry.name
        for entry in model.graph.node:
            entry.input[:] = [other if text == name else text for text in entry.input]
            entry.output[:] = [other if text == name else text for text in entry.output]

    return change


def set_dimension(name: str, axis: int, size: int | str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        dimension = value(model, name).shape.dim[axis]
        dimension.Clear()
        if isinstance(size, int):
            dimension.dim_value = size
        else:
            dimension.dim_param = size

    return change


def set_dimensions(name: str, *sizes: int | str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        dimensions = value(model, name).shape.dim
        del dimensions[:]
        for size in sizes:
            dimensions.add(**{"dim_value" if isinstance(size, int) else "dim_param": size})

    return change


CASES = [
    Case(
        "F316",
        (
            (
                "opset 24 is newer than 23, the last that ONNX Runtime and TensorRT-RTX both run in FP8; export with "
                "opset 23"
            ),
        ),
        versions(24, 12),
    ),
    Case(
        "F301",
        ("opset 25 is newer than 24, the last that TensorRT-RTX was seen to build in FP8; export with opset 23",),
        versions(25, 13),
    ),
    Case("F302", ("IR version 10 is older than opset 23, which came with 11; write IR version 11",), versions(23, 10)),
    Case(
        "F302",
        (
            (
                f"IR version 99 is newer than {onnx.IR_VERSION}, the newest that onnx {onnx.__version__} knows; write "
                "IR "
                "version 11"
            ),
        ),
        versions(23, 99),
    ),
    Case(
        "F303",
        ("node_Softplus: com.example.Softplus is no standard operator; express it in standard ones",),
        lambda model: model.graph.node.append(
            helper.make_node("Softplus", ["logits"], ["soft"], name="node_Softplus", domain="com.example")
        ),
    ),
    Case(
        "F303",
        ("node_Swoosh: Swoosh is no operator of opset 23; express it in standard ones",),
        lambda model: model.graph.node.append(helper.make_node("Swoosh", ["logits"], ["whoosh"], name="node_Swoosh")),
    ),
    Case(
        "F303",
        ("defines the function local.Twice; inline it",),
        lambda model: model.functions.append(
            helper.make_function(
                "local",
                "Twice",
                ["x"],
                ["y"],
                [helper.make_node("Add", ["x", "x"], ["y"])],
                [helper.make_opsetid("", 23)],
            )
        ),
    ),
    Case(
        "F304",
        ("lm_head.matmul: 2 nodes bear this name; give each its own",),
        lambda model: setattr(only(model, "Gather"), "name", "lm_head.matmul"),
        foreign=True,
    ),
    Case(
        "F305",
        (
            (
                f"{LAYER}.input_layernorm.bias_add: bears the name of a bias, and does not add to "
                f"{LAYER}.input_layernorm.matmul; rename it"
            ),
        ),
        lambda model: setattr(only(model, "Add"), "name", f"{LAYER}.input_layernorm.bias_add"),
    ),
    Case(
        "F305",
        (f"{LAYER}.mlp.act.matmul: bears a GEMM's name and is Sigmoid; rename it",),
        lambda model: setattr(only(model, "Sigmoid"), "name", f"{LAYER}.mlp.act.matmul"),
    ),
    Case(
        "F305",
        (f"dq: dequantizes the weight of {DOWN}; name it {DOWN}.weight.dequantize",),
        rename(f"{DOWN}.weight.dequantize", "dq"),
    ),
    Case(
        "F305",
        (f"dq: dequantizes the input of {DOWN}; name it after the first module that reads it",),
        rename(f"{DOWN}.input.dequantize", "dq"),
    ),
    Case(
        "F305",
        (f"q: quantizes the input of {DOWN}; name it {DOWN}.input.quantize",),
        rename(f"{DOWN}.input.quantize", "q"),
    ),
    Case(
        "F306",
        (f"there is no input position_ids; {AGAIN}", f"positions is no input or output of the contract; {AGAIN}"),
        rename_value("position_ids", "positions"),
    ),
    Case(
        "F306",
        ("the input input_ids is INT32; make it INT64",),
        lambda model: setattr(value(model, "input_ids"), "elem_type", TensorProto.INT32),
    ),
    Case(
        "F306",
        (
            f"there is no output new_key_values.0.value; {AGAIN}",
            f"present.0.value is no input or output of the contract; {AGAIN}",
        ),
        rename_value("new_key_values.0.value", "present.0.value"),
    ),
    Case(
        "F306",
        (
            (
                "the output new_key_values.0.key is BFLOAT16 and the input past_key_values.0.key is FLOAT8E4M3FN; the "
                "new "
                "ones become the past, make them one type"
            ),
        ),
        lambda model: setattr(value(model, "new_key_values.0.key"), "elem_type", TensorProto.BFLOAT16),
    ),
    Case(
        "F306",
        (f"there is no output logits; {AGAIN}", f"scores is no input or output of the contract; {AGAIN}"),
        rename_value("logits", "scores"),
    ),
    Case(
        "F318",
        tuple(
            f"{KEY}.{node}: scales are 0.5, 0.25, and scales.json has 0.5, 0.125; {AGAIN}"
            for node in ("quantize", "dequantize", "dequantize_past")
        ),
        set_tensor(f"{KEY}_scale", np.array([0.5, 0.25], np.float32)),
        cache={KEY: np.array([0.5, 0.125], np.float32).reshape(2, 1, 1)},
    ),
    Case(
        "F318",
        tuple(
            f"{KEY}.{node}: scales are 0.01953125, and scales.json has 0.5, 0.5; {AGAIN}"
            for node in ("quantize", "dequantize", "dequantize_past")
        ),
        cache={KEY: np.full((2, 1, 1), 0.5, np.float32)},
    ),
    Case(
        "F319",
        (
            (
                "past_key_values.0.key is [batch, heads, capacity, size], and each decode step copies the whole cache; "
                "run `fp8q export` again for one in blocks, which a step reads once"
            ),
        ),
        each(*(set_dimensions(f"past_key_values.0.{part}", "batch", 2, "capacity", 64) for part in ("key", "value"))),
    ),
    Case("F307", ("input_ids is [1, seq]; give it the contract's [batch, seq]",), set_dimension("input_ids", 0, 1)),
    Case(
        "F307",
        ("attention_mask is [batch, total]; give it the contract's [batch, capacity + seq]",),
        set_dimension("attention_mask", 1, "total"),
    ),
    Case(
        "F307",
        (("past_key_values.0.key is [2*batch*blocks, heads, 64]; give it the contract's [2*batch*blocks, 64, size]"),),
        set_dimension("past_key_values.0.key", 1, "heads"),
    ),
    Case(
        "F308",
        (
            (
                "the output new_key_values.0.key has the past in it (its length is capacity + seq); give out the new "
                "ones "
                "alone"
            ),
        ),
        set_dimension("new_key_values.0.key", 2, "capacity + seq"),
    ),
    Case("F309", ("nodes have no name (2 of 79); name them",), unname("Gather", "Squeeze")),
    Case(
        "F310",
        ("imports the domain com.example and uses nothing of it; drop the import",),
        lambda model: model.opset_import.append(helper.make_opsetid("com.example", 1)),
    ),
    Case(
        "F311",
        ("the input input_ids has a dynamic dimension without a name (axis 1); name it, such as batch or seq",),
        set_dimension("input_ids", 1, ""),
        foreign=True,
    ),
    Case(
        "F311",
        ("the input input_ids has no shape; state its rank, and name its dynamic dimensions",),
        lambda model: value(model, "input_ids").ClearField("shape"),
        foreign=True,
    ),
    Case("F312", ("branch: If has a body, which is not checked; give each value in it a name of its own",), branch),
    Case(
        "F313",
        (f"{DOWN}.input.quantize: reads nowhere, which nothing makes; {EXPORT}",),
        lambda model: node(model, f"{DOWN}.input.quantize").input.__setitem__(0, "nowhere"),
    ),
    Case("F313", (f"{DOWN}.input.quantize: reads {{gated}}, which is made only later; {EXPORT}",), late),
    Case(
        "F313",
        (f"nothing makes the output elsewhere; {EXPORT}",),
        lambda model: setattr(model.graph.output.add(), "name", "elsewhere"),
        foreign=True,
    ),
    Case(
        "F314",
        (f"{DOWN}.matmul: MatMul has 1 inputs and takes 2 at least; {EXPORT}",),
        lambda model: node(model, f"{DOWN}.matmul").input.pop(),
    ),
    Case(
        "F315",
        (f"{DOWN}.weight_scale is made 2 times; {EXPORT}",),
        lambda model: model.graph.initializer.append(tensor(model, f"{DOWN}.weight_scale")),
    ),
    Case(
        "F315",
        (f"logits is made 2 times; {EXPORT}",),
        lambda model: model.graph.node.append(helper.make_node("Identity", ["input_ids"], ["logits"], name="again")),
    ),
    Case(
        "F317",
        (
            (
                f"{DOWN}.input.quantize: scale {DOWN}.input_scale is an input too, which may replace it; take it off "
                "the "
                "graph's inputs"
            ),
        ),
        lambda model: model.graph.input.append(
            helper.make_tensor_value_info(f"{DOWN}.input_scale", TensorProto.FLOAT, [])
        ),
    ),
]
