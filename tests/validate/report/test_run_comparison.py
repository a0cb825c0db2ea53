"""Runs side by side, and what each part of the report is without them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fp8q.calibrate.measure.statistics import load_record
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.stages import report as report_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.accuracy.document import load_accuracy, load_token_losses, save_accuracy
from fp8q.validate.report.report import render
from fp8q.validate.report.run_comparison import names, run_rows, run_table, than


def other_of(run: Run, more_nats: float) -> Run:
    """A copy, beside it, whose FP8 loses so much more at every token."""
    other = Run(run.root.with_name("other"))
    shutil.copytree(run.root, other.root)
    accuracy, nll = load_accuracy(run), load_token_losses(run)
    nll["reference"] = nll["reference"] + np.float32(more_nats)
    with RunWriter(other).stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(other, accuracy, nll)
    return other


def test_a_run_is_held_against_the_first_token_by_token(evaluated_run: Run) -> None:
    other = other_of(evaluated_run, 0.01)
    first, second = run_rows([evaluated_run, other])
    assert (first.name, second.name) == (evaluated_run.root.name, "other")
    assert first.than_first is None
    assert second.than_first == pytest.approx((np.expm1(0.01), np.expm1(0.01)), rel=1e-3)
    table = run_table([first, second])
    cells = [[cell.text for cell in row] for row in table.cells()]
    shown = dict(zip((column.title for column in table.columns), cells[0], strict=True))
    assert (shown["activations"], shown["rounding"], shown["KV cache"]) == ("one term", "nearest", "FP8")
    assert (shown["GEMMs in FP8"], len(first.scales.skipped)) == ("5", 2)
    accuracy = load_accuracy(evaluated_run).runtimes["reference"]
    assert shown["perplexity"] == f"{accuracy.perplexity:.4f}"
    assert {"increase", "95 % interval"} <= shown.keys()
    assert cells[1][-1] == "+1.01 to +1.01 %"
    assert cells[0][-1] == ""


def test_other_windows_are_not_compared(evaluated_run: Run) -> None:
    other = other_of(evaluated_run, 0.01)
    accuracy, nll = load_accuracy(other), load_token_losses(other)
    protocol = accuracy.protocol.model_copy(update={"stride": accuracy.protocol.stride - 1})
    with RunWriter(other).stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(other, accuracy.model_copy(update={"protocol": protocol}), nll)
    assert than(evaluated_run, other, "reference") is None
    assert than(evaluated_run, evaluated_run, "tensorrt") is None


def test_a_run_of_another_model_is_flagged_and_not_compared_token_by_token(
    evaluated_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = other_of(evaluated_run, 0.01)
    same = run_table(run_rows([evaluated_run, other]))
    assert "model" not in [column.title for column in same.columns]
    assert same.note.endswith(
        f"“Than the first”: the 95 % interval of the perplexity’s change over that of {evaluated_run.root.name}, token "
        "by token, where both were evaluated on the same windows."
    )
    record = load_record(other)
    model = record.model.model_copy(update={"fingerprint": "f" * 64})
    changed = record.model_copy(update={"model": model})
    monkeypatch.setattr(
        "fp8q.validate.report.run_comparison.load_record",
        lambda run: changed if run.root == other.root else load_record(run),
    )
    table = run_table(run_rows([evaluated_run, other]))
    assert [row.than_first for row in table.rows] == [None, None]
    titles = [column.title for column in table.columns]
    assert "model" in titles
    assert "than the first" not in titles
    assert table.note.startswith(
        f"other: made of another model than {evaluated_run.root.name}, so that a difference in perplexity is not one "
        "of quantization."
    )
    assert "Than the first" not in table.note
    notes = Notes(SILENT)
    monkeypatch.setattr("fp8q.validate.report.report.render_report", lambda run, notes, others: [])
    report_stage.write_report(evaluated_run, [other], notes)
    assert evaluated_run.record().stages["report"].notes == [
        f"--compare {other.root}: is of another model than {evaluated_run.root}, and the table says so"
    ]


def test_a_run_that_was_not_evaluated_has_a_row_too(calibrated_run: Run) -> None:
    (row,) = run_rows([calibrated_run])
    assert (row.accuracy, row.than_first) == (None, None)
    titles = [column.title for column in run_table([row]).columns]
    assert titles[:5] == ["run", "activations", "rounding", "KV cache", "GEMMs in FP8"]
    assert titles[5:] in ([], ["checkpoint"])


def test_names_are_as_short_as_they_can_be() -> None:
    assert names([Path("/a/one"), Path("/b/two")]) == ["one", "two"]
    assert names([Path("/a/run"), Path("/b/run"), Path("/b/c")]) == ["a/run", "b/run", "b/c"]


def test_the_page_shows_the_others(evaluated_run: Run) -> None:
    other = other_of(evaluated_run, 0.01)
    assert "Beside other runs" not in render(evaluated_run)
    page = render(evaluated_run, [other])
    assert "Beside other runs" in page
    assert "+1.01 to +1.01 %" in page


def test_the_report_is_written_again_when_another_run_is_another(
    evaluated_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[int]()

    def write(run: Run, notes: Notes, others: Sequence[Run]) -> list[Path]:
        written.append(len(others))
        run.report_html.write_text("page")
        return [run.report_html]

    monkeypatch.setattr("fp8q.validate.report.report.render_report", write)
    other = other_of(evaluated_run, 0.01)
    for compared in ([other], [other], []):
        report_stage.write_report(evaluated_run, compared, Notes(SILENT))
    assert written == [1, 0]
    report_stage.write_report(evaluated_run, [other], Notes(SILENT))
    accuracy, nll = load_accuracy(other), load_token_losses(other)
    nll["reference"] += 1
    with RunWriter(other).stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(other, accuracy, nll)
    report_stage.write_report(evaluated_run, [other], Notes(SILENT))
    assert written == [1, 0, 1, 1]


def test_a_run_is_not_put_beside_itself(evaluated_run: Run) -> None:
    again = Run(evaluated_run.root.parent / "." / evaluated_run.root.name)
    with pytest.raises(InputError) as refused:
        report_stage.write_report(evaluated_run, [again], Notes(SILENT))
    assert str(refused.value) == f"--compare {again.root}: is in the report already; name each run once"
