"""Every rule of the lint, broken in one way on a good graph, and found under its number and with its words."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from fp8q.errors import InputError
from fp8q.export.lint.check import RULES, Finding, lint

Decoders = Callable[..., Any]
Edit = Callable[[Path, Callable[[ModelProto], None]], None]
LAYER = "model.layers.0"
Q, UP, DOWN = (f"{LAYER}.{name}" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"))
KEY = f"{LAYER}.self_attn.k"
AGAIN = "run `fp8q export` again"
EXPORT = "export the graph again"


# Good graphs.

GOOD: list[dict[str, Any]] = [
    {},
    {"layers": 2},
    {"fp8_cache": False},
    {"bias": True},
    {"transposed": False},
    {"per_channel": False},
    {"compute": TensorProto.FLOAT},
    {"compute": TensorProto.FLOAT16},
    {"plain_attention": True, "key_value_heads": 4},
    {"wide": (Q, DOWN)},
]


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_a_good_graph_has_no_findings(decoder: Decoders, options: dict[str, Any]) -> None:
    written = decoder(**options)
    onnx.checker.check_model(written.path, full_check=True)
    assert lint(written.path, written.input_scales, written.weight_scales) == []
    assert lint(written.path, dict.fromkeys(written.modules)) == []
    assert lint(written.path) == []


# Broken graphs.


def node(model: ModelProto, name: str) -> NodeProto:
    found: NodeProto = next(node for node in model.graph.node if node.name == name)
    return found


def only(model: ModelProto, operator: str) -> NodeProto:
    found: NodeProto = next(node for node in model.graph.node if node.op_type == operator)
    return found


def tensor(model: ModelProto, name: str) -> TensorProto:
    found: TensorProto = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return found


def value(model: ModelProto, name: str) -> Any:
    (found,) = [value for value in [*model.graph.input, *model.graph.output] if value.name == name]
    return found.type.tensor_type


def set_attribute(name: str, attribute: str, number: int) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        next(entry for entry in node(model, name).attribute if entry.name == attribute).i = number

    return change


def drop_attribute(name: str, attribute: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        kept = [entry for entry in node(model, name).attribute if entry.name != attribute]
        del node(model, name).attribute[:]
        node(model, name).attribute.extend(kept)

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


def unname(*operators: str) -> Callable[[ModelProto], None]:
    """Take the name from the first node of each operator."""

    def change(model: ModelProto) -> None:
        for operator in operators:
            only(model, operator).name = ""

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


def computed_scale(model: ModelProto) -> None:
    insert(model, f"{DOWN}.input.quantize", 1, helper.make_node("Abs", [f"{DOWN}.input_scale"], ["scale"], name="abs"))


def second_quantizer(model: ModelProto) -> None:
    first = node(model, f"{DOWN}.input.quantize")
    add_tensor(model, "same_scale", np.float32(0.01953125))
    model.graph.node.append(
        helper.make_node(
            "QuantizeLinear",
            [first.input[0], "same_scale"],
            ["again"],
            name="again",
            output_dtype=TensorProto.FLOAT8E4M3FN,
        )
    )


def concatenated_codes(model: ModelProto) -> None:
    concat = next(
        node for node in model.graph.node if node.op_type == "Concat" and f"{KEY}.dequantize_past_output" in node.input
    )
    output, concat.output[0] = concat.output[0], "codes"
    concat.input[:] = ["past_key_values.0.key", "new_key_values.0.key"]
    dequantize = helper.make_node(
        "DequantizeLinear", ["codes", f"{KEY}_scale"], [output], name="after", output_dtype=TensorProto.BFLOAT16
    )
    insert(model, f"{LAYER}.self_attn.attention", 1, dequantize)


def scattered_codes(model: ModelProto) -> None:
    add_tensor(model, "where", np.zeros(1, np.int64))
    scatter = helper.make_node(
        "TensorScatter", ["past_key_values.0.key", "new_key_values.0.key", "where"], ["codes"], name="scatter"
    )
    insert(model, f"{KEY}.dequantize", 0, scatter)
    versions(24, 12)(model)


def dequantized_codes(model: ModelProto) -> None:
    pair = [f"{DOWN}.input.dequantize_output", f"{DOWN}.input_scale"]
    model.graph.node.append(
        helper.make_node("QuantizeLinear", pair, ["again"], name="again", output_dtype=TensorProto.FLOAT8E4M3FN)
    )


def relu_of_codes(model: ModelProto) -> None:
    model.graph.node.append(
        helper.make_node("Relu", [node(model, f"{DOWN}.input.quantize").output[0]], ["relu"], name="relu")
    )


def quantized_query(model: ModelProto) -> None:
    attention = node(model, f"{LAYER}.self_attn.attention")
    quantize = helper.make_node(
        "QuantizeLinear",
        [attention.input[0], f"{KEY}_scale"],
        ["query_codes"],
        name="q",
        output_dtype=TensorProto.FLOAT8E4M3FN,
    )
    dequantize = helper.make_node(
        "DequantizeLinear", ["query_codes", f"{KEY}_scale"], ["query"], name="dq", output_dtype=TensorProto.BFLOAT16
    )
    insert(model, attention.name, 0, quantize, dequantize)


def cast_between(model: ModelProto) -> None:
    insert(
        model,
        f"{DOWN}.matmul",
        0,
        helper.make_node("Cast", [f"{DOWN}.input.dequantize_output"], ["cast"], name="cast", to=TensorProto.BFLOAT16),
    )


def scaled_weight(model: ModelProto) -> None:
    add_tensor(model, "two", np.array(2, ml_dtypes.bfloat16))
    transpose = node(model, f"{DOWN}.matmul").input[1].removesuffix("_output")
    insert(
        model,
        transpose,
        0,
        helper.make_node("Mul", [f"{DOWN}.weight.dequantize_output", "two"], ["doubled"], name="double"),
    )


def between(operator: str, index: int, *constants: Any, joined: str = "") -> Callable[[ModelProto], None]:
    """Put an operator behind the DequantizeLinear of DOWN's input (0) or weight (1), with constants, or the
    DequantizeLinear `joined` too.
    """

    def change(model: ModelProto) -> None:
        others = (
            [f"{joined}_output"]
            if joined
            else [add_tensor(model, f"constant{i}", values) for i, values in enumerate(constants)]
        )
        reader = f"{DOWN}.matmul" if index == 0 else node(model, f"{DOWN}.matmul").input[1].removesuffix("_output")
        dequantized = node(model, reader).input[0]
        axis: dict[str, Any] = {"axis": 0} if operator == "Concat" else {}
        insert(model, reader, 0, helper.make_node(operator, [dequantized, *others], ["made"], name="between", **axis))

    return change


def wide_weight(model: ModelProto) -> None:
    made = helper.make_node(
        "Expand",
        [
            add_tensor(model, "one", np.ones((1, 1), ml_dtypes.bfloat16)),
            add_tensor(model, "sizes", np.array([256, 128])),
        ],
        ["w"],
        name="w",
    )
    insert(model, f"{DOWN}.matmul", 1, made)


def quantized_constant(model: ModelProto) -> None:
    add_tensor(model, "table", np.ones(2, np.float32))
    model.graph.node.append(
        helper.make_node(
            "QuantizeLinear",
            ["table", f"{KEY}_scale"],
            ["codes"],
            name="table.quantize",
            output_dtype=TensorProto.FLOAT8E4M3FN,
        )
    )


def integer_codes(model: ModelProto) -> None:
    add_tensor(model, "one", np.float32(1))
    dequantize = helper.make_node(
        "DequantizeLinear", [add_tensor(model, "int8", np.zeros((256, 128), np.int8)), "one"], ["wide"], name="integers"
    )
    insert(model, f"{DOWN}.matmul", 1, dequantize)


def branch(model: ModelProto) -> None:
    bodies = [
        helper.make_graph(
            [helper.make_node("Identity", ["logits"], [name])], name, [], [onnx.ValueInfoProto(name=name)]
        )
        for name in ("one", "two")
    ]
    add_tensor(model, "yes", np.array(True))
    model.graph.node.append(
        helper.make_node("If", ["yes"], ["either"], name="branch", then_branch=bodies[0], else_branch=bodies[1])
    )


def late(model: ModelProto) -> None:
    """Move what makes the input of the last product to the end."""
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


def set_place(name: str, **entries: object) -> Callable[[ModelProto], None]:
    """Change where a tensor's data are said to lie."""

    def change(model: ModelProto) -> None:
        for entry in tensor(model, name).external_data:
            entry.value = str(entries.get(entry.key, entry.value))

    return change


