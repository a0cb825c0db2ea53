"""A signal ends the program where it stands: one line, 130 or 143, nothing half-written, whatever a library does with
interrupts; and the same command goes on.
"""

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8q import __version__
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.core.undo import all_open, at_end, scratch, undoing

INTERRUPTED = "fp8q: interrupted; what is finished is kept, and the same command goes on from there\n"
STOPPED = "fp8q: stopped by SIGTERM; what is finished is kept, and the same command goes on from there\n"

#: `fp8q export` whose work is one of these functions, in a stage of the run $RUN; "ready" when a signal may come.
CHILD = """
import ctypes, os, sys, time, weakref
from pathlib import Path
import fp8q.api
from fp8q.cli.console import Terminal
from fp8q.cli.main import main
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.core.undo import undoing

def ready():
    os.write(sys.stdout.fileno(), b"ready\\n")  # no stream of Python's, which a handler may not enter twice
    for _ in range(600):
        time.sleep(0.05)

def swallowed():
    while True:
        try:
            ready()
        except BaseException:
            pass

def wrapped():
    try:
        ready()
    except BaseException as error:
        raise RuntimeError("cannot export this architecture") from error

def in_a_callback_from_c():
    ctypes.CFUNCTYPE(None)(ready)()

def in_a_weak_reference():
    class Thing: pass
    thing = Thing()
    kept = weakref.ref(thing, lambda _: ready())
    del thing

def where_standard_error_is_muted():
    from fp8q.calibrate.input.silence import muted
    with muted():
        ready()

def slow_to_undo():
    def undo():
        os.write(sys.stdout.fileno(), b"undoing\\n")
        time.sleep(60)
    with undoing(undo):
        ready()

def under_a_bar():
    with Terminal().track("Working", 100) as advance:
        ready()

def examine():
    run = Run(Path(os.environ["RUN"]))
    with RunWriter(run).stage("quantize", {}, {}) as log:
        (run.root / ".scales.json.partial").write_text("half")
        globals()[os.environ["WORK"]]()

fp8q.api.export = lambda *_: examine()
sys.argv[1:] = ["export", os.environ["RUN"]]
main()
"""


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Interrupts are heeded by whom we start, though a test run in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def child(run: Path, work: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """The program at work, ready for a signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "RUN": str(run), "WORK": work},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


@pytest.mark.parametrize(
    "work",
    [
        "swallowed",
        *(
            pytest.param(work, marks=pytest.mark.slow)
            for work in ("wrapped", "in_a_callback_from_c", "in_a_weak_reference", "where_standard_error_is_muted")
        ),
    ],
)
def test_an_interrupt_is_heard_whatever_a_library_does_with_interrupts(work: str, tmp_path: Path) -> None:
    process = child(tmp_path / "run", work)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, "", INTERRUPTED)
    assert not (tmp_path / "run").exists()


def test_sigterm_ends_with_143_and_what_was_finished_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with RunWriter(run).stage("corpus", {}, {}):
        pass
    process = child(run.root, "wrapped")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (143, "", STOPPED)
    assert list(run.record().stages) == ["corpus"]
    assert {path.name for path in run.root.iterdir()} == {"run.json", ".lock"}


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    process = child(tmp_path / "run", "slow_to_undo")
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "undoing\n"
    since = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, INTERRUPTED)
    assert time.monotonic() - since < 5


def test_on_a_terminal_the_line_stands_below_the_bar_and_the_cursor_is_shown_again(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = child(tmp_path / "run", "under_a_bar", theirs)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    os.close(theirs)
    drawn = b""
    try:
        while piece := os.read(ours, 4096):
            drawn += piece
    except OSError:  # Linux: the other side is closed
        pass
    os.close(ours)
    assert process.returncode == 130
    assert drawn.decode().endswith(f"\r\n\x1b[?25h{INTERRUPTED[:-1]}\r\n")


def test_when_all_is_done_an_interrupt_changes_nothing() -> None:
    """Python puts the system's own handlers back while it clears up, and would die of the signal without a word."""
    late = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"
    code = f"{late}; import sys; sys.argv[1:] = ['--version']; from fp8q.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fp8q {__version__}\n", "")


