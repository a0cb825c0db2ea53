"""Rules F1xx, each broken in one way."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from onnx import ModelProto, TensorProto, helper

from .changes import DOWN, KEY, LAYER, UP, Case, add_tensor, insert, node, set_attribute, set_tensor, zero_point


def drop_attribute(name: str, attribute: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        kept = [entry for entry in node(model, name).attribute if entry.name != attribute]
        del node(model, name).attribute[:]
        node(model, name).attribute.extend(kept)

    return change


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


def other_pair_scale(model: ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("other", TensorProto.FLOAT, [], [0.25]))
    node(model, f"{DOWN}.input.dequantize").input[1] = "other"


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
    Case(  # as many numbers, but in two dimensions, which ONNX takes for scales of blocks
        "F107",
        (
            (
                f"{DOWN}.weight.dequantize: scale {DOWN}.weight_scale has shape [128, 1] but axis 0 of {DOWN}.weight "
                "[128, 256] has 128; store one scale for each"
            ),
        ),
        set_tensor(f"{DOWN}.weight_scale", np.full((128, 1), 0.5, np.float32)),
    ),
    Case(  # an axis that the weight does not have has nothing to scale
        "F107",
        (
            (
                f"{DOWN}.weight.dequantize: scale {DOWN}.weight_scale has shape [128] but axis 2 of {DOWN}.weight "
                "[128, 256] has 0; store one scale for each"
            ),
        ),
        set_attribute(f"{DOWN}.weight.dequantize", "axis", 2),
    ),
    Case(
        "F107",
        tuple(
            f"{KEY}.{node}: scale {KEY}_scale has shape [3] but axis 1 of new_key_values.0.key ['batch', 2, 'seq', 64] "
            "has 2; store one scale for each"
            for node in ("quantize", "dequantize_past", "dequantize")
        ),
        set_tensor(f"{KEY}_scale", np.full(3, 0.5, np.float32)),
    ),
    Case(
        "F107",
        tuple(
            f"{DOWN}.input.{node}: scale {DOWN}.input_scale has 2 values; store one for the tensor, as activations take"
            for node in ("quantize", "dequantize")
        ),
        set_tensor(f"{DOWN}.input_scale", np.full(2, 0.5, np.float32)),
        foreign=True,
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
                "leave it out, or use plain GEMMs"
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
]
