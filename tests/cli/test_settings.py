"""Options by name, as Python's functions take them."""

import pytest

from fp8q.core.errors import InputError
from fp8q.options import CalibrateOptions, Clipping, RescaleOptions, RunOptions, ScaleOptions, ValidateOptions
from fp8q.options.settings import with_settings


def test_names_go_to_the_class_that_has_them() -> None:
    options = with_settings(CalibrateOptions(seq_len=128), {"samples": 64, "method": "mse", "weight_rounding": "gptq"})
    assert options == CalibrateOptions(seq_len=128, samples=64, clip=Clipping("mse"), weight_rounding="gptq")
    run = with_settings(RunOptions(), {"samples": 8, "graph": False, "max_ppl_increase": "1%", "server": "vllm"})
    assert run.calibrate == CalibrateOptions(samples=8)
    assert not run.export.graph
    assert run.validate == ValidateOptions(max_ppl_increase=0.01)
    assert run.server == "vllm"


def test_a_preset_is_overridden_by_names_beside_it_and_names_the_form_of_a_run() -> None:
    options = with_settings(CalibrateOptions(), {"preset": "exact", "weight_rounding": "nearest", "samples": 64})
    assert options == CalibrateOptions(activation_terms="tail", weigh_first_token=True, bf16_weights=0.03, samples=64)
    assert with_settings(RunOptions(), {}).finds_form
    assert not with_settings(RunOptions(), {"preset": "fast"}).finds_form
    assert not with_settings(RunOptions(), {"form": ("one",)}).finds_form


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
