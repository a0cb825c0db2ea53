"""What an engine computes with, held against its graph: every form of a graph passes, and another graph's does not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from fp8q.core.errors import InputError
from fp8q.export.engine.expected_gemms import expected_gemms
from fp8q.export.engine.numbers import CODES, FACTORS, INPUT, Difference
from fp8q.export.engine.plan import EngineGemm, Kernel, Plan, read_plan
from fp8q.export.engine.proof import Proof, broken, prove
from fp8q.export.engine.second_codes import TERMS
from fp8q.export.lint.rules import Expectation
from fp8q.export.onnx_file.loading import load_graph
from fp8q.options import TWO

Engines = Callable[..., tuple[Any, bytes]]
TARGETS = ("sm89", "sm120")
PROFILES = ("prefill", "decode")
LAYER = "model.layers.0"
GATE, DOWN, OUT = f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.o_proj"
CACHE = dict.fromkeys((f"{LAYER}.self_attn.k", f"{LAYER}.self_attn.v"))


def proof_of(written: Any, plan: bytes, **pledged: Any) -> Proof:
    """A plan held against the graph that was `written`, with an FP8 cache unless told otherwise."""
    promise = Expectation(dict.fromkeys(written.modules), **({"cache": CACHE} | pledged))
    return prove(plan, read_plan(plan), load_graph(written.path), promise, PROFILES)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fp8_cache": False},
        {"bias": True},
        {"transposed": False},
        {"compute": TensorProto.FLOAT16},
        {"hidden": 172},
        {"hidden": 65},
        {"layers": 2},
        {"wide": (f"{LAYER}.self_attn.q_proj",)},
        {"max_batch": 1},
        {"max_batch": 1, "fp8_cache": False, "hidden": 172, "layers": 2},
    ],
    ids=str,
)
def test_an_engine_of_the_same_graph_has_all_its_numbers(
    engine_of: Engines, target: str, options: dict[str, Any]
) -> None:
    written, plan = engine_of(target, **options)
    cache = {} if "fp8_cache" in options else CACHE
    proof = proof_of(written, plan, cache=cache)
    assert (proof.differences, proof.compared) == ((), frozenset(written.modules))
    assert [proof.matching(what) for what in (CODES, FACTORS, INPUT)] == [len(written.modules)] * 3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("max_batch", [1, 4])
def test_an_engine_of_two_terms_has_all_its_numbers_and_one_of_one_term_is_told(
    engine_of: Engines, target: str, max_batch: int
) -> None:
    one_term = {(module, TERMS, "its codes have the rows of one term") for module in (GATE, DOWN, OUT)}
    for two_terms in (True, False):
        written, plan = engine_of(target, max_batch, two_terms=two_terms)
        proof = proof_of(written, plan, forms=dict.fromkeys(written.modules, TWO))
        found = {(each.module, each.what, each.found) for each in broken(proof.differences)}
        assert found == set() if two_terms else found >= one_term
        assert [proof.matching(what) for what in (CODES, FACTORS, INPUT)] == [len(written.modules)] * 3


@pytest.mark.parametrize("target", TARGETS)
def test_a_scale_inside_a_kernels_code_cannot_be_told_and_does_not_fail(engine_of: Engines, target: str) -> None:
    written, plan = engine_of(target, plain_attention=True, key_value_heads=4)
    proof = proof_of(written, plan)
    kernels = ("_gemm_mha_v2", "_gemv_mha_v1")
    assert proof.differences == tuple(
        Difference(OUT, profile, INPUT, f"{kernel} takes no constant that could be it", "", told=False)
        for profile, kernel in zip(PROFILES, kernels, strict=True)
    )
    assert str(proof.differences[0]) == (
        f"{OUT}: its input scale cannot be told, _gemm_mha_v2 takes no constant that could be it"
    )
    assert broken(proof.differences) == []
    assert [proof.matching(what) for what in (CODES, FACTORS, INPUT)] == [7, 7, 6]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scales_too", [False, True])
@pytest.mark.parametrize("max_batch", [1, 4])
def test_two_layers_that_are_exchanged_are_told_whatever_their_scales_are(
    engine_of: Engines, edited: Callable[..., None], tmp_path: Path, target: str, scales_too: bool, max_batch: int
) -> None:
    """The engine is the same in both cases: of layers whose scales are equal only the codes differ."""
    written, plan = engine_of(target, max_batch, layers=2)
    second = DOWN.replace(".0.", ".1.")
    taken = {DOWN: second, second: DOWN}

    def exchange(model: ModelProto) -> None:
        for node in model.graph.node:
            if (module := node.name.removesuffix(".weight.dequantize")) in taken:
                node.input[0] = f"{taken[module]}.weight"
                node.input[1] = f"{taken[module] if scales_too else module}.weight_scale"

    graph = tmp_path / "model.onnx"
    graph.write_bytes(written.path.read_bytes())
    (tmp_path / "model.safetensors").hardlink_to(written.path.with_name("model.safetensors"))
    edited(graph, exchange)
    found = proof_of(replace(written, path=graph), plan).differences
    codes = [each for each in found if each.what == CODES]
    assert [(each.module, each.profile) for each in codes] == [
        (module, profile) for module in (DOWN, second) for profile in PROFILES
    ]
    assert codes[0].found == f"its GEMM multiplies the codes of {second}"
    assert {each.what for each in found} == ({CODES, FACTORS} if scales_too else {CODES})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("max_batch", [1, 4])
def test_one_other_code_is_counted(engine_of: Engines, tmp_path: Path, target: str, max_batch: int) -> None:
    written, plan = engine_of(target, max_batch)
    (tmp_path / "model.onnx").write_bytes(written.path.read_bytes())
    data = bytearray(written.path.with_name("model.safetensors").read_bytes())
    codes = next(expected_gemms(load_graph(written.path), [GATE])).codes.T.tobytes()
    data[data.find(codes) + 1000] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    found = proof_of(replace(written, path=tmp_path / "model.onnx"), plan).differences
    assert [str(each) for each in broken(found)] == [
        f"{GATE}: its GEMM multiplies 1 codes of 32768 that are others, and the run has its own in model.onnx"
    ]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("max_batch", [1, 4])
def test_factors_are_compared_channel_by_channel(
    engine_of: Engines, tmp_path: Path, target: str, max_batch: int
) -> None:
    written, plan = engine_of(target, max_batch)
    scales = written.weight_scales[GATE].copy()
    (tmp_path / "model.onnx").write_bytes(written.path.read_bytes())
    data = bytearray(written.path.with_name("model.safetensors").read_bytes())
    place = data.find(scales.tobytes()) + 4 * 77
    data[place : place + 4] = np.float32(scales[77] * 2).tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    found = proof_of(replace(written, path=tmp_path / "model.onnx"), plan).differences
    own = np.float32(written.input_scales[GATE]) * scales[77]
    assert [str(each) for each in broken(found)] == [
        f"{GATE}: its GEMM is scaled by {own:.9g} in channel 77, and the run has s_x · s_w = {2 * own:.9g}"
    ]


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("module", [GATE, DOWN])
def test_an_input_scale_that_is_the_next_bf16_number_is_told(
    engine_of: Engines, edited: Callable[..., None], tmp_path: Path, max_batch: int, module: str
) -> None:
    """By 0.4 to 0.8 %: the scale itself, and the factors that it is in."""
    written, plan = engine_of("sm89", max_batch)
    name, own = f"{module}.input_scale", np.float32(written.input_scales[module])
    following = (own.view(np.uint32) + np.uint32(1 << 16)).view(np.float32)
    assert 1.003 < following / own < 1.008

    def change(model: ModelProto) -> None:
        (stored,) = (each for each in model.graph.initializer if each.name == name)
        stored.CopyFrom(numpy_helper.from_array(np.asarray(following), name))

    graph = tmp_path / "model.onnx"
    graph.write_bytes(written.path.read_bytes())
    (tmp_path / "model.safetensors").hardlink_to(written.path.with_name("model.safetensors"))
    edited(graph, change)
    found = proof_of(replace(written, path=graph), plan).differences
    readers = {DOWN} if module == DOWN else {GATE, GATE.replace("gate", "up")}
    assert {(each.module, each.what, each.told) for each in found} == {
        (reader, what, True) for reader in readers for what in (FACTORS, INPUT)
    }
    for difference in (each for each in found if each.what == INPUT):
        assert difference.expected == f"{following:.6g}"
        assert difference.found == f"its input is quantized with the scale {own:.6g}"
    assert {each.what for each in broken(found)} == {FACTORS, INPUT}


@pytest.mark.parametrize("target", TARGETS)
def test_a_cache_of_another_type_is_told_either_way(engine_of: Engines, target: str) -> None:
    fp8, bf16 = engine_of(target), engine_of(target, fp8_cache=False)
    for (graph, cache), (_, plan), found, wanted in (
        ((fp8[0], CACHE), bf16, "bf16", "fp8"),
        ((bf16[0], {}), fp8, "fp8", "bf16"),
    ):
        differences = proof_of(graph, plan, cache=cache).differences
        ends = [f"{end}_key_values.0.{part}" for end in ("past", "new") for part in ("key", "value")]
        types = {(each.module, each.profile, each.found, each.expected) for each in differences if each.what == "type"}
        assert types == {(end, profile, f"it is {found}", wanted) for end in ends for profile in PROFILES}


def test_attention_on_codes_that_nobody_promised_or_that_is_missing_is_told(engine_of: Engines) -> None:
    written, plan = engine_of("sm89")
    scores, values = (f"{LAYER}.self_attn.attention_{product}" for product in ("scores", "values"))
    found = proof_of(written, plan, attention={scores: (0.5, 0.5), values: (0.5, 0.5)}).differences
    assert [str(each) for each in broken(found)] == [
        f"{node}: the engine has no such GEMM, and the run has one on FP8 codes" for node in (scores, values)
    ]
    scores = f"{LAYER}.att.attention_scores"  # as many letters as the GEMM that it is put in the place of
    named = plan.replace(f"{DOWN}.matmul".encode(), scores.encode())
    found = proof_of(replace(written, modules=written.modules[:-1]), named).differences
    assert [str(each) for each in broken(found)] == [
        f"{scores}: the GEMM is fp8 × fp8 -> fp32, and the run has attention not in FP8"
    ]


def test_attention_that_is_one_kernel_is_told_by_its_quantizers(engine_of: Engines) -> None:
    """As OPT's is in decoding: whether it rounds to codes is told, the types that it multiplies are not."""
    graph, scores = load_graph(engine_of("sm89")[0].path), "a.attention_scores"
    promise = Expectation({"a.o": None}, attention={scores: (0.5, 0.5)})
    products = {0: (EngineGemm(("a.o.matmul",), ("fp8", "fp8"), "fp32"),)}
    for layers, wanted in (
        ((scores, "a.q.attention_quantize"), []),
        ((scores,), [f"{scores}: mha attends in it without codes, and the run has FP8 on both sides"]),
    ):
        plan = Plan(products, "inspector", {0: (Kernel("mha", layers, ("bf16",), ("bf16",)),)})
        proof = prove(b"", plan, graph, promise, ["prefill"])
        assert proof.compared is None
        assert [str(each) for each in broken(proof.differences)] == wanted
        assert [each.what for each in proof.differences] == ["types" if wanted else "types inside a kernel"]


