"""Rules F2xx, each broken in one way."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, TensorProto, helper

from fp8q.options import BF16, ONE, TWO

from .changes import AGAIN, DOWN, GATE, LAYER, UP, Case, add_tensor, each, insert, node, set_attribute, set_tensor


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


def integer_codes(model: ModelProto) -> None:
    add_tensor(model, "one", np.float32(1))
    dequantize = helper.make_node(
        "DequantizeLinear", [add_tensor(model, "int8", np.zeros((256, 128), np.int8)), "one"], ["wide"], name="integers"
    )
    insert(model, f"{DOWN}.matmul", 1, dequantize)


def without_the_mul(model: ModelProto) -> None:
    """What read it reads the sum, cast."""
    rescale = node(model, f"{DOWN}.matmul.rescale")
    node(model, f"{DOWN}.matmul.rescale_cast").input[0] = rescale.input[0]
    model.graph.node.remove(rescale)


def behind_another_product(model: ModelProto) -> None:
    """The Muls of two GEMMs of as many columns, exchanged."""
    first, second = (node(model, f"{module}.matmul.rescale") for module in (GATE, UP))
    first.input[1], second.input[1] = second.input[1], first.input[1]


def scaled_twice(model: ModelProto) -> None:
    """In the DequantizeLinear, and behind the GEMM again."""
    node(model, f"{DOWN}.weight.dequantize").input[1] = f"{DOWN}.weight_scale"


def read_unscaled(model: ModelProto) -> None:
    """The residual sum takes the GEMM past its Mul."""
    cast = helper.make_node("Cast", [f"{DOWN}.matmul.sum"], ["early"], name="early", to=TensorProto.BFLOAT16)
    reader = next(each for each in model.graph.node if f"{DOWN}.matmul_output" in each.input)
    insert(model, reader.name, list(reader.input).index(f"{DOWN}.matmul_output"), cast)


def split_between_both(model: ModelProto) -> None:
    """One eighth in the DequantizeLinear, eight times the scales behind the GEMM."""
    node(model, f"{DOWN}.weight.dequantize").input[1] = add_tensor(model, "eighth", np.float32(0.125))
    set_tensor(f"{DOWN}.weight_scale", np.full(128, 4, np.float32))(model)


CASES = [
    Case(
        "F201",
        (f"{DOWN}.matmul: Cast cast lies between {DOWN}.input.dequantize and the GEMM; move it elsewhere",),
        cast_between,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Mul double lies between {DOWN}.weight.dequantize and the GEMM; move it elsewhere",),
        scaled_weight,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Relu between lies between {DOWN}.input.dequantize and the GEMM; move it elsewhere",),
        between("Relu", 0),
        foreign=True,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Relu between lies between {DOWN}.weight.dequantize and the GEMM; move it elsewhere",),
        between("Relu", 1),
        foreign=True,
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Slice between lies between {DOWN}.input.dequantize and the GEMM; move it elsewhere",),
        between("Slice", 0, [0], [9]),
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Gather between lies between {DOWN}.weight.dequantize and the GEMM; move it elsewhere",),
        between("Gather", 1, [0]),
    ),
    Case(
        "F201",
        (f"{DOWN}.matmul: Concat between lies between {DOWN}.weight.dequantize and the GEMM; move it elsewhere",),
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
                f"{DOWN}.matmul: is expected on FP8: its weight is FP8 but its input is not, so it multiplies in the "
                f"compute type; {AGAIN}"
            ),
        ),
        options={"wide_inputs": (DOWN,)},
    ),
    Case(
        "F203",
        (f"{DOWN}.matmul: is expected on FP8: neither its weight nor its input comes from FP8 codes; {AGAIN}",),
        options={"wide": (DOWN,)},
        promised={DOWN: None},
    ),
    Case(
        "F203",
        (f"model.layers.7.mlp.up_proj.matmul: is expected on FP8, and there is no such GEMM; {AGAIN}",),
        promised={"model.layers.7.mlp.up_proj": 0.5},
    ),
    Case("F203", ("nothing is expected on FP8; calibrate with fewer --skip",), options={"fp8": False}, promised={}),
    Case(
        "F204",
        (f"{DOWN}.matmul: its weight is FP8, which scales.json does not expect; {AGAIN}",),
        promised={f"-{DOWN}": None},
    ),
    Case(
        "F205",
        ("of its GEMMs (8) none takes FP8 on both sides; quantize weights and inputs",),
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
        "F207",
        (f"{DOWN}.matmul.rescale: scale 3 is 0.75, and the checkpoint has 0.5; {AGAIN}",),
        set_tensor(f"{DOWN}.weight_scale", np.array([0.5] * 3 + [0.75] + [0.5] * 124, np.float32)),
        {"weight_scale": "mul"},
        weight_scales={DOWN: np.full(128, 0.5, np.float32)},
    ),
    Case(
        "F207",
        (
            (
                f"{DOWN}.weight.dequantize: has one scale for all, and no Mul behind the GEMM the checkpoint's 128; "
                f"{AGAIN}"
            ),
        ),
        without_the_mul,
        {"weight_scale": "mul"},
        weight_scales={DOWN: np.full(128, 0.5, np.float32)},
    ),
    Case(
        "F207",
        (
            f"{GATE}.matmul.rescale: scale 0 is 0.25, and the checkpoint has 0.5; {AGAIN}",
            f"{UP}.matmul.rescale: scale 0 is 0.5, and the checkpoint has 0.25; {AGAIN}",
        ),
        each(
            behind_another_product,
            set_tensor(f"{GATE}.weight_scale", np.full(256, 0.5, np.float32)),
            set_tensor(f"{UP}.weight_scale", np.full(256, 0.25, np.float32)),
        ),
        {"weight_scale": "mul"},
        weight_scales={GATE: np.full(256, 0.5, np.float32), UP: np.full(256, 0.25, np.float32)},
    ),
    Case(
        "F207",
        (f"{DOWN}.matmul.rescale: scale 0 is 0.25, and the checkpoint has 0.5; {AGAIN}",),
        each(scaled_twice, set_tensor(f"{DOWN}.weight_scale", np.full(128, 0.5, np.float32))),
        {"weight_scale": "mul"},
        weight_scales={DOWN: np.full(128, 0.5, np.float32)},
    ),
    Case(
        "F207",
        (f"{DOWN}.matmul.rescale: scale 0 is 0.5, and the checkpoint has 0.25; {AGAIN}",),
        split_between_both,
        {"weight_scale": "mul"},
        weight_scales={DOWN: np.full(128, 0.25, np.float32)},
    ),
    Case(
        "F208",
        (f"{DOWN}.matmul.rescale: multiplies by [128, 1] numbers; the GEMM's columns take [128]",),
        set_tensor(f"{DOWN}.weight_scale", np.full((128, 1), 0.5, np.float32)),
        {"weight_scale": "mul"},
    ),
    Case(
        "F208",
        (
            (
                f"{DOWN}.weight.dequantize: scales run along axis 1 of {DOWN}.weight [128, 256], which the GEMM "
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
                "leave the module in BF16 where the padding costs more than FP8 gives"
            )
            for name, dims in (
                ("gate_proj", f"[24, 128], as that of {LAYER}.mlp.up_proj.matmul is"),
                ("down_proj", "[128, 24]"),
            )
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
            f"{LAYER}.self_attn.scores: is expected on FP8: its first input does not come from FP8 codes; {AGAIN}",
            f"{LAYER}.self_attn.values: is expected on FP8, and there is no such GEMM; {AGAIN}",
        ),
        options={"plain_attention": True, "key_value_heads": 4},
        attention={f"{LAYER}.self_attn.scores": (0.5, 0.5), f"{LAYER}.self_attn.values": (0.5, 0.5)},
    ),
    Case(
        "F213",
        (
            (
                f"{DOWN}.weight.dequantize: answers in BFLOAT16, and {DOWN}.matmul.rescale scales the GEMM only "
                f"behind it; {AGAIN}"
            ),
        ),
        set_attribute(f"{DOWN}.weight.dequantize", "output_dtype", TensorProto.BFLOAT16),
        {"weight_scale": "mul"},
    ),
    Case(
        "F213",
        (f"{DOWN}.matmul: is read by Cast early before {DOWN}.matmul.rescale scales it; {AGAIN}",),
        read_unscaled,
        {"weight_scale": "mul"},
    ),
    Case(
        "F214",
        (f"{DOWN}.matmul: is expected in two terms, and {DOWN}.input.quantize reads no Concat of both; {AGAIN}",),
        forms={DOWN: TWO},
    ),
    Case(
        "F214",
        tuple(
            f"{LAYER}.{name}_proj.matmul: takes two terms, and scales.json expects one; {AGAIN}"
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        ),
        options={"two_terms": True},
        forms={
            f"{LAYER}.{name}_proj": ONE
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        },
    ),
    Case(
        "F215",
        (
            f"{DOWN}.matmul: is expected with its weight alone in FP8, and its input is quantized; {AGAIN}",
            f"other.matmul: is expected with its weight in FP8: there is no such GEMM; {AGAIN}",
        ),
        forms={DOWN: BF16, "other": BF16},
    ),
    Case(
        "F215",
        (f"{DOWN}.matmul: is expected with its weight in FP8: its weight is not FP8 codes; {AGAIN}",),
        wide_weight,
        forms={DOWN: BF16},
    ),
]
