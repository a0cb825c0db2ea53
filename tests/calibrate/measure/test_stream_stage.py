"""The stage `measure`, streamed: the bytes of the stage in memory, however often it is killed; and full disks."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8q.calibrate.measure.hidden_states import HiddenStates
from fp8q.calibrate.measure.stream import Stream
from fp8q.calibrate.model.decoder import LayerOutput
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import CalibrateOptions
from fp8q.stages.corpus import save_tokens
from fp8q.stages.measure import measure as measure_stage
from fp8q.stages.pipeline.stage import Notes

from .streams import WINDOWS


class Killed(BaseException):
    """Stands for SIGKILL where the test must go on: like it, nothing of ours catches it."""


def measured(
    root: Path, checkpoint: Path, stream: bool | None, windows: np.ndarray = WINDOWS, report: Any = SILENT
) -> Run:
    """The stage `measure` of `checkpoint` on `windows` in the run directory `root`, streamed or not."""
    run = Run(root)
    if not run.exists():
        with RunWriter(run).stage(
            "corpus", {}, {"data": "random tokens", "eval_data": "random tokens", "model": "demo"}
        ) as log:
            save_tokens(run.calibration, windows)
            log.outputs.append(run.calibration)
    measure_stage(run, open_source(str(checkpoint)), CalibrateOptions(batch_size=2, stream=stream), Notes(report))
    return run


def written(run: Run) -> bytes:
    return run.statistics.read_bytes() + run.statistics_json.read_bytes()


def names(run: Run) -> set[str]:
    return {path.name for path in run.root.iterdir()}


@pytest.fixture(scope="module")
def unstreamed(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(tmp_path_factory.mktemp("memory") / "run", demo_checkpoint, False)


def test_the_stage_writes_the_same_bytes_and_leaves_nothing_behind(
    demo_checkpoint: Path, unstreamed: Run, tmp_path: Path
) -> None:
    run = measured(tmp_path / "run", demo_checkpoint, True)
    assert written(run) == written(unstreamed)
    assert (
        names(run)
        == names(unstreamed)
        == {".lock", "run.json", "calibration.npz", "statistics.safetensors", "statistics.json"}
    )
    records = [made.record().stages["measure"] for made in (run, unstreamed)]
    assert records[0].options == records[1].options
    assert (records[0].options["batch_size"], records[0].options["moments"]) == (2, False)


@pytest.mark.parametrize("at", range(6))
def test_stopped_anywhere_it_goes_on_at_the_step_it_reached(
    at: int, demo_checkpoint: Path, unstreamed: Run, tmp_path: Path, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 is the embedding, 1 to 4 are the demo's layers, each stopped with its second batch written; 5 is after
    them.
    """
    ran: list[int] = []
    layer, write = Stream._layer, HiddenStates.write

    def counted(self: Stream, step: int, *arguments: Any) -> None:
        ran.append(step)
        layer(self, step, *arguments)

    def stopping(self: HiddenStates, batch: int, hidden: torch.Tensor) -> None:
        write(self, batch, hidden)
        if batch == 1 and max(ran, default=0) == at:
            raise Killed

    def stopped(steps: object) -> None:
        raise Killed

    monkeypatch.setattr(Stream, "_layer", counted)
    with monkeypatch.context() as once:
        once.setattr(HiddenStates, "write", stopping)
        if at == 5:
            once.setattr("fp8q.calibrate.measure.stream._added", stopped)
        with pytest.raises(Killed):
            measured(tmp_path / "run", demo_checkpoint, True)
    assert ".measure.work" in names(Run(tmp_path / "run"))
    ran.clear()
    run = measured(tmp_path / "run", demo_checkpoint, True, report=report)
    assert ran == list(range(max(at, 1), 5))
    assert written(run) == written(unstreamed)
    assert ".measure.work" not in names(run)
    assert report.lines == (
        [f"going on at decoder layer {min(at, 4)} of 4, where an earlier call stopped"] if at > 1 else []
    )


