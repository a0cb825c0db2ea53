"""Options that somebody gave are obeyed by the search for a form, though they are the defaults."""

from types import SimpleNamespace
from typing import Any

import pytest

from fp8q.core.errors import GateError
from fp8q.options import CalibrateOptions, RunOptions
from fp8q.stages import forms
from fp8q.stages.forms import FormCandidates, _roundings
from fp8q.validate.accuracy.document import Verdict
from fp8q.validate.tuning.choices import Group, Mix, Shape, leaving_out

GROUPS = (Group("q", {"q": (4, 4)}), Group("o", {"o": (4, 4)}))
FIRST = Mix({"q": "one_term", "o": "one_term"}, "nearest", "off")


def candidates(asked: CalibrateOptions) -> FormCandidates:
    task: Any = SimpleNamespace(options=SimpleNamespace(calibrate=asked))
    nothing: Any = None
    return FormCandidates(task, nothing, nothing, Shape(GROUPS, 0, {}), FIRST)


@pytest.mark.parametrize(
    ("asked", "weighed"),
    [
        (CalibrateOptions(), True),
        (CalibrateOptions(weigh_first_token=False), False),
        (CalibrateOptions(weigh_first_token=True), True),
    ],
)
def test_codes_that_gptq_rounds_weigh_first_tokens_unless_that_was_refused(
    asked: CalibrateOptions, weighed: bool
) -> None:
    by_gptq = candidates(asked).options(Mix({"q": "tail", "o": "tail"}, "gptq", "off"))
    assert (by_gptq.weight_rounding, by_gptq.weigh_first_token) == ("gptq", weighed)


def test_only_the_rounding_that_was_asked_for_is_tried() -> None:
    assert _roundings(CalibrateOptions()) == ("nearest", "gptq")
    assert _roundings(CalibrateOptions(weight_rounding="nearest")) == ("nearest",)
    assert _roundings(CalibrateOptions(weight_rounding="gptq")) == ("gptq",)


def test_no_further_weights_stay_in_bf16_where_their_share_was_asked_for() -> None:
    assert all("bf16" in group.forms for group in GROUPS)
    assert leaving_out(GROUPS[0], "bf16").forms == tuple(form for form in GROUPS[0].forms if form != "bf16")


def test_a_form_that_broke_after_a_killed_search_begins_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = GateError("the reference", "has the perplexity nan")

    def validated(*_: Any) -> Any:
        raise broken

    verdict = Verdict(kind="broken", sentence="Broken", limit=0.01, kl_limit_nats=0.1, flips_limit=0.1)
    monkeypatch.setattr(forms, "validate", validated)
    monkeypatch.setattr(forms, "load_accuracy", lambda run: SimpleNamespace(verdict=verdict))
    monkeypatch.setattr(forms, "_key", lambda run, options: None)
    monkeypatch.setattr(forms, "_chosen_before", lambda run, key: {"form": []})
    monkeypatch.setattr(forms, "FORMS", SimpleNamespace(is_current=lambda run, key: False))
    nothing: Any = None
    with pytest.raises(GateError) as raised:
        forms.validate_acceptable(nothing, nothing, RunOptions())
    assert raised.value is broken
