"""What is read of TensorRT's engine inspector, on dumps in `layers/`.

TensorRT needs a GPU, so these were made by hand, in the form of public dumps: NVIDIA/TensorRT issues 4397 and 4020 for
TensorRT 10, NVIDIA's migration guide and cookbook for 11, and kernels' names that profiles of Hopper and Blackwell
show. Each is one decoder layer in two profiles. The file that `fp8q build-engine` writes beside a plan
(`engines/sm90.layers.json`) can be put among them as it is.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8q.export.engine.inspector import multiplies, operands_of_kernel, read_inspector
from fp8q.export.engine.kernel_rows import AttentionRow, attention_rows, gemm_rows
from fp8q.export.engine.plan import UNTOLD, EngineGemm, Evidence, Plan, evidence
from fp8q.export.onnx_file import names

LAYERS = Path(__file__).parent / "layers"
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
MODULES = [
    *(f"{ATTENTION}{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"{MLP}{name}_proj" for name in ("gate", "up", "down")),
]


def dump(name: str) -> Plan:
    plan = read_inspector((LAYERS / f"{name}.layers.json").read_text(encoding="utf-8"))
    assert plan is not None
    return plan


def found_in(plan: Plan, modules: list[str] = MODULES) -> Evidence:
    return evidence(plan, {names.matmul(module): module for module in modules}, profiles=2)


@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        pytest.param("dq-10", MODULES, id="TensorRT 10 on Hopper: no weights, BF16 answers, gate and up in a fusion"),
        pytest.param(
            "dq-11", MODULES, id="TensorRT 11 on Blackwell: weights apart, a fusion whose kernel tells no type"
        ),
        pytest.param("mul", [], id="scales behind the GEMM, which answers in FP32"),
        pytest.param("two-terms", [], id="two terms"),
        pytest.param("tail", [], id="a tail"),
    ],
)
def test_every_product_of_codes_is_fp8_and_a_narrow_answer_is_only_remarked(name: str, narrow: list[str]) -> None:
    found = found_in(dump(name))
    assert (found.kind, sorted(found.fp8)) == ("inspector", sorted(MODULES))
    assert (found.not_fp8, found.unknown, sorted(found.narrow)) == ({}, {}, sorted(narrow))


def test_weights_that_are_made_bf16_before_the_product_are_wide() -> None:
    found = found_in(dump("wide"))
    assert (found.kind, found.fp8, found.unknown) == ("inspector", frozenset(), {})
    assert found.not_fp8 == dict.fromkeys(MODULES, "bf16 × bf16 -> bf16 in profile 0")


def test_what_neither_tensors_nor_kernel_tell_is_unknown_and_neither_fp8_nor_wide() -> None:
    found = found_in(dump("unknown"))
    assert (found.kind, found.fp8, found.not_fp8) == ("unknown", frozenset(), {})
    assert found.unknown == dict.fromkeys(MODULES, "fp8 × unknown -> bf16 in profile 0")


def test_a_fusion_computes_what_no_other_layer_is_named_after() -> None:
    """Its metadata also has the GEMM before it, whose scales were fused into it."""
    plan = dump("dq-10")
    fusions = [product for product in plan.profiles[0] if f"{MLP}gate_proj.matmul" in product.nodes]
    assert [product.nodes for product in fusions] == [(f"{MLP}gate_proj.matmul", f"{MLP}up_proj.matmul")]
    assert f"{ATTENTION}o_proj.matmul" in fusions[0].layers
    (merged,) = plan.gemms(f"{ATTENTION}k_proj.matmul", 1)
    assert merged.nodes == tuple(f"{ATTENTION}{name}_proj.matmul" for name in "qkv")


def test_the_gemms_of_a_step_are_gemms_of_their_own() -> None:
    """A fusion without names is one of those of its metadata that multiply: a step's scores are none of q_proj's."""
    for gemm in names.ATTENTION_GEMMS:
        assert multiplies(names.step_gemm("model.layers.0.self_attn", gemm))
    assert multiplies(f"{ATTENTION}q_proj.matmul")
    assert not multiplies(f"{ATTENTION}q_proj.bias_add")


def test_the_head_is_a_wide_product_and_attention_is_none() -> None:
    for name in ("dq-10", "dq-11"):
        plan = dump(name)
        assert [str(product) for product in plan.gemms("lm_head.matmul", 0)] == ["bf16 × bf16 -> bf16"]
        assert [row.kernel for row in attention_rows(plan, ["prefill", "decode"])] == [
            kernel.name for kernels in plan.kernels.values() for kernel in kernels if "mha" in kernel.name
        ]


@pytest.mark.parametrize(
    ("tactic", "operands"),
    [
        ("sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64_stage6", ("fp16", "fp16")),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", ("bf16", "bf16")),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", ("fp8", "fp8")),
        ("sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize128x128x128", ("fp8", "fp8")),
        ("sm80_xmma_gemm_i8f32_i8i32_f32_by_fusion_tactic", ("int8", "int8")),
        ("cutlass3x_sm100_tensorop_s128x128x32gemm_f8_f8_f32_f16_f16_128x128x128", ("fp8", "fp8")),
        ("cutlass3x_sm90_tensorop_s64x128x32gemm_e4m3_e4m3_f32_bf16_e4m3_64x128x128", ("fp8", "fp8")),
        # the answer is quantized for the next GEMM, and nothing else
        ("cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_e4m3_e4m3_64x128x64", ("bf16", "bf16")),
        ("sm90_xmma_gemm_bf16e4m3_bf16f32_f32_tn_n_tilesize128x128x64", ("bf16", "bf16")),
        ("sm90_xmma_gemm_e5m2f32_e4m3f32_f32_tn_n_tilesize128x128x64", ("e5m2", "fp8")),
        ("__myl_Fc_0x5b1d2c0f6c6a7f0e9f0b44c1f2a1d3e5_tensorop256x128_cga2x1_sm2", None),
        ("ampere_h16816gemm_256x128_ldg8_nn_v1", None),
        ("", None),
    ],
)
def test_a_kernels_name_tells_what_it_multiplies_and_not_what_it_answers(
    tactic: str, operands: tuple[str, str] | None
) -> None:
    assert operands_of_kernel(tactic) == operands


E4M3 = "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128"
BF16 = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64"
FC = "__myl_Fc_0x5b1d_tensorop128x128"


def tensor(kind: str, *sizes: int) -> dict[str, object]:
    return {"Name": kind, "Dimensions": list(sizes), "Datatype": kind}


@pytest.mark.parametrize(
    ("inputs", "constants", "tactic", "told"),
    [
        pytest.param([("FP8", 8, 64)], [("FP8", 64, 32)], FC, "fp8 × fp8", id="the weight among the constants"),
        pytest.param([("FP8", 8, 64)], [("Float", 1, 32), ("FP8", 64, 32)], FC, "fp8 × fp8", id="not its scales"),
        pytest.param([("FP8", 8, 64)], [("Float", 32)], E4M3, "fp8 × fp8", id="scales alone, and the kernel tells"),
        pytest.param([("FP8", 8, 64)], [("Float", 32)], FC, "fp8 × unknown", id="scales alone"),
        pytest.param([("FP8", 8, 64), ("BFloat16", 8, 32)], [], E4M3, "fp8 × fp8", id="a residual is no weight"),
        pytest.param([("FP8", 8, 64), ("BFloat16", 8, 32)], [], FC, "fp8 × unknown", id="or may be one"),
        pytest.param([("FP8", 8, 64), ("FP8", 64, 32)], [], FC, "fp8 × fp8", id="the weight among the inputs"),
        pytest.param([("BFloat16", 8, 64)], [("FP8", 64, 32)], FC, "bf16 × fp8", id="an input that is not quantized"),
        pytest.param([("BFloat16", 8, 64)], [], E4M3, "bf16 × fp8", id="tensors and kernel disagree: the wider counts"),
        pytest.param([("FP8", 8, 64)], [("FP8", 64, 32)], BF16, "bf16 × bf16", id="a kernel that dequantizes first"),
        pytest.param([("FP4", 8, 64)], [("FP4", 64, 32)], FC, "fp4 × fp4", id="another type"),
        pytest.param([], [], E4M3, "fp8 × fp8", id="the kernel alone"),
    ],
)
def test_the_types_of_operands_are_those_that_something_tells(
    inputs: list[tuple[Any, ...]], constants: list[tuple[Any, ...]], tactic: str, told: str
) -> None:
    layer = {
        "Name": "a_matmul_myl0_1", "LayerType": "gemm", "Metadata": "[ONNX Layer: a.matmul]", "TacticName": tactic,
        "Inputs": [tensor(*each) for each in inputs], "Constants": [tensor(*each) for each in constants],
        "Outputs": [tensor("BFloat16", 8, 32)],
    }  # fmt: skip
    plan = read_inspector(json.dumps({"Layers": [layer]}))
    assert plan is not None
    assert [str(product) for product in plan.gemms("a.matmul", 0)] == [f"{told} -> bf16"]


def test_a_product_that_is_wide_in_one_profile_is_wide_whatever_the_other_tells() -> None:
    first, second = dump("unknown"), dump("wide")
    plan = Plan({0: first.profiles[0], 1: second.profiles[1]}, "inspector")
    assert set(found_in(plan).not_fp8.values()) == {"fp8 × unknown -> bf16 in profile 0"}
    assert found_in(plan).unknown == {}


@pytest.mark.parametrize(
    ("operands", "fp8", "untold"),
    [
        (("fp8", "fp8"), True, False),
        (("fp8", "bf16"), False, False),
        (("bf16", "fp8"), False, False),
        (("fp8", UNTOLD), False, True),
        ((UNTOLD, UNTOLD), False, True),
        ((UNTOLD, "bf16"), False, False),  # wide, whatever the other side is
    ],
)
def test_a_product_is_fp8_on_both_sides_or_wide_or_it_is_not_told(
    operands: tuple[str, str], fp8: bool, untold: bool
) -> None:
    product = EngineGemm(("up.matmul",), operands, "fp32")
    assert (product.fp8, product.untold) == (fp8, untold)


def test_a_product_that_the_inspector_does_not_show_is_unknown() -> None:
    found = found_in(dump("mul"), [*MODULES, "model.layers.1.mlp.down_proj"])
    assert (found.kind, len(found.fp8), found.not_fp8) == ("inspector", 7, {})
    assert found.unknown == {"model.layers.1.mlp.down_proj": "the inspector shows no such GEMM in profile 0"}


def layer(
    name: str, kind: str, nodes: tuple[str, ...], inputs: tuple[str, ...], output: str, key: str
) -> dict[str, object]:
    metadata = "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes)
    return {
        "Name": name,
        "LayerType": kind,
        "Metadata": metadata,
        "Inputs": [{"Name": "x", key: text} for text in inputs],
        "Outputs": [{"Name": "y", key: output}],
    }


@pytest.mark.parametrize(
    ("key", "fp8", "fp32"),
    [
        ("Format/Datatype", "Row major linear FP8 format", "Row major linear FP32"),
        ("DataType", "FP8", "Float"),
        ("DataType", "Float8", "Float"),
    ],
)
def test_the_inspectors_json_of_tensorrt_10_and_11_reads_as_documented(key: str, fp8: str, fp32: str) -> None:
    layers = [
        layer("q_myl0_1", "gemm", ("a.q.matmul", "a.q.weight.dequantize"), (fp8, fp8), fp32, key),
        layer("__myl_Mul_myl0_2", "kgen", ("a.q.matmul", "b.matmul"), (fp8, fp8), fp8, key),
        layer("q_myl1_1 [profile 1]", "gemm", ("a.q.matmul",), ("BFloat16", fp8), "BFloat16", key),
        layer("b_myl0_3", "gemm", ("b.matmul",), (fp8, fp8), fp32, key),
        layer("b_myl1_3 [profile 1]", "gemm", ("b.matmul",), (fp8, fp8), fp32, key),
    ]
    plan = read_inspector(json.dumps({"Layers": layers}))
    found = evidence(plan, {"a.q.matmul": "a.q", "b.matmul": "b"}, profiles=2)
    assert (found.kind, found.fp8, dict(found.not_fp8)) == (
        "inspector",
        frozenset({"b"}),
        {"a.q": "bf16 × fp8 -> bf16 in profile 1"},
    )


def test_kernels_around_a_product_and_attention_are_told_from_the_inspectors_json_as_well() -> None:
    layers = [
        layer("__myl_norm_quantize", "kgen", ("norm", "a.q.input.quantize"), ("BFloat16",), "FP8", "DataType"),
        layer(
            "q_myl0_1",
            "gemm",
            ("a.q.matmul", "a.q.input.dequantize", "a.q.weight.dequantize"),
            ("FP8", "FP8"),
            "Float",
            "DataType",
        ),
        layer("__myl_Mul", "kgen", ("a.q.matmul", "rope"), ("Float",), "BFloat16", "DataType"),
        layer("_fmha_v2", "kgen", ("attend",), ("BFloat16", "BFloat16", "BFloat16", "Bool"), "BFloat16", "DataType"),
        layer("__myl_quantize", "kgen", ("a.o.input.quantize",), ("BFloat16",), "FP8", "DataType"),
        layer("q_myl1_1 [profile 1]", "gemm", ("a.q.matmul",), ("FP8", "FP8"), "Float", "DataType"),
    ]
    plan = read_inspector(json.dumps({"Layers": layers}))
    assert plan is not None
    prefill, decode = gemm_rows(plan, ["prefill", "decode"])
    assert (prefill.module, prefill.before, prefill.after) == ("a.q", ("__myl_norm_quantize",), ("__myl_Mul",))
    assert (decode.profile, decode.module, decode.before, decode.after) == ("decode", "a.q", (), ())
    assert attention_rows(plan, ["prefill", "decode"]) == [
        AttentionRow("prefill", "a", "attend", "_fmha_v2", ("bf16",) * 3, "bf16")
    ]


@pytest.mark.parametrize(
    "information",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        '{"Layers": ["a.matmul", "b.matmul"]}',
        '{"Layers": [{"Name": "a", "LayerType": "gemm"}]}',
        '{"Layers": [{"LayerType": "gemm", "Inputs": ["x"]}]}',
        '{"Layers": [{"LayerType": "gemm", "Inputs": 3}]}',
    ],
)
def test_what_the_inspector_says_otherwise_is_unknown(information: str) -> None:
    assert read_inspector(information) is None