def test_what_was_left_by_other_options_is_not_used(
    demo_checkpoint: Path, unstreamed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        once.setattr("fp8q.calibrate.measure.stream._added", lambda steps: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            measured(tmp_path / "run", demo_checkpoint, True)
    key = tmp_path / "run" / ".measure.work" / "key.json"
    key.write_text(json.dumps(json.loads(key.read_text()) | {"threads": 99}))
    (key.parent / "00001.safetensors").write_bytes(b"of another machine")
    assert written(measured(tmp_path / "run", demo_checkpoint, True)) == written(unstreamed)


def test_without_streaming_nothing_of_a_stopped_stream_stays(demo_checkpoint: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with RunWriter(run).stage(
        "corpus", {}, {"data": "random tokens", "eval_data": "random tokens", "model": "demo"}
    ) as log:
        save_tokens(run.calibration, WINDOWS)
        log.outputs.append(run.calibration)
    (run.root / ".measure.work").mkdir()
    measured(run.root, demo_checkpoint, False)
    assert ".measure.work" not in names(run)


CHILD = """
import sys, numpy as np
from pathlib import Path
from fp8q.calibrate.model.source import open_source
from fp8q.options import CalibrateOptions
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.stages.measure import measure
from fp8q.stages.pipeline.stage import Notes
measure(Run(Path(sys.argv[1])), open_source(sys.argv[2]), CalibrateOptions(batch_size=2, stream=True), Notes(SILENT))
"""


@pytest.mark.slow
def test_sigkill_at_random_points_then_the_same_bytes(demo_checkpoint: Path, tmp_path: Path) -> None:
    windows = np.random.default_rng(1).integers(3, 500, (48, 64))
    expected = measured(tmp_path / "memory", demo_checkpoint, False, windows)
    shutil.copytree(expected.root, tmp_path / "run")
    run, random = Run(tmp_path / "run"), np.random.default_rng(2)
    run.statistics.unlink()
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(run.root), str(demo_checkpoint)]
    for step in (0, 2):
        with subprocess.Popen(command) as child:
            while not (run.root / ".measure.work" / f"{step:05}.safetensors").exists():
                assert child.poll() is None, "the process ended before it was killed"
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.2))
            child.send_signal(signal.SIGKILL)
        assert not run.statistics.exists()
    subprocess.run(command, check=True, timeout=300)
    assert written(run) == written(expected)
    assert ".measure.work" not in names(run)


Usage = namedtuple("Usage", ("total", "used", "free"))


def test_a_disk_without_room_is_refused_with_the_numbers(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of 5 · 24 tokens, 256 BF16 values each: 122,880 bytes; said in kB."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 122_879, 122_879))
    with pytest.raises(InputError) as refused:
        measured(tmp_path / "run", demo_checkpoint, True)
    assert str(refused.value) == (
        f"--stream: the hidden states take 123 kB on the disk of {tmp_path}/run, which has 123 kB free; "
        "free some, name another directory with --out, or ask for fewer --samples"
    )
    assert names(Run(tmp_path / "run")) == {".lock", "run.json", "calibration.npz"}
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 122_880, 122_880))
    assert measured(tmp_path / "run", demo_checkpoint, True).statistics.is_file()


def test_a_disk_that_fills_is_one_line_and_leaves_nothing(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fp8q.calibrate.measure.stream.save_arrays", full)
    with pytest.raises(
        InputError, match=f"^{tmp_path}/run: no space left on the disk; free some or name another directory$"
    ):
        measured(tmp_path / "run", demo_checkpoint, True)
    assert names(Run(tmp_path / "run")) == {".lock", "run.json", "calibration.npz"}


def test_hidden_states_have_their_blocks_before_they_are_written(tmp_path: Path) -> None:
    """A mapped write to a full disk is a signal that kills the process; taking the blocks first is an error that can be
    told.
    """
    HiddenStates(tmp_path / "hidden", {0: WINDOWS[:2], 2: WINDOWS[4:]}, LayerOutput(0, 8192, torch.bfloat16))
    found = (tmp_path / "hidden").stat()
    assert found.st_size == 3 * 24 * 8192 * 2
    assert found.st_blocks * 512 >= found.st_size