def move_place(name: str, by: int) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        entry = next(entry for entry in tensor(model, name).external_data if entry.key == "offset")
        entry.value = str(int(entry.value) + by)

    return change


def swap_places(model: ModelProto) -> None:
    """Let the keys' and the values' weights, alike in shape, point at each other's data."""
    one, other = (tensor(model, f"{LAYER}.self_attn.{part}_proj.weight") for part in "kv")
    kept = list(one.external_data)
    del one.external_data[:]
    one.external_data.extend(other.external_data)
    del other.external_data[:]
    other.external_data.extend(kept)


def start_of(name: str) -> Callable[[Path], int]:
    """Where in the safetensors file a tensor begins."""

    def read(path: Path) -> int:
        data = path.with_name("model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        return 8 + length + int(json.loads(data[8 : 8 + length])[name]["data_offsets"][0])

    return read


def other_pair_scale(model: ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("other", TensorProto.FLOAT, [], [0.25]))
    node(model, f"{DOWN}.input.dequantize").input[1] = "other"


def inline(data: bytes) -> Callable[[ModelProto], None]:
    """The scales of DOWN's weight inside the file, as `data`."""

    def change(model: ModelProto) -> None:
        stored = tensor(model, f"{DOWN}.weight_scale")
        stored.CopyFrom(TensorProto(name=stored.name, data_type=stored.data_type, dims=stored.dims, raw_data=data))

    return change


@dataclass(frozen=True)
class Case:
    """One way to break a rule. `foreign`: without a promise; `promised`: another promise than the graph's own."""

    rule: str
    expected: tuple[str, ...]
    change: Callable[[ModelProto], None] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    foreign: bool = False
    promised: dict[str, float | None] | None = None
    weight_scales: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, tuple[float, float]] = field(default_factory=dict)