def test_who_ignores_interrupts_is_not_interrupted(tmp_path: Path) -> None:
    """A job in the background of a script without job control, as `nohup` does for SIGHUP."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = child(tmp_path / "run", "wrapped")
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143


def test_what_is_open_is_undone_from_inside_out_and_nothing_keeps_the_rest() -> None:
    undone: list[str] = []

    def fails() -> None:
        undone.append("middle")
        raise OSError("gone")

    with at_end(lambda: undone.append("outer")), at_end(fails), at_end(lambda: undone.append("inner")):
        all_open()
    assert undone == ["inner", "middle", "outer"]
    all_open()
    assert undone == ["inner", "middle", "outer"]


def test_a_block_that_raises_is_undone_once_and_one_that_ends_well_is_not() -> None:
    undone: list[str] = []
    with undoing(lambda: undone.append("well")):
        pass
    with pytest.raises(KeyError), undoing(lambda: undone.append("raised")):
        raise KeyError
    assert undone == ["raised"]


def test_a_scratch_folder_goes_however_the_block_ends() -> None:
    with scratch() as well:
        (well / "file").write_text("x")
    with pytest.raises(KeyError), scratch() as badly:
        raise KeyError
    with scratch() as ended:
        all_open()
        assert not ended.exists()
    assert not well.exists()
    assert not badly.exists()


def dropped(stage: str) -> Callable[[Run], bool]:
    """The stage is at work: its record is taken away while it is done again."""
    return lambda run: stage not in run.record().stages


def page_written(run: Run) -> bool:
    """The report's page is there, and its notebook is executed now."""
    return run.report_html.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "begun", "wait"),
    [
        (["export", "RUN", "--dtype", "fp16"], dropped("export"), 3.0),
        (["report", "RUN"], page_written, 1.0),
        (["validate", "RUN", "--runtimes", "bf16,reference", "--stride", "8"], dropped("validate"), 1.0),
        (["build-engine", "RUN", "--runtime", "tensorrt-rtx", "--max-seq-len", "128"], dropped("build-engine"), 0.5),
    ],
)
def test_a_stage_that_is_interrupted_says_one_line_and_leaves_what_it_goes_on_from(
    demo_run: Run, tmp_path: Path, command: list[str], begun: Callable[[Run], bool], wait: float
) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    run.report_html.unlink()
    arguments = [str(run.root) if argument == "RUN" else argument for argument in command]
    process = subprocess.Popen([sys.executable, "-m", "fp8q", *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not begun(run):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines(keepends=True)[-1:]) == (130, [INTERRUPTED]), err
    assert err.count("fp8q: ") == 1
    assert "Traceback" not in err
    kept = {".lock", ".validate.work"} if command[0] == "validate" else {".lock"}
    assert {path.name for path in run.root.rglob(".*")} <= kept


@pytest.mark.slow
def test_a_stream_that_is_interrupted_goes_on_and_ends_the_same(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    def command(run: Run) -> list[str]:
        texts = ["--data", str(demo_texts.calibration), "--eval-data", str(demo_texts.evaluation)]
        sizes = ["--samples", "48", "--seq-len", "128", "--batches", "0:6", "--stream"]
        here = [sys.executable, "-m", "fp8q", "calibrate", str(demo_checkpoint)]
        return [*here, *texts, *sizes, "--out", str(run.root)]

    undisturbed, run = Run(tmp_path / "undisturbed"), Run(tmp_path / "run")
    process = subprocess.Popen(command(run), stderr=subprocess.PIPE, text=True)
    while not (run.root / ".measure.work" / "00001.safetensors").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines(keepends=True)[-1:]) == (130, [INTERRUPTED]), err
    for each in (run, undisturbed):
        subprocess.run(command(each), check=True, capture_output=True, timeout=120)
    assert run.statistics.read_bytes() == undisturbed.statistics.read_bytes()
    assert {path.name for path in run.root.iterdir()} == {path.name for path in undisturbed.root.iterdir()}
