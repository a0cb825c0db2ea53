"""The key of the stage `quantize`: all of its options, and nothing typed by hand."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest

from fp8q.options import CalibrateOptions, Clipping, ScaleOptions
from fp8q.options.declare import SCALES, option
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.quantize import options_key

#: Another value of each field than its default, with what has to go with it.
OTHERS: dict[str, dict[str, Any]] = {
    "weight_method": {"weight_method": "amax"},
    "kv_cache": {"kv_cache": "fp8"},
    "skip": {"skip": ("*.mlp.*",)},
    "only": {"only": ("*.mlp.*",)},
    "weight_rounding": {"weight_rounding": "gptq"},
    "activation_terms": {"activation_terms": 2},
    "two_terms": {"two_terms": ("*.mlp.*",)},
    "inherit": {"inherit": True},
    "min_expert_tokens": {"min_expert_tokens": 7},
}
CLIPS: dict[str, dict[str, Any]] = {
    "method": {"method": "mse"},
    "percentile": {"method": "percentile", "percentile": 99.0},
    "margin": {"margin": 1},
    "scale_grid": {"scale_grid": "power-of-two"},
    "amax_history_len": {"method": "delayed", "amax_history_len": 3},
    "amax_compute_algo": {"method": "delayed", "amax_compute_algo": "most_recent"},
    "interval": {"method": "delayed", "interval": 3},
}


@pytest.mark.parametrize("name", list(ScaleOptions.declared()))
def test_changing_a_field_changes_the_key(name: str) -> None:
    changed = options_key(ScaleOptions(**OTHERS[name]))
    assert changed != options_key(ScaleOptions())
    assert name in changed


@pytest.mark.parametrize("name", list(Clipping.declared()))
def test_changing_the_clipping_changes_the_key(name: str) -> None:
    method = {"method": CLIPS[name]["method"]} if name != "method" and "method" in CLIPS[name] else {}
    before = options_key(ScaleOptions(clip=Clipping(**method)))
    assert options_key(ScaleOptions(clip=Clipping(**CLIPS[name])))[name] != before[name]


def test_measuring_options_are_no_part_of_it() -> None:
    assert options_key(CalibrateOptions(samples=3, batch_size=7)) == options_key(ScaleOptions())


def test_a_new_field_is_part_of_it_without_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Wider(ScaleOptions):
        rounding_seed: Annotated[Literal[0, 1], option(SCALES, "A field that did not exist before.")] = 0

    monkeypatch.setattr(quantize_stage, "ScaleOptions", Wider)
    assert options_key(Wider(rounding_seed=1))["rounding_seed"] == 1
    assert options_key(Wider(rounding_seed=1)) != options_key(Wider())


def test_it_is_what_runs_before_it_recorded() -> None:
    """The key of a run of the version that listed its fields by hand."""
    assert options_key(ScaleOptions()) == {
        "method": "amax", "percentile": 99.99, "margin": 0, "scale_grid": "bf16", "amax_history_len": 1024,
        "amax_compute_algo": "max", "interval": 1, "weight_method": "mse", "kv_cache": "off", "skip": [], "only": [],
        "weight_rounding": "nearest", "activation_terms": 1, "two_terms": [], "min_expert_tokens": 512,
    }  # fmt: skip
