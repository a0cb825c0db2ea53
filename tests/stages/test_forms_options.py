"""Options that somebody gave are obeyed by the search for a form, though they are the defaults."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8q import api
from fp8q.core.errors import GateError
from fp8q.core.run import Run
from fp8q.options import BF16, ONE, CalibrateOptions, RunOptions, Server
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages import forms
from fp8q.stages.calibrate import experts_as_served
from fp8q.stages.forms import FormCandidates, _roundings
from fp8q.validate.accuracy.document import Verdict
from fp8q.validate.tuning.choices import Group, Mix, Shape, leaving_out

from ..calibrate.conftest import Notebook
from ..mixtures import random_mixture

EXPERTS = ["model.layers.0.mlp.experts.0.up_proj", "model.layers.1.mlp.experts.0.up_proj"]
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


def test_a_form_that_broke_after_a_killed_search_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        forms.validate_acceptable(Run(tmp_path / "run"), nothing, RunOptions())
    assert raised.value is broken


@pytest.mark.parametrize(
    ("server", "options", "forms", "said"),
    [
        ("vllm", {"activation_terms": "bf16"}, ("*.experts.*=one",), "weights alone in FP8"),
        ("vllm-plugin", {"activation_terms": "tail"}, ("*.experts.*=one",), "a tail of 64"),
        ("sglang", {"form": ("two",)}, ("two", "*.experts.*=one"), "two terms"),
        ("vllm", {}, (), None),
        ("vllm", {"form": ("dynamic",)}, ("dynamic",), None),
        ("vllm", {"form": ("bf16", "*.experts.*=dynamic")}, ("bf16", "*.experts.*=dynamic"), None),
        ("tensorrt", {"activation_terms": "tail"}, (), None),
        ("transformers", {"activation_terms": "bf16"}, (), None),
        (None, {"activation_terms": "bf16"}, (), None),
    ],
)
def test_experts_take_one_code_where_the_named_server_has_no_other_gemm_of_them(
    server: Server | None, options: dict[str, Any], forms: tuple[str, ...], said: str | None
) -> None:
    notes = Notebook()
    asked: Any = CalibrateOptions(server=server, **options)
    assert experts_as_served(asked, server, EXPERTS, notes).form == forms  # type: ignore[arg-type]  # it notes
    line = f"--for {server}: experts take one code, since it has no GEMM of experts for {said}"
    assert notes.lines == ([line] if said else [])
    assert experts_as_served(asked, server, [], notes) is asked  # type: ignore[arg-type]  # as above


def test_a_mixture_for_vllm_has_weights_alone_but_for_its_experts_and_no_graph(tmp_path: Path, demo_texts: Any) -> None:
    source = random_mixture(tmp_path / "model", "qwen3_moe")
    notes = Notebook()
    run = api.calibrate(
        source, demo_texts.calibration, tmp_path / "run", None, progress=notes, samples=4, seq_len=32, server="vllm",
        preset="exact", weight_rounding="nearest", weigh_first_token=False, bf16_weights=0.0,
    )  # fmt: skip
    scales = load_scales(run)
    assert {form: sum(".experts." in name for name in scales.in_form(form)) for form in (ONE, BF16)} == {
        ONE: 2 * 4 * 3, BF16: 0
    }  # fmt: skip
    assert scales.in_form(BF16)
    assert run.without_graph()
    assert "--for vllm: reads the checkpoint; no graph, engine and Triton repository are made" in notes.lines
