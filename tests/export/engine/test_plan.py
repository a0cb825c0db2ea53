"""What an engine is read to run, on real engines: every one of these is built here, and some are built to deceive."""

from collections.abc import Callable
from typing import Any

import pytest
from onnx import TensorProto

from fp8q.export.engine.plan import EngineGemm, Plan, evidence, modules_by_types, read_plan
from fp8q.export.onnx_file import names

Engines = Callable[..., tuple[Any, bytes]]
TARGETS = ("sm89", "sm120")
MODULES = tuple(
    f"model.layers.0.{name}"
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
)
DOWN = "model.layers.0.mlp.down_proj"


def promise(modules: tuple[str, ...] = MODULES) -> dict[str, str]:
    return {names.matmul(module): module for module in modules}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="per channel, FP8 cache"),
        pytest.param({"fp8_cache": False}, id="BF16 cache"),
        pytest.param({"bias": True}, id="bias"),
        pytest.param({"transposed": False}, id="weights [in, out]"),
        pytest.param({"plain_attention": True, "key_value_heads": 4}, id="plain attention"),
        pytest.param({"compute": TensorProto.FLOAT16}, id="FP16"),
        pytest.param({"weight_scale": "mul", "bias": True}, id="scales behind the GEMM"),
        pytest.param({"weight_scale": "mul", "compute": TensorProto.FLOAT16}, id="scales behind it, FP16"),
    ],
)
def test_every_product_of_a_good_graph_is_fp8_in_both_profiles_and_answers_in_fp32(
    engine_of: Engines, target: str, options: dict[str, object]
) -> None:
    written, engine = engine_of(target, **options)
    found = evidence(read_plan(engine), promise(), profiles=2)
    assert written.modules == MODULES
    assert (found.kind, found.fp8, found.not_fp8, found.narrow) == ("plan", frozenset(MODULES), {}, frozenset())


def test_modules_are_counted_by_their_own_products_and_not_by_attentions() -> None:
    wide, codes = ("bf16", "bf16"), ("int8", "int8")
    products = (
        EngineGemm(("a.q.matmul", "a.k.matmul"), codes, "fp32"),
        EngineGemm(("a.attention_scores",), wide, "bf16"),
        EngineGemm(("lm_head.matmul",), wide, "bf16"),
    )
    assert modules_by_types(Plan({0: products})) == {"int8 × int8 -> fp32": 2, "bf16 × bf16 -> bf16": 1}


def test_products_of_one_input_that_the_builder_merges_count_each(engine_of: Engines) -> None:
    plan = read_plan(engine_of("sm89")[1])
    assert plan is not None
    merged = [product for product in plan.profiles[0] if len(product.nodes) > 1]
    assert sorted(len(product.nodes) for product in merged) == [2, 3]  # gate and up; q, k and v
    assert {product.operands for product in merged} == {("fp8", "fp8")}
    apart = read_plan(engine_of("sm120")[1])  # where nothing is merged
    assert apart is not None
    assert {len(product.nodes) for product in apart.profiles[0]} == {1}


