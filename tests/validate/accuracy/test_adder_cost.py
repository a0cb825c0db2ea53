"""Other sums on some of the windows: which ones, what they are held against, and that no gate is for them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from loaded_runtimes import compare_runtimes

from fp8q.calibrate.text.evaluation import cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import ValidateOptions, VerdictLimits
from fp8q.stages.shared.gates import check_verdict
from fp8q.stages.validate import check_accumulator
from fp8q.validate.accuracy.adder_cost import cost, multiply_adds_per_token, sample
from fp8q.validate.accuracy.bootstrap import increase_interval
from fp8q.validate.accuracy.decision import decide
from fp8q.validate.accuracy.document import Accuracy, RuntimeAccuracy, load_accuracy, load_token_losses, save_accuracy
from fp8q.validate.report.accuracy_rows import AccuracyRow, accuracy_rows
from fp8q.validate.report.drawings import report_plots
from fp8q.validate.report.report import summary_sentences
from fp8q.validate.report.tables import accuracy_table

EVALUATION = cut(np.arange(40, dtype=np.int64) % 4, "text", 4, 4)  # ten windows, 39 - 9 = 30 tokens scored


@pytest.mark.parametrize(
    ("windows", "chosen"), [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10))), (99, list(range(10)))]
)
def test_windows_are_taken_evenly_from_the_first_to_the_last(windows: int, chosen: list[int]) -> None:
    assert sample(EVALUATION, windows).chosen.tolist() == chosen


def test_a_sample_is_these_windows_and_spreads_what_was_found_over_all() -> None:
    taken = sample(EVALUATION, 2)
    np.testing.assert_array_equal(taken.evaluation.ids, EVALUATION.ids[[0, 9]])
    assert taken.tokens == 6
    spread = taken.spread(np.ones((2, 4), np.float32))
    assert np.flatnonzero(~np.isnan(spread).any(axis=1)).tolist() == [0, 9]


def test_what_is_going_to_be_run_is_said_with_what_it_takes(calibrated_run: Run) -> None:
    # five weights of 16 × 32 codes; 2 windows of 4 tokens
    assert multiply_adds_per_token(calibrated_run) == 5 * 16 * 32
    said = cost(calibrated_run, sample(EVALUATION, 2), "two-level", "cpu")
    before, _, after = said.rpartition(" take about ")
    assert before == (
        "--accumulator two-level: the reference on 2 of 10 windows; the sums of 8 tokens of 2,560 products"
    )
    assert after == "0.0 s here"


def test_an_input_of_two_terms_takes_every_product_twice(calibrated_run: Run) -> None:
    scales = json.loads(calibrated_run.scales.read_text(encoding="utf-8"))
    scales["activations"]["model.layers.0.down"]["terms"] = 2
    with RunWriter(calibrated_run).stage("quantize", {}, {}) as log:
        calibrated_run.scales.write_text(json.dumps(scales), encoding="utf-8")
        log.outputs += [calibrated_run.scales, *sorted(calibrated_run.model.iterdir())]
    assert multiply_adds_per_token(calibrated_run) == 6 * 16 * 32


def test_sums_are_held_against_those_in_fp32_on_the_same_tokens() -> None:
    """Uniform sums in FP32 against others that give token 0 half of the probability."""
    skewed = torch.log(torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]))
    runtimes = {
        "reference-fp22": lambda ids: skewed.expand(*ids.shape, 4),
        "reference-fp32": lambda ids: torch.zeros(*ids.shape, 4),
        "bf16": lambda ids: torch.zeros(*ids.shape, 4),
    }
    found = compare_runtimes(EVALUATION, runtimes, 4, SILENT)[0].runtimes
    expected = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.25 * 6)
    assert found["reference-fp22"].kl_sums_nats == pytest.approx(expected, abs=1e-6)
    assert found["reference-fp22"].kl_mean_nats == pytest.approx(expected, abs=1e-6)
    assert (found["reference-fp32"].kl_sums_nats, found["bf16"].kl_sums_nats) == (None, None)


def with_sums(run: Run) -> Run:
    """The evaluated run with sums in FP22 on the first and the last window, twice as unlikely as in BF16."""
    accuracy, nll = load_accuracy(run), load_token_losses(run)
    sampled = np.full_like(nll["bf16"], np.nan)
    sampled[[0, -1]] = nll["bf16"][[0, -1]] + np.float32(np.log(2))
    more = RuntimeAccuracy(
        perplexity=20, nll_nats=float(np.log(20)), perplexity_increase=1.0, kl_sums_nats=0.00125, tokens=126
    )
    accuracy = accuracy.model_copy(update={"runtimes": accuracy.runtimes | {"reference-fp22": more}})
    with RunWriter(run).stage("validate", {}, {"context": 64}) as log:
        log.outputs += save_accuracy(run, accuracy, nll | {"reference-fp22": sampled})
    return run


def test_the_table_says_of_how_many_tokens_such_a_row_is(evaluated_run: Run) -> None:
    plain = accuracy_table(accuracy_rows(evaluated_run))
    assert [column.title for column in plain.columns][-1] == "top-5 agreement"
    table = accuracy_table(accuracy_rows(with_sums(evaluated_run)))
    assert [column.title for column in table.columns][-2:] == ["KL of the sums", "sampled tokens"]
    assert [cell.text for cell in table.cells()[-1]][:4] == [
        "reference-fp22",
        "20.0000",
        "+100.00 %",
        "",
    ]
    assert (plain.note, table.note) == ("", "reference-fp22: too short for an interval: 2 windows; give 10")
    assert [cell.text for cell in table.cells()[-1]][-2:] == ["0.00125", "126"]


def test_the_interval_is_of_the_windows_that_both_ran() -> None:
    base = np.zeros((50, 4), np.float32)
    other = np.full((50, 4), np.nan, np.float32)
    other[:10] = 0.25
    assert increase_interval(base, other) == pytest.approx((np.expm1(0.25), np.expm1(0.25)))
    other[9] = np.nan
    assert increase_interval(base, other) == (None, None)


def test_the_summary_and_the_picture_are_of_what_ran_every_window(evaluated_run: Run) -> None:
    run = with_sums(evaluated_run)
    fp8 = next(row for row in accuracy_rows(run) if row.runtime == "reference")
    assert f"{fp8.perplexity:.4f} in FP8." in summary_sentences(accuracy_rows(run), [], [])
    assert "in bf16, reference. Below" in report_plots(run)["positions"].caption
    assert summary_sentences(
        [AccuracyRow("bf16", 2, 0.7), AccuracyRow("reference-fp22", 3, 1.1, 0.5, tokens=9)], [], []
    ) == ("0 of 0 GEMMs run in FP8. What that costs has not been evaluated yet.")


def test_no_gate_is_for_what_ran_some_windows() -> None:
    good = RuntimeAccuracy(perplexity=2.0, nll_nats=0.7, perplexity_increase=0.0)
    sampled = good.model_copy(update={"perplexity_increase": 0.5, "tokens": 4})
    runtimes = {"bf16": good, "reference": good, "reference-fp22": sampled}
    accuracy = Accuracy(protocol=EVALUATION.protocol, runtimes=runtimes)
    limits = VerdictLimits(max_ppl_increase=0.01)
    verdict = decide(accuracy, {}, limits)
    assert verdict.kind == "unknown"
    check_verdict(Run(Path("run")), accuracy.model_copy(update={"verdict": verdict}), limits)


@pytest.mark.parametrize("asked", [ValidateOptions(accumulator="fp22"), ValidateOptions(("bf16",))])
def test_sums_are_refused_only_without_the_reference(asked: ValidateOptions) -> None:
    check_accumulator(asked)