CASES = [
    Case(
        "F101",
        (f"{DOWN}.weight: FP8 constant is read by Identity copy; let a DequantizeLinear alone read it",),
        lambda model: model.graph.node.append(
            helper.make_node("Identity", [f"{DOWN}.weight"], ["copied"], name="copy")
        ),
    ),
    Case(
        "F102",
        (
            f"{DOWN}.input.quantize: codes are FLOAT8E5M2; quantize to FLOAT8E4M3FN",
            f"{DOWN}.input.dequantize: codes are FLOAT8E5M2; quantize to FLOAT8E4M3FN",
        ),
        set_attribute(f"{DOWN}.input.quantize", "output_dtype", TensorProto.FLOAT8E5M2),
    ),
    Case(
        "F103",
        (f"{DOWN}.input.quantize: scale {DOWN}.input_scale is BFLOAT16; store it as FLOAT and state output_dtype",),
        set_tensor(f"{DOWN}.input_scale", np.array(0.01953125, ml_dtypes.bfloat16)),
    ),
    Case(
        "F103",
        (f"{DOWN}.weight.dequantize: scale {DOWN}.weight_scale is FLOAT16; store it as FLOAT and state output_dtype",),
        set_tensor(f"{DOWN}.weight_scale", np.full(128, 0.5, np.float16)),
    ),
    Case(
        "F104",
        (
            (
                f"{DOWN}.input.quantize: scale {DOWN}.input_scale holds 0 (1 of 1 are not positive and finite); leave "
                "the "
                "module in BF16 (`fp8q calibrate --skip`)"
            ),
        ),
        set_tensor(f"{DOWN}.input_scale", np.float32(0)),
        promised={DOWN: None, UP: None},
        foreign=True,
    ),
    Case(
        "F104",
        (
            (
                f"{DOWN}.weight.dequantize: scale {DOWN}.weight_scale holds nan (2 of 128 are not positive and "
                "finite); "
                "leave the module in BF16 (`fp8q calibrate --skip`)"
            ),
        ),
        set_tensor(f"{DOWN}.weight_scale", np.array([np.nan, np.inf, *[0.5] * 126], np.float32)),
    ),
    Case(
        "F104",
        (f"{DOWN}.input.quantize: scale scale is computed when the graph runs; quantize with a constant scale",),
        computed_scale,
    ),
    Case(
        "F105",
        (f"{DOWN}.weight.dequantize: states no output_dtype; set it to the type the graph computes in",),
        drop_attribute(f"{DOWN}.weight.dequantize", "output_dtype"),
    ),
    Case(
        "F106",
        (f"{DOWN}.input.quantize: zero point zero is not zero; leave it out",),
        zero_point(np.array(1, ml_dtypes.float8_e4m3fn)),
    ),
    Case(
        "F106",
        (f"{DOWN}.input.quantize: zero point zero is INT8 but the codes are FLOAT8E4M3FN; leave it out",),
        zero_point(np.array(0, np.int8)),
    ),
    Case(
        "F107",
        (
            (
                f"{DOWN}.weight.dequantize: scale {DOWN}.weight_scale has shape [64] but axis 0 of {DOWN}.weight [128, "
                "256] has 128; store one scale for each"
            ),
        ),
        set_tensor(f"{DOWN}.weight_scale", np.full(64, 0.5, np.float32)),
    ),
    Case(
        "F107",
        (
            f"{KEY}.quantize: scale {KEY}_scale has 2 values; store one for the tensor, as activations and caches take",
            (
                f"{KEY}.dequantize_past: scale {KEY}_scale has 2 values; store one for the tensor, as activations and "
                "caches take"
            ),
            (
                f"{KEY}.dequantize: scale {KEY}_scale has 2 values; store one for the tensor, as activations and "
                "caches "
                "take"
            ),
        ),
        set_tensor(f"{KEY}_scale", np.full(2, 0.5, np.float32)),
    ),
    Case(
        "F108",
        (f"again: quantizes {{gated}} with the scale that {DOWN}.input.quantize has quantized it with; use its codes",),
        second_quantizer,
    ),
    Case(
        "F108",
        (
            (
                f"again: quantizes {DOWN}.input.dequantize_output with the scale that {DOWN}.input.dequantize has "
                "dequantized it with; use its codes"
            ),
        ),
        dequantized_codes,
    ),
    Case(
        "F109",
        (
            (
                "{concat}: Concat reads FP8 codes past_key_values.0.key (ONNX Runtime refuses FP8 there); dequantize "
                "them "
                "first"
            ),
            (
                "{concat}: Concat reads FP8 codes new_key_values.0.key (ONNX Runtime refuses FP8 there); dequantize "
                "them "
                "first"
            ),
        ),
        concatenated_codes,
    ),
    Case(
        "F109",
        (
            (
                f"relu: Relu reads FP8 codes {DOWN}.input.quantize_output (opset 23 allows no FP8 there); "
                "dequantize them first"
            ),
        ),
        relu_of_codes,
    ),
    Case(
        "F110",
        (
            (
                f"{LAYER}.self_attn.attention: its input query comes from Q/DQ, which does not make it FP8 attention; "
                "leave it out, or use plain products"
            ),
        ),
        quantized_query,
    ),
    Case(
        "F111",
        (
            (
                "table.quantize: quantizes the constant table when the graph is built; store its codes, behind a "
                "DequantizeLinear"
            ),
        ),
        quantized_constant,
    ),
    Case(
        "F112",
        (
            (
                f"{DOWN}.input.dequantize: multiplies by 0.25, and {DOWN}.input.quantize has divided by 0.01953125; "
                "use "
                "one scale for both"
            ),
        ),
        other_pair_scale,
        foreign=True,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Cast cast lies between {DOWN}.input.dequantize and the product; move it elsewhere",),
        cast_between,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Mul double lies between {DOWN}.weight.dequantize and the product; move it elsewhere",),
        scaled_weight,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Relu between lies between {DOWN}.input.dequantize and the product; move it elsewhere",),
        between("Relu", 0),
        foreign=True,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Relu between lies between {DOWN}.weight.dequantize and the product; move it elsewhere",),
        between("Relu", 1),
        foreign=True,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Slice between lies between {DOWN}.input.dequantize and the product; move it elsewhere",),
        between("Slice", 0, [0], [9]),
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Gather between lies between {DOWN}.weight.dequantize and the product; move it elsewhere",),
        between("Gather", 1, [0]),
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Concat between lies between {DOWN}.weight.dequantize and the product; move it elsewhere",),
        between("Concat", 1, joined=f"{UP}.weight.dequantize"),
        foreign=True,
    ),
    Case(
        "F202",
        (
            (
                f"{DOWN}.matmul: its weight is FP8 but its input is not, so it multiplies in the compute type; "
                "quantize "
                "its input too"
            ),
        ),
        options={"wide_inputs": (DOWN,)},
        foreign=True,
    ),
    Case(
        "F203",
        (
            (
                f"{DOWN}.matmul: is promised on FP8: its weight is FP8 but its input is not, so it multiplies in the "
                f"compute type; {AGAIN}"
            ),
        ),
        options={"wide_inputs": (DOWN,)},
    ),
    Case(
        "F203",
        (f"{DOWN}.matmul: is promised on FP8: neither its weight nor its input comes from FP8 codes; {AGAIN}",),
        options={"wide": (DOWN,)},
        promised={DOWN: None},
    ),
    Case(
        "F203",
        (f"model.layers.7.mlp.up_proj.matmul: is promised on FP8, and there is no such product; {AGAIN}",),
        promised={"model.layers.7.mlp.up_proj": 0.5},
    ),
    Case("F203", ("nothing is promised on FP8; calibrate with fewer --skip",), options={"fp8": False}, promised={}),
    Case(
        "F204",
        (f"{DOWN}.matmul: its weight is FP8, which scales.json does not promise; {AGAIN}",),
        promised={f"-{DOWN}": None},
    ),
    Case(
        "F205",
        ("of its products (8) none takes FP8 on both sides; quantize weights and inputs",),
        options={"fp8": False},
        foreign=True,
    ),
    Case(
        "F206",
        (
            f"{DOWN}.input.quantize: scale is 0.01953125, and scales.json has 0.0195312519; {AGAIN}",
            f"{DOWN}.input.dequantize: scale is 0.01953125, and scales.json has 0.0195312519; {AGAIN}",
        ),
        promised={DOWN: float(np.nextafter(np.float32(0.01953125), np.float32(1)))},
    ),
    Case(
        "F207",
        (f"{DOWN}.weight.dequantize: scale 3 is 0.75, and the checkpoint has 0.5; {AGAIN}",),
        set_tensor(f"{DOWN}.weight_scale", np.array([0.5] * 3 + [0.75] + [0.5] * 124, np.float32)),
        weight_scales={DOWN: np.full(128, 0.5, np.float32)},
    ),
    Case(
        "F207",
        (f"{DOWN}.weight.dequantize: has 128 scales, and the checkpoint 64; {AGAIN}",),
        weight_scales={DOWN: np.full(64, 0.5, np.float32)},
    ),
    Case(
        "F208",
        (
            (
                f"{DOWN}.weight.dequantize: scales run along axis 1 of {DOWN}.weight [128, 256], which the product "
                "sums "
                "over; take axis 0"
            ),
        ),
        each(
            set_attribute(f"{DOWN}.weight.dequantize", "axis", 1),
            set_tensor(f"{DOWN}.weight_scale", np.full(256, 0.5, np.float32)),
        ),
    ),
    Case(
        "F209",
        tuple(
            (
                f"{LAYER}.mlp.{name}.matmul: its weight is {dims}, not in multiples of 16, so the engine pads it; "
                "leave "
                "the module in BF16 where the padding costs more than FP8 gives"
            )
            for name, dims in (("gate_proj", [24, 128]), ("up_proj", [24, 128]), ("down_proj", [128, 24]))
        ),
        options={"hidden": 24},
    ),
    Case(
        "F210",
        (f"{DOWN}.matmul: multiplies INT8 codes (integers); quantize to FLOAT8E4M3FN for FP8",),
        integer_codes,
        {"wide": (DOWN,)},
        foreign=True,
    ),
    Case(
        "F211",
        (
            (
                f"{DOWN}.matmul: its input is FP8 but its weight is not, so it multiplies in the compute type; "
                "quantize "
                "its weight too, or leave its input as it is"
            ),
        ),
        wide_weight,
        foreign=True,
    ),
    Case(
        "F212",
        (
            f"{LAYER}.self_attn.scores: is promised on FP8: its first input does not come from FP8 codes; {AGAIN}",
            f"{LAYER}.self_attn.values: is promised on FP8, and there is no such product; {AGAIN}",
        ),
        options={"plain_attention": True, "key_value_heads": 4},
        attention={f"{LAYER}.self_attn.scores": (0.5, 0.5), f"{LAYER}.self_attn.values": (0.5, 0.5)},
    ),
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
        (f"{LAYER}.mlp.act.matmul: bears a product's name and is Sigmoid; rename it",),
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
    Case("F307", ("input_ids is [1, seq]; give it the contract's [batch, seq]",), set_dimension("input_ids", 0, 1)),
    Case(
        "F307",
        ("attention_mask is [batch, total]; give it the contract's [batch, capacity + seq]",),
        set_dimension("attention_mask", 1, "total"),
    ),
    Case(
        "F307",
        (
            (
                "past_key_values.0.key is [batch, heads, capacity, 64]; give it the contract's [batch, size, capacity, "
                "size]"
            ),
        ),
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
    Case("F309", ("nodes have no name (2 of 71); name them",), unname("Gather", "Squeeze")),
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
    Case("F312", ("branch: If has a body, which is not checked; take its products out",), branch),
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
    Case(
        "F401",
        (
            (
                f"{DOWN}.weight: its data lie in ../model.safetensors, outside the graph's directory; put the file "
                "beside "
                "the graph"
            ),
        ),
        set_place(f"{DOWN}.weight", location="../model.safetensors"),
    ),
    Case(
        "F401",
        (
            (
                f"{DOWN}.weight: its data lie in /etc/hostname, outside the graph's directory; put the file beside the "
                "graph"
            ),
        ),
        set_place(f"{DOWN}.weight", location="/etc/hostname"),
    ),
    Case(
        "F401",
        ((f"{DOWN}.weight: its place has the offset 'start', which is no number; {EXPORT}"),),
        set_place(f"{DOWN}.weight", offset="start"),
    ),
    Case(
        "F402",
        (
            (
                f"{DOWN}.weight: its file more.safetensors is missing (tensors in it: 1); copy the graph's whole "
                "directory again"
            ),
        ),
        set_place(f"{DOWN}.weight", location="more.safetensors"),
    ),
    Case(
        "F403",
        (
            (
                "model.norm.weight: its data end at byte {size1} of model.safetensors, which has {size}; copy the "
                "graph's "
                "whole directory again"
            ),
            (
                "F405 external-tensor: model.norm.weight: no tensor of model.safetensors begins at byte {norm1}; "
                f"{EXPORT}"
            ),
        ),
        move_place("model.norm.weight", 1),
    ),
    Case(
        "F403",
        (
            f"{DOWN}.input_scale: its data begin at byte -8 of model.safetensors, before its start; {EXPORT}",
            f"F405 external-tensor: {DOWN}.input_scale: no tensor of model.safetensors begins at byte -8; {EXPORT}",
        ),
        set_place(f"{DOWN}.input_scale", offset=-8),
    ),
    Case(
        "F404",
        (f"{DOWN}.weight: its data are 100 bytes, and FLOAT8E4M3FN [128, 256] takes 32768; {EXPORT}",),
        set_place(f"{DOWN}.weight", length=100),
    ),
    Case(
        "F405",
        (
            (
                f"{LAYER}.self_attn.k_proj.weight: its data are those of {LAYER}.self_attn.v_proj.weight in "
                f"model.safetensors; {EXPORT}"
            ),
            (
                f"{LAYER}.self_attn.v_proj.weight: its data are those of {LAYER}.self_attn.k_proj.weight in "
                f"model.safetensors; {EXPORT}"
            ),
        ),
        swap_places,
    ),
    Case(
        "F405",
        (f"model.norm.weight: its data are BF16 in model.safetensors, and FLOAT16 in the graph; {EXPORT}",),
        lambda model: setattr(tensor(model, "model.norm.weight"), "data_type", TensorProto.FLOAT16),
    ),
    Case(
        "F406",
        (
            f"F405 external-tensor: {DOWN}.weight: no tensor of model.safetensors begins at byte {{down16}}; {EXPORT}",
            (
                f"{DOWN}.weight_scale: its data begin at byte {{scale}} of model.safetensors, inside those of "
                f"{DOWN}.weight (to {{down_end16}}); {EXPORT}"
            ),
        ),
        move_place(f"{DOWN}.weight", 16),
    ),
    Case("F407", (f"{DOWN}.weight_scale: its data are 3 bytes, and FLOAT [128] takes 512; {EXPORT}",), inline(b"abc")),
]


def places(path: Path) -> dict[str, int | str]:
    """Numbers and names of the file that the expected texts mention."""
    size, down = path.with_name("model.safetensors").stat().st_size, start_of(f"{DOWN}.weight")(path)
    graph = onnx.load_model(path, load_external_data=False).graph
    gated = next(entry.input[0] for entry in graph.node if entry.name == f"{DOWN}.input.quantize")
    concat = next(entry.name for entry in graph.node if f"{KEY}.dequantize_past_output" in entry.input)
    return {
        "size": size,
        "size1": size + 1,
        "norm1": start_of("model.norm.weight")(path) + 1,
        "down16": down + 16,
        "down_end16": down + 16 + 32768,
        "scale": start_of(f"{DOWN}.weight_scale")(path),
        "gated": gated,
        "concat": concat,
    }


def promise_of(case: Case, written: Any) -> dict[str, float | None] | None:
    if case.foreign:
        return None
    if case.promised == {}:
        return {}
    changed = case.promised or {}
    kept = {module: scale for module, scale in written.input_scales.items() if f"-{module}" not in changed}
    return kept | {module: scale for module, scale in changed.items() if not module.startswith("-")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule} {case.expected[0][:60]}")
def test_a_broken_graph_gives_the_rule_and_its_words_and_nothing_else(
    decoder: Decoders, edited: Edit, case: Case
) -> None:
    written = decoder(**case.options)
    numbers = places(written.path) if any("{" in text for text in case.expected) else {}
    edited(written.path, case.change)
    found = lint(written.path, promise_of(case, written), case.weight_scales, case.attention)
    head = f"{case.rule} {RULES[case.rule].name}: "
    expected = [text if text.startswith("F") and text[1:4].isdigit() else head + text for text in case.expected]
    assert [str(finding) for finding in found] == [text.format(**numbers) if numbers else text for text in expected]
    assert {finding.severity for finding in found} == {RULES[case.rule].severity}


def test_every_rule_is_broken_by_a_case_above_and_says_why_it_is_there() -> None:
    assert {case.rule for case in CASES} == set(RULES)
    for rule in RULES.values():
        assert rule.why.strip().endswith(".")
        assert rule.severity in ("error", "warning")
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


def test_findings_name_the_module(decoder: Decoders, edited: Edit) -> None:
    written = decoder(wide_inputs=(DOWN,))
    edited(written.path, set_place(f"{Q}.weight", length=1))
    assert [(finding.rule, finding.node, finding.module) for finding in lint(written.path, written.input_scales)] == [
        ("F203", f"{DOWN}.matmul", DOWN), ("F404", f"{Q}.weight", Q),
    ]  # fmt: skip
    assert str(Finding("F302", "ir-version", "warning", "", None, "too old")) == "F302 ir-version: too old"


def test_fp8_tensor_scatter_is_refused_though_the_standard_allows_it(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    edited(written.path, scattered_codes)
    found = [str(finding) for finding in lint(written.path, written.input_scales)]
    assert (
        "F109 operator-takes-fp8: scatter: TensorScatter reads FP8 codes past_key_values.0.key (TensorRT refuses FP8 "
        "there); dequantize them first"
    ) in found


def test_an_opset_without_fp8_is_found(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    edited(written.path, versions(18, 11))
    found = [str(finding) for finding in lint(written.path)]
    assert "F301 opset: opset 18 has no FP8; export with opset 23" in found
    assert (
        f"F303 standard-operators: {LAYER}.self_attn.attention: Attention is no operator of opset 18; express it in "
        "standard ones"
    ) in found


def test_a_zero_point_of_zero_is_no_finding(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    edited(written.path, zero_point(np.array(0, ml_dtypes.float8_e4m3fn)))
    assert lint(written.path, written.input_scales) == []


def test_equal_scales_may_be_one_tensor(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def merge(model: ModelProto) -> None:
        for entry in model.graph.node:
            entry.input[:] = [f"{Q}.input_scale" if name.endswith(".input_scale") else name for name in entry.input]

    edited(written.path, merge)
    assert lint(written.path, written.input_scales) == []


def test_a_scale_behind_a_cast_is_read(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def widen(model: ModelProto) -> None:
        set_tensor(f"{DOWN}.input_scale", np.array(0.01953125, ml_dtypes.bfloat16))(model)
        cast = helper.make_node("Cast", [f"{DOWN}.input_scale"], ["wide_scale"], name="widen", to=TensorProto.FLOAT)
        insert(model, f"{DOWN}.input.quantize", 1, cast)
        node(model, f"{DOWN}.input.dequantize").input[1] = "wide_scale"

    edited(written.path, widen)
    assert lint(written.path, written.input_scales) == []
    assert [finding.rule for finding in lint(written.path, written.input_scales | {DOWN: 0.5})] == ["F206", "F206"]


def test_a_link_out_of_the_directory_is_found(decoder: Decoders, tmp_path: Path) -> None:
    written = decoder()
    weights = written.path.with_name("model.safetensors")
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    assert {finding.rule for finding in lint(written.path)} == {"F401"}


def test_a_file_that_is_no_safetensors_is_found(decoder: Decoders) -> None:
    written = decoder()
    weights = written.path.with_name("model.safetensors")
    weights.write_bytes(bytes(weights.stat().st_size))
    found = lint(written.path)
    assert (
        f"F405 external-tensor: {DOWN}.weight: its file model.safetensors has no safetensors header; copy the graph's "
        "whole directory again"
    ) in [str(finding) for finding in found]
    assert {finding.rule for finding in found} == {"F104", "F405"}


def test_external_data_in_other_files_are_held_to_their_bounds_alone(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    written.path.with_name("model.safetensors").rename(written.path.with_name("model.onnx.data"))
    stored = [
        entry.name
        for entry in onnx.load_model(written.path, load_external_data=False).graph.initializer
        if entry.external_data
    ]
    edited(written.path, each(*(set_place(name, location="model.onnx.data") for name in stored)))
    assert lint(written.path, written.input_scales) == []


def test_no_weight_is_read(decoder: Decoders) -> None:
    written = decoder(width=1024, hidden=2048)
    weights = written.path.with_name("model.safetensors").stat().st_size
    tracemalloc.start()
    assert lint(written.path, written.input_scales) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 < 7_000_000 < weights


@pytest.mark.parametrize("data", [b"", b"\xff\xff no model", b"ONNX"], ids=str)
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(
        InputError, match=r"model\.onnx: is no ONNX model, or (is cut short|holds no node); export it again"
    ):
        lint(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as missing:
        lint(tmp_path / "model.onnx")
    assert str(missing.value) == f"{tmp_path / 'model.onnx'}: there is no such file"
