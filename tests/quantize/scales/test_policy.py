"""Which GEMMs run in FP8, by name: what is asked for, what cannot be, and what a server makes of the choice."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.core.errors import InputError
from fp8q.options import BF16, ONE, TWO, Form, FormRule, RescaleOptions, ScaleOptions
from fp8q.quantize.scales.decisions import Scales, Skipped, TensorScale
from fp8q.quantize.scales.policy import (
    ModelGemms,
    check_measured,
    check_tail_length,
    complete_groups,
    few_tokens_note,
    mixed_experts_warning,
    mixed_group_warning,
    module_forms,
    rule_modules,
    select,
    taken_along,
)

NAMES = ("l.0.attn.q_proj", "l.0.attn.k_proj", "l.0.mlp.up_proj", "l.0.mlp.conv", "lm_head")
PRODUCTS = ModelGemms(NAMES, "lm_head", {"l.0.mlp.conv": "Conv1d"})
HEAD = "output head: its error would go straight into the logits"
CONV = "of class Conv1d, which does not compute as a linear layer does"


def reasons(skip: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> dict[str, str]:
    """The modules that stay in BF16 and why."""
    return {name: skipped.reason for name, skipped in select(PRODUCTS, skip, only)[1].items()}


def test_all_linear_layers_but_the_head_run_in_fp8_unless_asked_otherwise() -> None:
    assert select(PRODUCTS, ())[0] == ["l.0.attn.q_proj", "l.0.attn.k_proj", "l.0.mlp.up_proj"]
    assert reasons() == {"l.0.mlp.conv": CONV, "lm_head": HEAD}


def test_second_moments_of_few_tokens_are_warned_of() -> None:
    widths = {"l.0.mlp.up_proj": 576, "l.0.mlp.down_proj": 1536, "l.0.mlp.experts.3.w2": 4096, "lm_head": 4096}
    gemms = replace(PRODUCTS, widths=widths)
    gptq, sequential = ScaleOptions(weight_rounding="gptq"), ScaleOptions(weight_rounding="sequential")
    assert few_tokens_note(gemms, gptq, 36, 256) is None, "six times 1,536 are 9,216"
    assert few_tokens_note(gemms, ScaleOptions(weight_rounding="nearest"), 1, 10) is None
    assert few_tokens_note(gemms, sequential, 35, 256) == (
        "--weight-rounding sequential: 8,960 calibration tokens are few for inputs of 1,536 numbers, as that of "
        "l.0.mlp.down_proj: codes fit other text less than they could; --samples 36 takes the 9,216 that they want"
    )
    left_in_bf16 = replace(gptq, skip=("*.down_proj",))
    assert few_tokens_note(gemms, left_in_bf16, 14, 256) is None, "six times 576 are 3,456"


def test_what_transformers_keeps_in_fp32_is_not_quantized() -> None:
    chosen, skipped = select(replace(PRODUCTS, fp32=frozenset({"l.0.attn.k_proj"})), ())
    assert chosen == ["l.0.attn.q_proj", "l.0.mlp.up_proj"]
    assert skipped["l.0.attn.k_proj"].reason == ("kept in FP32 by transformers, which would read its codes as numbers")


def test_only_keeps_what_no_pattern_names_in_bf16() -> None:
    assert select(PRODUCTS, (), ("*.mlp.*",))[0] == ["l.0.mlp.up_proj"]
    left_out = "not in --only *.mlp.*"
    assert reasons(only=("*.mlp.*",)) == {
        "l.0.attn.q_proj": left_out,
        "l.0.attn.k_proj": left_out,
        "l.0.mlp.conv": CONV,
        "lm_head": HEAD,
    }


def test_skip_takes_out_of_what_only_names() -> None:
    assert select(PRODUCTS, ("*.q_proj",), ("*.attn.*", "*.up_proj"))[0] == ["l.0.attn.k_proj", "l.0.mlp.up_proj"]
    assert reasons(("*.q_proj",), ("*.attn.*",))["l.0.attn.q_proj"] == "stays in BF16 (--skip *.q_proj)"


@pytest.mark.parametrize("option", ["skip", "only"])
def test_a_pattern_that_matches_nothing(option: str) -> None:
    with pytest.raises(InputError) as refused:
        select(PRODUCTS, **{"skip": (), option: ("*.qproj",)})
    assert str(refused.value) == (
        f"--{option} *.qproj: matches no module; names are like l.0.attn.q_proj, l.0.attn.k_proj, "
        "l.0.mlp.up_proj, l.0.mlp.conv"
    )


def test_two_terms_are_for_what_is_quantized_and_a_group_is_whole() -> None:
    chosen = select(PRODUCTS, ("*.up_proj",))[0]
    assert rule_modules(FormRule(TWO, "*.q_proj", "--two-terms *.q_proj"), PRODUCTS, chosen) == ["l.0.attn.q_proj"]
    groups = [["l.0.attn.q_proj", "l.0.attn.k_proj"], ["l.0.mlp.up_proj"]]
    assert complete_groups(["l.0.attn.k_proj"], groups) == ["l.0.attn.q_proj", "l.0.attn.k_proj"]
    assert taken_along(("*.q_proj",), ["l.0.attn.q_proj", "l.0.attn.k_proj"]) == ["l.0.attn.k_proj"]
    assert taken_along((), ["l.0.attn.q_proj"]) == []
    for pattern, message in {
        "*.qproj": "matches no module; names are like l.0.attn.q_proj, l.0.attn.k_proj, l.0.mlp.up_proj, l.0.mlp.conv",
        "*.up_proj": "all that it matches stays in BF16; name other modules",
    }.items():
        with pytest.raises(InputError) as refused:
            rule_modules(FormRule(TWO, pattern, f"--two-terms {pattern}"), PRODUCTS, chosen)
        assert str(refused.value) == f"--two-terms {pattern}: {message}"


def test_the_last_form_that_matches_counts_and_older_options_spell_the_same() -> None:
    chosen = select(PRODUCTS, ())[0]
    groups = [["l.0.attn.q_proj", "l.0.attn.k_proj"], ["l.0.mlp.up_proj"]]
    tail = Form("tail", 64)

    def forms(*rules: str, **older: Any) -> dict[str, Form]:
        return module_forms(ScaleOptions(form=rules, **older), PRODUCTS, chosen, groups)

    def attention(form: Form, rest: Form = ONE) -> dict[str, Form]:
        return dict.fromkeys(groups[0], form) | dict.fromkeys(groups[1], rest)

    everywhere = dict.fromkeys(chosen, ONE)
    assert forms() == forms("one") == everywhere
    assert forms(activation_terms=2) == forms("two") == dict.fromkeys(chosen, TWO)
    assert forms(activation_terms="tail", exact_tail=8) == forms("tail:8") == dict.fromkeys(chosen, Form("tail", 8))
    assert forms(activation_terms="bf16") == forms("bf16") == dict.fromkeys(chosen, BF16)
    assert forms(tail=("*.q_proj",)) == forms("*.q_proj=tail") == attention(tail)
    assert forms(activation_terms="tail", two_terms=("*.k_proj",)) == attention(TWO, tail)
    assert forms("tail", "*.k_proj=two") == attention(TWO, tail)
    assert forms(tail=("*.q_proj",), two_terms=("*.k_proj",)) == attention(TWO)
    assert forms("*.k_proj=two", "*.q_proj=tail:64") == attention(tail)
    assert forms(activation_terms=2, tail=("*.up_proj",)) == attention(TWO, tail)
    assert forms(activation_terms="bf16", two_terms=("*.k_proj",)) == attention(TWO, BF16)
    assert forms(two_terms=("*.k_proj",), bf16_input=("*.q_proj",)) == attention(BF16)
    assert forms("*.up_proj=bf16", activation_terms="tail") == attention(tail, BF16)
    assert forms("tail:8", "*.up_proj=tail:16")["l.0.mlp.up_proj"] == Form("tail", 16)


NO_FORM = "is no form; give one of one, two, tail, dynamic, block, bf16 or tail:N, or PATTERN=FORM"


@pytest.mark.parametrize(
    ("message", "given"),
    {
        f"--form three: {NO_FORM}": {"form": ("three",)},
        f"--form *.up=: {NO_FORM}": {"form": ("*.up=",)},
        f"--form tail:0: {NO_FORM}": {"form": ("tail:0",)},
        "--form *.up=two: --form tail:8 comes later and is for every module, and the last that matches counts; give "
        "that one first, or leave one of them out": {"form": ("*.up=two", "tail:8")},
        "--two-terms *.up: --form tail:8 is for every module, and the last that matches counts; give `--form` alone, "
        "with the form for every module first": {"form": ("tail:8",), "two_terms": ("*.up",)},
        "--inherit: takes codes and scales as they were given, and --form bf16 chooses others; leave one of them out "
        "(--no-inherit)": {"form": ("bf16",), "inherit": True},
    }.items(),
)
def test_rules_that_say_nothing_are_refused(message: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        ScaleOptions(**given)
    assert str(refused.value) == message


def test_scales_takes_forms_in_the_place_of_all_that_the_run_has() -> None:
    older = ScaleOptions(activation_terms="tail", exact_tail=16, bf16_input=("*.up",), skip=("a",))
    assert RescaleOptions(form=("two",)).over(older) == ScaleOptions(form=("two",), skip=("a",))
    assert RescaleOptions(form=("",)).over(older) == ScaleOptions(skip=("a",))
    newer = ScaleOptions(form=("tail:16", "*.up=bf16"))
    assert RescaleOptions(skip=("a",)).over(newer) == replace(newer, skip=("a",))
    with pytest.raises(InputError) as refused:
        RescaleOptions(two_terms=("*.up",)).over(newer)
    assert str(refused.value) == (
        "--two-terms: is an older spelling of --form, and the run has --form tail:16; give the forms of all inputs by "
        "--form"
    )


def test_a_tail_is_shorter_than_the_longest_call() -> None:
    options = ScaleOptions(activation_terms="tail", exact_tail=512)
    check_tail_length(options, 513)
    check_tail_length(options, None)
    check_tail_length(ScaleOptions(), 16)
    with pytest.raises(InputError) as refused:
        check_tail_length(options, 512)
    assert str(refused.value) == (
        "--exact-tail 512: the model has 512 positions, so every call would be in two terms throughout; give fewer, or "
        "--activation-terms 2"
    )
    with pytest.raises(InputError) as refused:
        check_tail_length(ScaleOptions(form=("*.up_proj=tail:512",)), 512)
    assert str(refused.value) == (
        "--form *.up_proj=tail:512: the model has 512 positions, so every call would be in two terms throughout; give "
        "fewer, or the form two"
    )


@pytest.mark.parametrize("only", ["lm_head", "*.conv"])
def test_nothing_left_is_a_failure(only: str) -> None:
    with pytest.raises(InputError) as refused:
        select(PRODUCTS, (), (only,))
    assert str(refused.value) == (
        "all 5 GEMMs stay in BF16, so there is nothing to quantize; skip fewer with --skip, or name more with --only"
    )


@given(st.lists(st.sampled_from(["*.attn.*", "*.q_proj", "*.up_proj", "*"]), min_size=1, max_size=3))
def test_every_product_is_chosen_or_has_a_reason(only: list[str]) -> None:
    chosen, skipped = select(PRODUCTS, (), only)
    assert set(chosen) | skipped.keys() == set(NAMES)
    assert not set(chosen) & skipped.keys()


SCALE = TensorScale(method="amax", amax=1.0, clip=1.0, scale=1 / 448, saturation=0.0, underflow=0.0, sqnr_db=30.0)
GROUPS = [["l.0.attn.q_proj", "l.0.attn.k_proj", "l.0.attn.v_proj", "l.0.mlp.fc"], ["l.0.attn.o_proj"]]


def scales(*skipped: str) -> Scales:
    """Scales in which these modules stay in BF16."""
    fp8 = {name: SCALE for members in GROUPS for name in members if name not in skipped}
    return Scales(weights={}, activations=fp8, skipped=dict.fromkeys(skipped, Skipped(reason="asked for")))


@pytest.mark.parametrize(
    "skipped", [(), ("l.0.mlp.fc",), ("l.0.attn.o_proj",), ("l.0.attn.q_proj", "l.0.attn.k_proj", "l.0.attn.v_proj")]
)
def test_whole_families_in_one_type_are_nothing_to_warn_of(skipped: tuple[str, ...]) -> None:
    assert mixed_group_warning(GROUPS, scales(*skipped)) is None


def test_a_family_in_two_types_is_what_vllm_refuses() -> None:
    assert mixed_group_warning(GROUPS, scales("l.0.attn.q_proj")) == (
        "l.0.attn.q_proj in BF16 beside l.0.attn.k_proj, l.0.attn.v_proj in FP8: vLLM makes one GEMM of them and "
        "refuses such a checkpoint; "
        "keep all of a group in BF16, or none, if vLLM is to serve it"
    )
    more = [*GROUPS, ["l.1.mlp.gate_proj", "l.1.mlp.up_proj"]]
    assert " in FP8, and so in 1 more such groups: " in str(
        mixed_group_warning(more, scales("l.0.attn.q_proj", "l.1.mlp.up_proj"))
    )


EXPERTS = "l.0.mlp.experts"
PARTS = ("gate_proj", "up_proj", "down_proj")


def layer_scales(layers: int, *wide: str) -> Scales:
    """Scales of layers of two experts in which the GEMMs that end so stay in BF16."""
    names = [f"l.{layer}.mlp.experts.{n}.{part}" for layer in range(layers) for n in range(2) for part in PARTS]
    skipped = [name for name in names if name.endswith(wide)]
    return Scales(
        weights={},
        activations={name: SCALE for name in names if name not in skipped},
        skipped=dict.fromkeys(skipped, Skipped(reason="asked for")),
    )


def test_experts_of_a_layer_in_two_types_are_what_vllm_takes_for_one() -> None:
    assert mixed_experts_warning([EXPERTS], layer_scales(1, *(f"experts.1.{part}" for part in PARTS))) == (
        "l.0.mlp.experts: 3 of 6 GEMMs of its experts in BF16 (1.gate_proj, 1.up_proj, 1.down_proj) beside others "
        "in FP8: vLLM takes all experts of a layer to be stored as expert 0 is, and refuses such a checkpoint or reads "
        "it wrong in silence; keep all experts of a layer in BF16, or none, if vLLM is to serve it"
    )
    layers = [f"l.{layer}.mlp.experts" for layer in range(3)]
    assert " beside others in FP8, and so in 1 more layer: " in str(
        mixed_experts_warning(layers[:2], layer_scales(2, "1.down_proj"))
    )
    assert " in BF16 (0.gate_proj, 0.up_proj, 1.gate_proj …) beside others in FP8, and so in 2 more layers: " in str(
        mixed_experts_warning(layers, layer_scales(3, "gate_proj", "up_proj"))
    )


@pytest.mark.parametrize("wide", [(), PARTS])
def test_whole_layers_of_experts_in_one_type_are_nothing_to_warn_of(wide: tuple[str, ...]) -> None:
    both = layer_scales(1, *wide)
    assert mixed_experts_warning([EXPERTS], both) is None
    other = layer_scales(2)
    mixed = Scales(
        weights={},
        activations=both.activations | {name: SCALE for name in other.activations if name.startswith("l.1.")},
        skipped=both.skipped,
    )
    assert mixed_experts_warning([EXPERTS, "l.1.mlp.experts"], mixed) is None


def test_what_is_split_inside_an_expert_is_told_once() -> None:
    split, pair = layer_scales(1, "1.up_proj"), [f"{EXPERTS}.1.gate_proj", f"{EXPERTS}.1.up_proj"]
    assert "1.up_proj in BF16 beside" in str(mixed_group_warning([pair], split))
    assert mixed_group_warning([pair], split, [EXPERTS]) is None
    assert "1 of 6 GEMMs of its experts in BF16 (1.up_proj)" in str(mixed_experts_warning([EXPERTS], split))


SEEING = ModelGemms(("l.0.up", "v.0.fc1", "v.0.fc2"), None, {}, vision=frozenset({"v.0.fc1", "v.0.fc2", "v.patch"}))


@pytest.mark.parametrize("rules", [("tail:8",), ("one", "v.*=tail:8", "l.*=tail:8")])
def test_a_tail_is_one_code_where_there_are_no_last_positions(rules: tuple[str, ...]) -> None:
    groups = [["l.0.up"], ["v.0.fc1"], ["v.0.fc2"]]
    forms = module_forms(ScaleOptions(form=rules, vision=("*",)), SEEING, SEEING.names, groups)
    assert forms == {"l.0.up": Form("tail", 8), "v.0.fc1": ONE, "v.0.fc2": ONE}


def test_patterns_of_all_options_choose_among_what_vision_names() -> None:
    assert SEEING.named_vision == ["v.0.fc1", "v.0.fc2"]
    assert select(SEEING, (), ("v.*",))[0] == ["v.0.fc1", "v.0.fc2"]
    assert select(SEEING, ("*.fc2",))[0] == ["l.0.up", "v.0.fc1"]
    with pytest.raises(InputError) as error:
        select(SEEING, ("*.patch",))
    assert str(error.value) == (
        "--skip *.patch: matches only modules that text does not reach, such as v.patch, and they stay in BF16; name "
        "them by --vision too, which takes rows with images, or leave it out"
    )


def test_what_was_not_measured_has_no_scale() -> None:
    options = ScaleOptions(vision=("v.*",))
    check_measured(SEEING, options, {"l.0.up", "v.0.fc1", "v.0.fc2"})
    with pytest.raises(InputError) as error:
        check_measured(SEEING, options, {"l.0.up", "v.0.fc1"})
    assert str(error.value) == (
        "--vision v.*: the input of v.0.fc2 was not measured; use `fp8q calibrate` with it and rows with images, or "
        "leave it out"
    )
