"""The end of a command: what is outdated, and what comes next."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8q.cli.commands import app
from fp8q.cli.endings import FILES, MADE, TABLES, ending
from fp8q.core.files import sha256_file
from fp8q.core.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def write(run: Run, stage: str, file: str, text: str, inputs: tuple[str, ...] = ()) -> None:
    """Let `stage` write `file` with this `text`, by the files `inputs`."""
    read: Mapping[str, str] = {name: sha256_file(run.root / name) for name in inputs}
    with run.stage(stage, dict(read), {}) as log:
        (run.root / file).write_text(text)
        log.outputs.append(run.root / file)


def test_what_comes_next_is_the_first_stage_that_is_missing(run: Run) -> None:
    write(run, "quantize", "scales.json", "one")
    assert ending(run) == [f"next: `fp8q validate {run.root}` tells whether it is still the same model"]
    write(run, "validate", "accuracy.json", "good", ("scales.json",))
    assert ending(run) == [f"next: `fp8q build-engine {run.root}` builds the engine, and proves what it runs in FP8"]
    write(run, "build-engine", "engine.json", "plan", ("scales.json",))
    assert ending(run) == [f"next: `fp8q triton {run.root}` writes the Triton model repository"]
    write(run, "triton", "config.pbtxt", "model")
    assert ending(run) == [f"next: `fp8q report {run.root}` shows the results to others"]
    write(run, "report", "report.html", "page")
    assert ending(run) == [f"next: `fp8q serve {run.root}` serves the model"]


def test_what_is_outdated_is_named_with_its_command(run: Run) -> None:
    write(run, "quantize", "scales.json", "one")
    write(run, "validate", "accuracy.json", "good", ("scales.json",))
    write(run, "export", "model.onnx", "graph", ("scales.json",))
    write(run, "build-engine", "engine.json", "plan", ("model.onnx",))
    write(run, "quantize", "scales.json", "two")
    assert ending(run) == [
        f"outdated, since the run has changed: validate; `fp8q validate {run.root}` does it again",
        f"outdated, since the run has changed: export; `fp8q export {run.root}` does it again",
        f"next: `fp8q triton {run.root}` writes the Triton model repository",
    ]


def test_a_run_without_graph_goes_to_vllm(run: Run) -> None:
    write(run, "quantize", "scales.json", "one")
    with run.stage("export", {}, {}) as log:
        log.refused = "--no-graph"
    write(run, "validate", "accuracy.json", "good", ("scales.json",))
    write(run, "report", "report.html", "page")
    assert ending(run) == [f"next: `vllm serve {run.model}` serves the model"]


def test_nothing_comes_next_of_statistics_alone(run: Run) -> None:
    write(run, "measure", "statistics.json", "counts")
    assert ending(run) == []


def test_what_commands_make_are_tables_and_files_of_runs() -> None:
    assert set(MADE) < set(app)
    assert all(set(made.tables) <= set(TABLES) and set(made.files) <= set(FILES) for made in MADE.values())
