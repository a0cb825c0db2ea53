"""Schemes of modules, and their spelling in config.json."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.options import BF16, BLOCK, DYNAMIC, ONE, TWO, Form
from fp8q.quantize.scales.decisions import Scales, Skipped, TensorScale, WeightScales
from fp8q.quantize.scales.scheme import (
    Scheme,
    bf16_caches_in,
    form_fields,
    forms_in,
    in_two_codes,
    modules_in,
    tails_of,
)

FORMS = {"a": ONE, "b": TWO, "c": Form("tail", 16), "d": DYNAMIC, "e": BLOCK, "f": BF16}
FIELDS = {
    "two_terms": ["b", "c"],
    "tails": {"c": 16},
    "dynamic_inputs": ["d"],
    "block_inputs": ["e"],
    "bf16_inputs": ["f"],
    "wide_cache": ["layers.0.attn"],
}
forms = st.sampled_from([ONE, TWO, DYNAMIC, BLOCK, BF16]) | st.integers(1, 4096).map(lambda n: Form("tail", n))


def test_each_form_has_its_list_in_config_json() -> None:
    assert form_fields(FORMS, ["layers.0.attn"]) == FIELDS
    assert list(form_fields(FORMS, ["layers.0.attn"])) == list(FIELDS)
    assert form_fields({"a": ONE}) == {}


def test_the_lists_give_the_forms_again() -> None:
    assert forms_in(FIELDS) == {module: form for module, form in FORMS.items() if form != ONE}
    assert bf16_caches_in(FIELDS) == ["layers.0.attn"]


@given(st.dictionaries(st.text(min_size=1), forms))
def test_what_is_written_is_what_is_read(chosen: dict[str, Form]) -> None:
    read = forms_in(form_fields(chosen))
    assert {module: read.get(module, ONE) for module in chosen} == chosen
    assert read.keys() <= chosen.keys()


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        "two_terms",
        {"two_terms": 3, "tails": ["b"], "dynamic_inputs": {"d": 1}},
        {"two_terms": [1, None], "tails": {"c": 16}},
        {"bf16_inputs": "abc"},
    ],
)
def test_what_is_malformed_counts_as_absent(fields: Any) -> None:
    assert forms_in(fields) == {}
    assert bf16_caches_in(fields) == []


@pytest.mark.parametrize("positions", [0, -1, True, 1.5, "16", None])
def test_a_tail_of_no_length_is_two_codes_everywhere(positions: Any) -> None:
    assert forms_in({"two_terms": ["a"], "tails": {"a": positions, "unlisted": 16}}) == {"a": TWO}


def test_modules_are_listed_by_their_form() -> None:
    assert modules_in(FORMS, BF16, DYNAMIC) == ["d", "f"]
    assert in_two_codes(FORMS) == ["b", "c"]
    assert tails_of(FORMS) == {"c": 16}


@given(forms.filter(lambda form: form != BF16))
def test_a_scale_is_in_the_form_that_it_was_given(form: Form) -> None:
    plain = TensorScale(method="amax", amax=1.0, clip=1.0, scale=1.0, saturation=0.0, underflow=0.0, sqnr_db=30.0)
    assert plain.form == ONE
    assert plain.with_form(form).form == form
    assert plain.with_form(form).with_form(ONE) == plain


def test_scales_give_each_module_its_scheme() -> None:
    """Of a weight under one scale, one in blocks, one alone, and a module that stays in BF16."""
    weight = WeightScales(method="amax", axis=0, channels=4, scale_min=1.0, scale_max=1.0, sqnr_db=30.0)
    activation = TensorScale(
        method="amax", amax=1.0, clip=1.0, scale=1.0, saturation=0.0, underflow=0.0, sqnr_db=30.0, tail=16, terms=2
    )
    scales = Scales(
        weights={
            "a": weight.model_copy(update={"granularity": "tensor"}),
            "b": weight.model_copy(update={"granularity": "block"}),
            "c": weight,
        },
        activations={
            "a": activation,
            "b": activation.model_copy(update={"terms": 1, "tail": None, "dynamic": True, "block": True}),
        },
        bf16_inputs=["c"],
        skipped={"head": Skipped(reason="output head")},
    )
    assert scales.schemes == {
        "a": Scheme("tensor", Form("tail", 16)),
        "b": Scheme("block", BLOCK),
        "c": Scheme("channel", BF16),
        "head": Scheme(None, BF16, "output head"),
    }