def test_a_plan_without_its_table_of_constants_tells_no_number(engine_of: Engines) -> None:
    written, plan = engine_of("sm89")
    spoilt = plan[:96] + bytes(16) + plan[112:]
    proof = proof_of(written, spoilt)
    assert [proof.matching(what) for what in (CODES, FACTORS, INPUT)] == [0, 0, 0]
    assert str(broken(proof.differences)[0]) == (
        f"{written.modules[0]}: its codes cannot be told, its constants do not read"
    )


def test_products_that_are_wide_or_narrow_are_not_compared(engine_of: Engines) -> None:
    written, plan = engine_of("sm89", wide_inputs=(DOWN,))
    proof = proof_of(written, plan)
    assert (proof.compared, proof.differences) == (frozenset(written.modules) - {DOWN}, ())
    written, plan = engine_of("sm89", compute=TensorProto.BFLOAT16, scale_type=TensorProto.BFLOAT16)
    assert proof_of(written, plan).compared == frozenset()


def test_codes_that_are_cut_off_are_one_line(engine_of: Engines, tmp_path: Path) -> None:
    written, plan = engine_of("sm89")
    (tmp_path / "model.onnx").write_bytes(written.path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(written.path.with_name("model.safetensors").read_bytes()[:100_000])
    with pytest.raises(InputError, match=r"model\.safetensors: is cut short: the codes of model\..* end at byte \d+"):
        proof_of(replace(written, path=tmp_path / "model.onnx"), plan)
