"""A calibration in memory that is killed goes on behind the last batch that it saved, with the bytes of one call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q.calibrate.measure import measurement
from fp8q.calibrate.measure.measurement import SavedBatches
from fp8q.calibrate.measure.observe import Watch
from fp8q.calibrate.measure.statistics import save_arrays
from fp8q.calibrate.model.processor import Inputs
from fp8q.calibrate.model.source import open_source
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import CalibrateOptions
from fp8q.stages.corpus import save_tokens
from fp8q.stages.measure import measure
from fp8q.stages.pipeline.stage import Notes

from ...mixtures import random_mixture

#: Nine windows of tokens that random mixtures know, of which every second batch is two, and the fourth is held out.
WINDOWS = np.random.default_rng(0).integers(0, 128, (9, 32))


class Killed(BaseException):
    """Stands for SIGKILL where the test must go on."""


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A mixture of experts: of some of these no token comes in some batches."""
    return random_mixture(tmp_path / "mixture", "qwen3_moe")


def measured(root: Path, checkpoint: Path, report: Any) -> dict[str, bytes]:
    """The files of the stage `measure`, in memory, with second moments."""
    run = Run(root)
    if not run.exists():
        facts = {"data": "random tokens", "eval_data": "random tokens", "model": "mixture"}
        with RunWriter(run).stage("corpus", {}, facts) as log:
            save_tokens(run.calibration, WINDOWS)
            log.outputs.append(run.calibration)
    options = CalibrateOptions(batch_size=2, stream=False)
    measure(run, open_source(str(checkpoint)), options, Notes(report), moments=True)
    files = [run.statistics, run.statistics_json, *sorted(run.moments.iterdir())]
    return {str(path.relative_to(run.root)): path.read_bytes() for path in files}


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[int]]:
    """`stopping(3)`: batch 3 ends the process half-way; None: none does. Returns the batches that run from then on."""
    run = Watch.run

    def stop(at: int | None) -> list[int]:
        ran = list[int]()

        def counted(self: Watch, inputs: Inputs, batch: int) -> None:
            ran.append(batch)
            run(self, inputs, batch)
            if batch == at:
                raise Killed

        monkeypatch.setattr(Watch, "run", counted)
        return ran

    return stop


def test_killed_twice_it_goes_on_behind_the_last_batch_it_saved(
    mixture: Path, stopping: Callable[[int | None], list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listening = Notes(SILENT)
    ran = stopping(None)
    whole = measured(tmp_path / "whole", mixture, listening)
    assert ran == [0, 1, 2, 3, 4]
    assert any(name.endswith(".held_out.npy") for name in whole)
    assert any(name.endswith(".first.npy") for name in whole)
    assert listening.lines == []
    monkeypatch.setattr(measurement, "EVERY_S", 0.0)
    monkeypatch.setattr(measurement, "SHARE", 1e9)
    for at, expected in ((2, [0, 1, 2]), (4, [2, 3, 4])):
        ran = stopping(at)
        with pytest.raises(Killed):
            measured(tmp_path / "killed", mixture, listening)
        assert ran == expected
    ran = stopping(None)
    assert measured(tmp_path / "killed", mixture, listening) == whole
    assert ran == [4]
    assert listening.lines == [f"going on behind batch {batch} of 5, where an earlier call stopped" for batch in (2, 4)]
    assert not list((tmp_path / "killed").glob(".*.work"))


def test_it_saves_once_a_minute_and_for_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    saved = SavedBatches(tmp_path, None)
    due = []
    for now in (59.0, 60.0):
        clock[0] = now
        due.append(saved.is_due())

    def slow(*arguments: Any) -> None:
        save_arrays(*arguments)
        clock[0] += 3.0

    monkeypatch.setattr(measurement, "save_arrays", slow)
    saved.save(1, {})
    for now in (63.0 + 149.0, 63.0 + 150.0):
        clock[0] = now
        due.append(saved.is_due())
    assert due == [False, True, False, True]
    assert SavedBatches(tmp_path, None).load(9) == (1, {})
