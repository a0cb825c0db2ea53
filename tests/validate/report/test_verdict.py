"""The next step follows from the verdict and the run, and its command has the run's own path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8q.core.commands import in_run
from fp8q.core.run import Run
from fp8q.validate.accuracy.document import Verdict, load_accuracy, load_token_losses, save_accuracy
from fp8q.validate.report.verdict import NextStep, Standing, next_steps, report_verdict

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
        (of("worse"), NOTHING, [SENSITIVITY, TUNE, DOCTOR, ENGINE, TRITON]),
        (of("broken"), replace(NOTHING, located=True), [TUNE, DOCTOR, ENGINE, TRITON]),
        (
            of("worse"),
            replace(NOTHING, located=True, tuned="--max-kl 0.001"),
            [APPLY, DOCTOR, ENGINE, TRITON],
        ),
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
    with evaluated_run.stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(evaluated_run, accuracy.model_copy(update={"verdict": asked}), nll)
    assert report_verdict(evaluated_run) == asked


def test_what_was_not_evaluated_is_not_known(calibrated_run: Run) -> None:
    found = report_verdict(calibrated_run)
    assert (found.kind, found.runtime) == ("unknown", None)
    assert found.sentence == "Not known yet: FP8 was not held against BF16 on any text"


def test_a_run_without_graph_goes_to_vllm() -> None:
    alone = replace(NOTHING, alone="RUN/model")
    assert [step.command for step in next_steps(of("acceptable"), alone)] == ["vllm serve RUN/model"]
    steps = next_steps(of("worse"), replace(alone, located=True))
    assert [step.command for step in steps] == ["fp8q tune RUN --for vllm --max-ppl-increase 0.5%", DOCTOR]
