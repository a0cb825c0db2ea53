"""Options by name, as Python's functions take them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8q.cli.commands import app
from fp8q.core.errors import InputError
from fp8q.options import (
    CalibrateOptions,
    Clipping,
    ExportOptions,
    RescaleOptions,
    RunOptions,
    ScaleOptions,
    ValidateOptions,
)
from fp8q.options.settings import with_settings, with_settings_of_both


def test_names_go_to_the_class_that_has_them() -> None:
    options = with_settings(CalibrateOptions(seq_len=128), {"samples": 64, "method": "mse", "weight_rounding": "gptq"})
    assert options == CalibrateOptions(seq_len=128, samples=64, clip=Clipping("mse"), weight_rounding="gptq")
    run = with_settings(RunOptions(), {"samples": 8, "graph": False, "max_ppl_increase": "1%", "server": "vllm"})
    assert run.calibrate == CalibrateOptions(samples=8, server="vllm")
    assert not run.export.graph
    assert run.validate == ValidateOptions(max_ppl_increase=0.01)
    assert run.server == "vllm"


def test_a_preset_is_overridden_by_names_beside_it_and_names_the_form_of_a_run() -> None:
    options = with_settings(CalibrateOptions(), {"preset": "exact", "weight_rounding": "nearest", "samples": 64})
    assert options == CalibrateOptions(activation_terms="tail", weigh_first_token=True, bf16_weights=0.03, samples=64)
    assert with_settings(RunOptions(), {}).finds_form
    assert not with_settings(RunOptions(), {"preset": "fast"}).finds_form
    assert not with_settings(RunOptions(), {"form": ("one",)}).finds_form


@pytest.mark.parametrize(
    ("settings", "terms"),
    [
        ({}, "tail"),
        ({"server": "tensorrt"}, "tail"),
        ({"server": "vllm-plugin"}, "tail"),
        ({"server": "vllm"}, "bf16"),
        ({"server": "sglang"}, "bf16"),
        ({"server": "transformers"}, "bf16"),
        ({"server": "any"}, "bf16"),
        ({"graph": False}, "bf16"),
        ({"graph": False, "server": "vllm-plugin"}, "tail"),
        ({"graph": False, "server": "vllm-plugin", "activation_terms": 2}, 2),
    ],
)
def test_the_preset_exact_is_the_form_that_loses_least_in_the_server(settings: dict[str, Any], terms: object) -> None:
    asked = {"preset": "exact", **settings}
    of_run = with_settings(RunOptions(), asked).calibrate
    of_calibrate, _ = with_settings_of_both(CalibrateOptions(), ExportOptions(), asked)
    for options in (of_run, of_calibrate):
        assert options == CalibrateOptions(
            activation_terms=terms, weight_rounding="gptq", weigh_first_token=True, bf16_weights=0.03,  # type: ignore[arg-type]  # as the rows have it
            server=settings.get("server"),
        )  # fmt: skip
    assert with_settings(RunOptions(), asked | {"preset": "fast"}).calibrate.activation_terms in (1, 2)


def test_the_preset_exact_of_scales_alone_is_a_tail() -> None:
    assert with_settings(ScaleOptions(), {"preset": "exact"}).activation_terms == "tail"


def test_what_is_not_given_for_scales_stays_as_the_run_has_it() -> None:
    before = ScaleOptions(skip=("a",), weight_rounding="gptq")
    chosen = with_settings(RescaleOptions(), {"form": ("two",)}).over(before)
    assert chosen == ScaleOptions(skip=("a",), weight_rounding="gptq", form=("two",))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sample": 3}, "sample=: is no option here; did you mean samples or q_scale?"),
        ({"preset": "best"}, "preset='best': is none of fast, exact of these options"),
        ({"samples": 0}, "--samples 0: must be at least 1"),
    ],
)
def test_a_wrong_name_or_value_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        with_settings(CalibrateOptions(), settings)
    assert str(error.value) == said


def test_a_preset_of_options_without_one_is_refused() -> None:
    with pytest.raises(InputError, match="^preset='exact': is none of"):
        with_settings(ValidateOptions(), {"preset": "exact"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"samples": "32"}, "--samples '32': is text, not a whole number; give a whole number"),
        ({"samples": 3.5}, "--samples 3.5: is a number, not a whole number; give a whole number"),
        ({"samples": True}, "--samples True: is True or False, not a whole number; give a whole number"),
        ({"batch_size": None}, "--batch-size None: is NoneType, not a whole number; give a whole number"),
        ({"percentile": "99"}, "--percentile '99': is text, not a number; give a number"),
        ({"chat_template": "yes"}, "--chat-template 'yes': is text, not True or False; give True or False"),
        ({"skip": "*.down_proj"}, "--skip '*.down_proj': is text, not a sequence of texts; give a sequence of texts"),
        ({"revision": 3}, "--revision 3: is a whole number, not text; give text"),
        ({"kv_cache": ["off"]}, "--kv-cache ['off']: is none of off, v, fp8"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        with_settings(CalibrateOptions(), settings)
    assert str(refused.value) == said


def test_numbers_of_numpy_text_of_shares_and_lists_are_taken() -> None:
    taken = with_settings(
        CalibrateOptions(),
        {"samples": np.int64(32), "method": "percentile", "percentile": 99, "bf16_weights": "3%", "skip": ["a"]},
    )
    assert (taken.samples, taken.clip.percentile, taken.bf16_weights, taken.skip) == (32, 99, 0.03, ("a",))


def test_what_was_asked_for_is_known_though_it_is_the_default() -> None:
    asked = CalibrateOptions(weigh_first_token=False, samples=4)
    assert [asked.asks(name) for name in ("weigh_first_token", "samples", "weight_rounding")] == [True, True, False]
    by_name = with_settings(RunOptions(calibrate=asked), {"weight_rounding": "nearest"}).calibrate
    assert [by_name.asks(name) for name in ("weigh_first_token", "weight_rounding", "seq_len")] == [True, True, False]
    copied = replace(CalibrateOptions(), samples=4)
    assert [copied.asks(name) for name in ("samples", "weigh_first_token")] == [True, False]
    assert asked == replace(CalibrateOptions(), samples=4), "options are equal whoever asked for them"
    _, bound, _ = app.parse_args(["run", "M", "--data", "t", "--out", "o", "--no-weigh-first-token"])
    given = bound.arguments["options"].calibrate
    assert [given.asks(name) for name in ("weigh_first_token", "weight_rounding")] == [True, False]


def test_one_code_by_its_older_name_is_a_form_that_was_asked_for() -> None:
    assert not RunOptions(calibrate=CalibrateOptions(activation_terms=1)).finds_form
    assert RunOptions(calibrate=CalibrateOptions(weigh_first_token=False)).finds_form