@pytest.mark.parametrize("target", TARGETS)
def test_the_output_head_is_a_wide_product(engine_of: Engines, target: str) -> None:
    plan = read_plan(engine_of(target)[1])
    assert plan is not None
    for profile in (0, 1):
        assert [str(product) for product in plan.gemms("lm_head.matmul", profile)] == ["bf16 × bf16 -> bf16"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_with_fp8_weights_alone_has_no_fp8_product(engine_of: Engines, target: str) -> None:
    _, engine = engine_of(target, fp8_inputs=False)
    found = evidence(read_plan(engine), promise(), profiles=2)
    assert (found.kind, found.fp8) == ("plan", frozenset())
    assert dict(found.not_fp8) == dict.fromkeys(MODULES, "bf16 × bf16 -> bf16 in profile 0")


@pytest.mark.parametrize("target", TARGETS)
def test_a_bf16_graph_has_no_fp8_product(engine_of: Engines, target: str) -> None:
    _, engine = engine_of(target, fp8=False, fp8_cache=False)
    found = evidence(read_plan(engine), promise(), profiles=2)
    assert (found.kind, found.fp8) == ("plan", frozenset())
    assert dict(found.not_fp8) == dict.fromkeys(MODULES, "bf16 × bf16 -> bf16 in profile 0")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("module", ["model.layers.0.self_attn.k_proj", DOWN])
def test_one_missing_qdq_pair_is_found_and_named(engine_of: Engines, target: str, module: str) -> None:
    _, engine = engine_of(target, wide_inputs=(module,))
    found = evidence(read_plan(engine), promise(), profiles=2)
    assert found.fp8 == frozenset(MODULES) - {module}
    assert dict(found.not_fp8) == {module: "bf16 × bf16 -> bf16 in profile 0"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_module_kept_in_bf16_is_wide_and_its_group_is_not(engine_of: Engines, target: str) -> None:
    _, engine = engine_of(target, wide=("model.layers.0.self_attn.q_proj",))
    found = evidence(read_plan(engine), promise(MODULES[1:]), profiles=2)
    assert (found.fp8, found.not_fp8) == (frozenset(MODULES[1:]), {})
    assert dict(evidence(read_plan(engine), promise(), profiles=2).not_fp8) == {
        MODULES[0]: "bf16 × bf16 -> bf16 in profile 0"
    }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("compute", [TensorProto.BFLOAT16, TensorProto.FLOAT16])
def test_scales_narrower_than_fp32_show_in_the_type_of_the_result(
    engine_of: Engines, target: str, compute: int
) -> None:
    _, engine = engine_of(target, compute=compute, scale_type=compute)
    found = evidence(read_plan(engine), promise(), profiles=2)
    assert found.fp8 == frozenset(MODULES)
    assert found.narrow == frozenset(MODULES)


def test_per_tensor_weights_answer_in_the_compute_type_whatever_their_scale_is(engine_of: Engines) -> None:
    for scale_type in (TensorProto.FLOAT, TensorProto.BFLOAT16):
        found = evidence(
            read_plan(engine_of("sm89", per_channel=False, fp8_cache=False, scale_type=scale_type)[1]),
            promise(),
            profiles=2,
        )
        assert (found.fp8, found.narrow) == (frozenset(MODULES), frozenset(MODULES))


def test_an_engine_of_another_model_is_unknown(engine_of: Engines) -> None:
    _, engine = engine_of("sm89")
    found = evidence(read_plan(engine), promise(("transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj")), profiles=2)
    assert (found.kind, found.fp8) == ("unknown", frozenset())
    assert found.unknown["transformer.h.0.mlp.c_fc"] == "the engine shows no such GEMM in profile 0"


def test_a_promised_layer_that_the_engine_lacks_is_wide(engine_of: Engines) -> None:
    _, engine = engine_of("sm89")
    found = evidence(read_plan(engine), promise((*MODULES, "model.layers.1.mlp.down_proj")), profiles=2)
    assert (found.kind, found.fp8) == ("plan", frozenset(MODULES))
    assert dict(found.not_fp8) == {"model.layers.1.mlp.down_proj": "the engine shows no such GEMM in profile 0"}


def test_an_engine_with_fewer_profiles_than_asked_for_is_unknown(engine_of: Engines) -> None:
    found = evidence(read_plan(engine_of("sm89")[1]), promise(), profiles=3)
    assert (found.kind, found.fp8) == ("unknown", frozenset())
    assert found.unknown[DOWN] == "the engine shows no GEMM of profile 2"


def test_an_engine_with_more_profiles_than_expected_is_unknown(engine_of: Engines) -> None:
    found = evidence(read_plan(engine_of("sm89")[1]), promise(), profiles=1)
    assert (found.kind, found.fp8) == ("unknown", frozenset())
    assert found.unknown[DOWN] == "the engine shows GEMMs of profile 1, and 1 are expected"


def test_an_engine_whose_text_does_not_read_is_unknown(engine_of: Engines) -> None:
    _, engine = engine_of("sm89")
    for foreign in (
        b"",
        b"\x7fELF" * 100,
        engine.replace(b"fully_connected={", b"fully_combined_={"),
        engine.replace(b"header {", b"HEADER {"),
    ):
        assert read_plan(foreign) is None
    found = evidence(None, promise(), profiles=2)
    assert (found.kind, found.not_fp8, found.unknown[DOWN]) == ("unknown", {}, "the engine does not read")


def test_an_operand_whose_type_is_not_told_is_not_fp8(engine_of: Engines) -> None:
    _, engine = engine_of("sm89")
    found = evidence(read_plan(engine.replace(b"type=fp8_e4m3 }", b"type=fp8_e4m3!}")), promise(), profiles=2)
    assert (found.kind, found.fp8) == ("plan", frozenset())
    assert found.not_fp8[DOWN] == "unknown × unknown -> fp32 in profile 0"


def test_a_plan_is_read_from_any_buffer(engine_of: Engines) -> None:
    _, engine = engine_of("sm120")
    assert read_plan(engine) == read_plan(bytearray(engine)) == read_plan(memoryview(engine)) != None  # noqa: E711


def test_fp8_in_one_profile_is_not_enough() -> None:
    fp8, wide = (
        EngineGemm(("a.matmul",), ("fp8", "fp8"), "fp32"),
        EngineGemm(("a.matmul",), ("bf16", "fp8"), "bf16"),
    )
    found = evidence(Plan({0: (fp8,), 1: (wide,)}), {"a.matmul": "a"}, profiles=2)
    assert (found.fp8, dict(found.not_fp8)) == (frozenset(), {"a": "bf16 × fp8 -> bf16 in profile 1"})
    assert evidence(Plan({0: (fp8,), 1: (fp8, wide)}), {"a.matmul": "a"}, profiles=2).fp8 == frozenset()
