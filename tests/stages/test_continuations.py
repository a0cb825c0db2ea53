"""Both models go on from the same words of the demo's evaluation text, once; where that cannot be, a note says why."""

from __future__ import annotations

import shutil
import weakref
from typing import TYPE_CHECKING

import pytest

from fp8q.api import GenerateOptions, compare_answers
from fp8q.core.reporter import SILENT
from fp8q.options import ContinueOptions
from fp8q.stages import generate
from fp8q.stages import report as report_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.accuracy.continuations import Continuations, load_continuations
from fp8q.validate.report.report import report_continuations

if TYPE_CHECKING:
    from fp8q.core.run import Run
    from fp8q.serve.loop.generate import Generator


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    copied = type(demo_run)(tmp_path_factory.mktemp("continuing") / "run")
    shutil.copytree(demo_run.root, copied.root)
    return copied


def test_they_are_the_answers_of_generate(run: Run) -> None:
    notes = Notes(SILENT)
    report_stage.write_continuations(run, ContinueOptions(2), notes)
    found = load_continuations(run)
    assert len(found.continuations) == 2
    assert notes.lines == []
    each = found.continuations[0]
    expected = compare_answers(run.root, each.prompt, GenerateOptions(max_tokens=found.tokens, runtime="reference"))
    assert (each.bf16, each.fp8, each.parts_at) == (expected.bf16.text, expected.fp8.text, expected.parts_at)
    assert each.bf16 == each.common + each.rests[0]
    before = run.continuations.stat().st_mtime_ns
    report_stage.write_continuations(run, ContinueOptions(2), notes)
    assert run.continuations.stat().st_mtime_ns == before


def test_one_model_is_in_memory_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Generator]] = []
    open_model = generate.open_model

    def opening(run: Run, runtime: str, adapter: str | None) -> Generator:
        assert all(each() is None for each in opened)
        generator = open_model(run, runtime, adapter=adapter)
        opened.append(weakref.ref(generator))
        return generator

    monkeypatch.setattr(generate, "open_model", opening)
    answers = generate.compare_all(run, ["one two", "three"], GenerateOptions(max_tokens=2, runtime="reference"))
    assert len(answers) == len(opened) == 2


def test_what_memory_does_not_hold_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device: 1_000_000)
    notes = Notes(SILENT)
    report_stage.write_continuations(run, ContinueOptions(3), notes)
    assert notes.lines == [
        "no continuations: the weights take 0.00695 GB in BF16, and 80% of the memory available is 0.0008 GB"
    ]


def test_without_the_source_or_its_libraries_a_note_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    where = run.record().model["path"]
    written = run.record_file.read_text(encoding="utf-8")
    run.record_file.write_text(written.replace(where, "/gone"), encoding="utf-8")
    notes = Notes(SILENT)
    report_stage.write_continuations(run, ContinueOptions(3), notes)
    run.record_file.write_text(written, encoding="utf-8")
    gone = f"/gone: the model that {run.root} was made of is no longer there; put it back, or calibrate again"
    assert notes.lines == [f"no continuations: {gone}"]
    monkeypatch.setattr(report_stage, "CALIBRATE_MODULES", ("a_library_that_is_not_here",))
    notes = Notes(SILENT)
    report_stage.write_continuations(run, ContinueOptions(3), notes)
    assert notes.lines == [
        (
            "no continuations: a_library_that_is_not_here is not installed and this command needs it; install it with "
            "`pip install 'fp8q[calibrate]'`"
        )
    ]
    assert len(report_continuations(run).continuations) == 2  # what an earlier call wrote


def test_a_notebook_shows_them_side_by_side(run: Run) -> None:
    html = report_continuations(run)._repr_html_()
    assert html.count("<tr>") == 3
    assert "Not written" in Continuations(tokens=0, continuations=[])._repr_html_()
