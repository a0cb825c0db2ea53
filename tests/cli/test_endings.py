"""The end of a command: what is outdated, and what comes next."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8q.cli.commands import app
from fp8q.cli.views import FILES, MADE, TABLES, ending
from fp8q.core.files import sha256_file
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.validate.report.verdict import next_steps, report_verdict, standing

#: Of a model without GEMMs.
SCALES = '{"weights": {}, "activations": {}, "skipped": {}}'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def write(run: Run, stage: str, file: str, text: str, inputs: tuple[str, ...] = ()) -> None:
    """Let `stage` write `file` with this `text`, by the files `inputs`."""
    read: Mapping[str, str] = {name: sha256_file(run.root / name) for name in inputs}
    with RunWriter(run).stage(stage, dict(read), {}) as log:
        (run.root / file).write_text(text)
        log.outputs.append(run.root / file)


def test_a_run_that_nobody_validated_is_to_be_validated(run: Run) -> None:
    write(run, "quantize", "scales.json", SCALES)
    assert ending(run) == [f"next: `fp8q validate {run.root}`   Hold FP8 against BF16 on text that was held out."]


def test_what_is_outdated_is_named_with_its_command(run: Run) -> None:
    write(run, "quantize", "scales.json", SCALES)
    write(run, "export", "model.onnx", "graph", ("scales.json",))
    write(run, "build-engine", "engine.json", "plan", ("model.onnx",))
    write(run, "quantize", "scales.json", f"{SCALES} ")
    first, last = ending(run)
    assert first == f"outdated, since the run has changed: export; `fp8q export {run.root}` does it again"
    assert last.startswith(f"next: `fp8q validate {run.root}` ")


def test_nothing_comes_next_of_statistics_alone(run: Run) -> None:
    write(run, "measure", "statistics.json", "counts")
    assert ending(run) == []


def test_the_next_command_is_the_report_s(demo_run: Run) -> None:
    first, *_ = next_steps(report_verdict(demo_run), standing(demo_run))
    assert ending(demo_run)[-1] == f"next: `{first.command}`   {first.why}"


def test_what_commands_make_are_tables_and_files_of_runs() -> None:
    assert set(MADE) < set(app)
    assert all(set(made.tables) <= set(TABLES) and set(made.files) <= set(FILES) for made in MADE.values())
