"""The next step follows from the verdict and the run, and its command has the run's own path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8q.core.commands import in_run
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.quantize.scales.decisions import Scales
from fp8q.validate.accuracy.document import Verdict, load_accuracy, load_token_losses, save_accuracy
from fp8q.validate.advice.remedy import NextStep
from fp8q.validate.report.verdict import Standing, forms_in_words, next_steps, report_verdict

NOTHING = Standing("RUN", located=False, tuned=None, engine=False, repository=False)


def of(kind: str, runtime: str | None = "reference", limit: float = 0.005) -> Verdict:
    return Verdict.model_validate({"kind": kind, "sentence": "", "limit": limit, "runtime": runtime})


VALIDATE = "fp8q validate RUN"
MORE = "fp8q validate RUN --data TEXT"
SENSITIVITY, TUNE, DOCTOR = "fp8q sensitivity RUN", "fp8q tune RUN --max-ppl-increase 0.5%", "fp8q doctor RUN"
APPLY = "fp8q tune RUN --max-kl 0.001 --apply"
ENGINE, TRITON, SERVE = "fp8q build-engine RUN", "fp8q triton RUN", "fp8q serve RUN"


@pytest.mark.parametrize(
    ("found", "has", "commands"),
    [
        (of("unknown", None), NOTHING, [VALIDATE]),
        (of("unknown"), NOTHING, [MORE]),
        (of("unknown"), replace(NOTHING, more="--max-tokens 640"), ["fp8q validate RUN --max-tokens 640"]),
        (of("worse"), NOTHING, [SENSITIVITY, TUNE, DOCTOR, ENGINE, TRITON]),
        (of("broken"), replace(NOTHING, located=True), [TUNE, DOCTOR, ENGINE, TRITON]),
        (
            of("worse"),
            replace(NOTHING, located=True, tuned="--max-kl 0.001"),
            [APPLY, DOCTOR, ENGINE, TRITON],
        ),
        (of("worse"), replace(NOTHING, located=True, searched=True), ["fp8q distill RUN", DOCTOR, ENGINE, TRITON]),
        (of("acceptable"), replace(NOTHING, engine=True), [TRITON]),
        (of("acceptable"), replace(NOTHING, engine=True, repository=True), [SERVE]),
    ],
)
def test_what_to_do_next_is_what_the_run_does_not_have(found: Verdict, has: Standing, commands: list[str]) -> None:
    steps = next_steps(found, has)
    assert [step.command for step in steps] == commands
    assert all(isinstance(step, NextStep) and step.why.endswith(".") for step in steps)


def test_the_budget_that_is_named_is_the_limit() -> None:
    steps = next_steps(of("worse", limit=0.0125), replace(NOTHING, located=True))
    assert steps[0].command == "fp8q tune RUN --max-ppl-increase 1.25%"


def test_commands_have_the_run_s_own_path_as_a_shell_reads_it(tmp_path: Path) -> None:
    said = "Not known: `fp8q validate RUN --context 8`, or `fp8q tune RUN`; a RUN."
    assert in_run(said, Path("a run")) == (
        "Not known: `fp8q validate 'a run' --context 8`, or `fp8q tune 'a run'`; a RUN."
    )


def test_a_run_without_a_stored_verdict_gets_it_by_the_default(evaluated_run: Run) -> None:
    stored = report_verdict(evaluated_run)
    assert stored.limit == 0.01
    assert stored.limit_is_default
    accuracy, nll = load_accuracy(evaluated_run), load_token_losses(evaluated_run)
    asked = stored.model_copy(update={"limit": 0.5, "limit_is_default": False})
    with RunWriter(evaluated_run).stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(evaluated_run, accuracy.model_copy(update={"verdict": asked}), nll)
    assert report_verdict(evaluated_run) == asked


def test_a_verdict_of_an_older_version_is_made_anew_by_its_limit_of_perplexity(evaluated_run: Run) -> None:
    accuracy, nll = load_accuracy(evaluated_run), load_token_losses(evaluated_run)
    older = Verdict(kind="acceptable", sentence="Acceptable: +0.19 %", limit=0.5, runtime="reference")
    with RunWriter(evaluated_run).stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(evaluated_run, accuracy.model_copy(update={"verdict": older}), nll)
    found = report_verdict(evaluated_run)
    assert (found.limit, found.limit_is_default) == (0.5, False)
    assert found.kl_limit_nats == pytest.approx(0.405465, abs=1e-6)  # ln 1.5
    assert found.flips_limit == pytest.approx(0.5107, abs=1e-4)  # 8 % · √(ln 1.5 / ln 1.01)


def test_what_was_not_evaluated_is_not_known(calibrated_run: Run) -> None:
    found = report_verdict(calibrated_run)
    assert (found.kind, found.runtime) == ("unknown", None)
    assert found.sentence == "Not known yet: FP8 was not held against BF16 on any text"


def test_a_form_with_second_codes_goes_to_vllm_with_the_plugin_alone() -> None:
    coded = replace(NOTHING, alone="RUN/model", form="a tail of 64", plugin=True)
    (step,) = next_steps(of("acceptable"), coded)
    assert step.command == "pip install ./integrations/vllm && vllm serve RUN/model"
    begin = (
        "Serve it (a tail of 64) in vLLM with the plugin fp8q-vllm, which is installed so into vLLM's environment, "
        "from a clone of fp8q; without it vLLM computes one code"
    )
    assert step.why == f"{begin}, another model, which was not measured."
    (step,) = next_steps(of("acceptable"), replace(coded, one_code="acceptable, KL 0.00655 nats (limit 0.00995)"))
    assert step.why == f"{begin} (acceptable, KL 0.00655 nats (limit 0.00995))."
    tune = next_steps(of("worse"), replace(coded, located=True))[0].command
    assert tune == "fp8q tune RUN --for vllm-plugin --max-ppl-increase 0.5%"


def test_the_remedy_comes_first_with_its_effect() -> None:
    command = "fp8q scales RUN --form tail:64"
    has = replace(NOTHING, located=True, remedy=NextStep("inputs 0.02 -> 0.00001 in two codes", command))
    first, *_ = next_steps(of("worse"), has)
    assert first == NextStep("inputs 0.02 -> 0.00001 in two codes.", command)
    assert next_steps(of("acceptable"), has)[0].command == ENGINE


def test_forms_are_named_in_words_the_most_frequent_first() -> None:
    scales = Scales(weights={}, activations={}, skipped={}, bf16_inputs=["a", "b"])
    assert forms_in_words(scales) == "weights alone in FP8"


def test_weights_alone_go_to_vllm_on_a_gpu() -> None:
    alone = replace(NOTHING, alone="RUN/model", form="weights alone in FP8")
    (step,) = next_steps(of("acceptable"), alone)
    assert step.command == "vllm serve RUN/model"
    assert step.why == (
        "Serve it (weights alone in FP8) in vLLM on a GPU, since vLLM refuses weights alone in FP8 on a CPU."
    )


def test_a_run_without_graph_goes_to_vllm() -> None:
    alone = replace(NOTHING, alone="RUN/model")
    assert [step.command for step in next_steps(of("acceptable"), alone)] == ["vllm serve RUN/model"]
    steps = next_steps(of("worse"), replace(alone, located=True))
    assert [step.command for step in steps] == ["fp8q tune RUN --for vllm --max-ppl-increase 0.5%", DOCTOR]
