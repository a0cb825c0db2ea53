"""The verdict follows from the interval of the worst FP8 runtime, and the next step from the verdict and the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8q.validate.report.accuracy_rows import AccuracyRow
from fp8q.validate.report.verdict import NextStep, Standing, Verdict, budget, next_steps, verdict

BF16 = AccuracyRow("bf16", 10.0, 2.3)
FP8 = AccuracyRow("reference", 10.031, 2.3031, perplexity_increase=0.0031)
NOTHING = Standing("RUN", located=False, tuned=None, engine=False, repository=False)


@pytest.mark.parametrize(
    ("rise", "low", "high", "kind", "said"),
    [
        (0.0004, -0.0002, 0.001, "same",
         "Same model: perplexity rises by 0.04 % against BF16 (95 % interval −0.02 to +0.10 %)."),
        (0.00001, 0.0, 0.0001, "same",
         "Same model: perplexity does not change (by less than 0.01 %) against BF16 (95 % interval +0.00 to +0.01 %)."),
        (0.0004, -0.0002, 0.0011, "noise",
         ("Within the noise of BF16: perplexity rises by 0.04 %, and this text cannot tell that from none "
          "(95 % interval −0.02 to +0.11 %).")),
        (-0.003, -0.005, -0.0011, "better",
         "Not worse: perplexity falls by 0.30 % against BF16, by chance (95 % interval −0.50 to −0.11 %)."),
        (0.0031, 0.0011, 0.005, "worse",
         "Worse: perplexity rises by 0.31 % against BF16 (95 % interval +0.11 to +0.50 %)."),
        (0.0031, None, None, "unknown",
         "Not known: perplexity rises by 0.31 %, too short for an interval: 4 windows; give 10."),
    ],
)  # fmt: skip
def test_the_interval_decides_and_not_the_increase_alone(
    rise: float, low: float | None, high: float | None, kind: str, said: str
) -> None:
    row = replace(FP8, perplexity_increase=rise, increase_low=low, increase_high=high, windows=4)
    found = verdict([BF16, row])
    assert (found.kind, found.sentence, found.runtime) == (kind, said, "reference")


def test_what_is_no_farther_from_fp32_than_bf16_is_within_its_noise() -> None:
    bf16 = replace(BF16, kl_fp32_nats=6.8e-5)
    near = replace(FP8, increase_low=0.0011, increase_high=0.005, kl_fp32_nats=6.7e-5)
    found = verdict([bf16, near])
    assert found.kind == "noise"
    assert found.sentence == (
        "Within the noise of BF16: perplexity rises by 0.31 %, and FP8 is no farther from FP32 than BF16 is: 6.7e-05 "
        "nats against 6.8e-05 (95 % interval +0.11 to +0.50 %)."
    )
    assert verdict([bf16, replace(near, kl_fp32_nats=6.9e-5)]).kind == "worse"


def test_it_is_of_the_worst_fp8_runtime_that_ran_every_window() -> None:
    rows = [
        BF16,
        replace(FP8, increase_low=0.0, increase_high=0.006),
        replace(FP8, runtime="onnxruntime", perplexity_increase=0.004, increase_low=0.002, increase_high=0.006),
        replace(FP8, runtime="reference-fp22", perplexity_increase=0.4, increase_low=0.3, increase_high=0.5, tokens=9),
        replace(FP8, runtime="onnxruntime-int8", perplexity_increase=0.9, increase_low=0.8, increase_high=1.0),
    ]
    assert verdict(rows).runtime == "onnxruntime"
    assert verdict(rows).kind == "worse"


@pytest.mark.parametrize("rows", [[], [BF16], [replace(FP8, perplexity_increase=None)]])
def test_nothing_compared_is_nothing_known(rows: list[AccuracyRow]) -> None:
    assert verdict(rows) == Verdict("unknown", "Not known yet: FP8 was not held against BF16 on any text.")


def test_a_perplexity_that_is_no_number_is_broken() -> None:
    found = verdict([BF16, replace(FP8, perplexity=float("nan"), perplexity_increase=float("nan"))])
    assert (found.kind, found.sentence) == ("broken", "Broken: the perplexity of reference is nan.")


VALIDATE = "fp8q validate RUN"
MORE = "fp8q validate RUN --data TEXT"
SENSITIVITY, TUNE, DOCTOR = "fp8q sensitivity RUN", "fp8q tune RUN --max-ppl-increase 0.5%", "fp8q doctor RUN"
APPLY = "fp8q tune RUN --max-kl 0.001 --apply"
ENGINE, TRITON, SERVE = "fp8q build-engine RUN", "fp8q triton RUN", "fp8q serve RUN"


@pytest.mark.parametrize(
    ("found", "has", "commands"),
    [
        (Verdict("unknown", ""), NOTHING, [VALIDATE]),
        (Verdict("unknown", "", "reference"), NOTHING, [MORE]),
        (Verdict("worse", "", "reference", 0.0102), NOTHING, [SENSITIVITY, TUNE, DOCTOR, ENGINE, TRITON]),
        (Verdict("broken", "", "reference"), replace(NOTHING, located=True), [TUNE, DOCTOR, ENGINE, TRITON]),
        (
            Verdict("worse", "", "reference"),
            replace(NOTHING, located=True, tuned="--max-kl 0.001"),
            [APPLY, DOCTOR, ENGINE, TRITON],
        ),
        (Verdict("noise", "", "reference"), replace(NOTHING, engine=True), [TRITON]),
        (Verdict("same", "", "reference"), replace(NOTHING, engine=True, repository=True), [SERVE]),
    ],
)
def test_what_to_do_next_is_what_the_run_does_not_have(found: Verdict, has: Standing, commands: list[str]) -> None:
    steps = next_steps(found, has)
    assert [step.command for step in steps] == commands
    assert all(isinstance(step, NextStep) and step.why.endswith(".") for step in steps)


@pytest.mark.parametrize(("rise", "said"), [(0.002, "0.1%"), (0.0102, "0.5%"), (0.12, "6%"), (0.00031, "0.02%")])
def test_the_budget_that_is_named_is_half_of_what_is_lost(rise: float, said: str) -> None:
    assert budget(Verdict("worse", "", "reference", rise)) == said
