"""Processes for cases: forks of this one, which has imported all that fp8q imports, or real ones that begin anew.

Importing torch, transformers and ModelOpt takes some ten seconds, a case a fraction of one: so this process imports
them once, runs each command once, since libraries compile patterns and options when they are first used, keeps no
thread, and forks for each case. A fork has streams, folder, variables and limits of its own and ends by `os._exit`;
what outlives it in its process group is a leftover.
"""

import atexit
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import re
import resource
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

#: One thread each: a fork is whole, and values are the same on every machine. No network: no case waits for one.
QUIET = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
#: Address space that a case may add to what is mapped already, bytes: more is work without bound.
MEMORY = 6 << 30
#: The largest file that a case with "small files" may write, bytes.
SMALL_FILE = 2000
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
PR_SET_PDEATHSIG = 1
#: A process that takes less of a processor waits for something else; and so many times the limit is too long.
IDLE, PATIENCE = 0.02, 10
#: Time in which a process that hangs tells where.
TELLING_S = 0.3


@dataclass
class Running:
    """A process that was started, and where its output goes."""

    pid: int
    started: float
    folder: Path
    killed: bool = False


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that ended it; `hung` where that was ours."""

    code: int
    out: str
    err: str
    seconds: float
    hung: bool = False
    orphans: bool = False


@dataclass(frozen=True)
class Start:
    """How a process is started: arguments, folder, variables, and what is odd about it ("closed stdout" …).

    `before`: called in the child before the command. `typed`: the file on its standard input.
    """

    argv: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    odd: frozenset[str] = frozenset()
    real: bool = False
    before: Callable[[], None] | None = None
    typed: str = "/dev/null"


def launch(start: Start) -> Running:
    """Start a case's command; its output goes to files beside its folder."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("out", "err"):
        Path(f"{start.folder}.{name}").touch()
    pid = os.fork()
    if pid == 0:
        try:
            prepare(start)
            if start.real:
                begin_anew(start)
            os._exit(command(start))
        except BaseException:  # noqa: BLE001  # whatever it was, a fork ends here
            traceback.print_exc()
            os._exit(99)
    return Running(pid, time.monotonic(), start.folder)


def prepare(start: Start) -> None:
    """In the child: a session, a folder, streams, variables and limits of its own; it dies with the campaign."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for caught in (signal.SIGINT, signal.SIGTERM):  # what the campaign does then is its own
        signal.signal(caught, signal.SIG_DFL)
    os.chdir(start.folder)
    temporary = start.folder.with_name(start.folder.name + ".tmp")
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary), "HOME": str(temporary.parent), "TERM": "dumb", **start.environment}
    os.environ.update(environment)
    tempfile.tempdir = None
    streams = {0: start.typed, 1: f"{start.folder}.out", 2: f"{start.folder}.err"}
    if "full stdout" in start.odd:
        streams[1] = "/dev/full"
    for number, path in streams.items():
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    drop_capabilities()
    limit(resource.RLIMIT_AS, mapped_bytes() + MEMORY * (3 if start.real else 1))
    limit(resource.RLIMIT_CORE, 0)
    if "small files" in start.odd:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit(resource.RLIMIT_FSIZE, SMALL_FILE)
    closed = {"closed stdin": [0], "closed stdout": [1], "closed stderr": [2], "closed all": [0, 1, 2]}
    for number in [number for name, numbers in closed.items() if name in start.odd for number in numbers]:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as Python has it then
    os.closerange(3, 256)


def limit(what: int, most: int) -> None:
    """Lower a limit of this process."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))


def mapped_bytes() -> int:
    """Address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as handle:
        return int(handle.read().split()[0]) * resource.getpagesize()


def drop_capabilities() -> None:
    """Let permissions of files hold for root too, as they do for everybody."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("=II", 0x20080522, 0), ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        return
    words = list(struct.unpack("=6I", data.raw))
    for index in (0, 1):
        words[index] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    libc.capset(header, struct.pack("=6I", *words))


def begin_anew(start: Start) -> None:
    """Become a Python of its own that runs fp8q."""
    os.execv(sys.executable, [sys.executable, "-m", "fp8q", *start.argv])


def command(start: Start) -> int:
    """Run fp8q in this fork, as its own process would; the exit code."""
    from fp8q.cli.main import main

    if start.before:
        start.before()
    with open(f"{start.folder}.err", "a", encoding="utf-8") as told:
        faulthandler.register(signal.SIGUSR1, told)
        return ended_by(main, start.argv)


def ended_by(main: Callable[[], None], argv: Sequence[str]) -> int:
    """The exit code of fp8q's `main`, where it runs as its own process would."""
    sys.argv = ["fp8q", *argv]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  # Python's own end: a traceback, and exit code 1
        traceback.print_exc()
        code = 1
    with suppress(Exception):
        atexit._run_exitfuncs()  # removes temporary folders, as at the end of Python
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    return code


def ended(running: Running, limit_s: float) -> Ended | None:
    """How the process ended; None while it runs. After `limit_s` it says where it is, and is killed."""
    pid, status = os.waitpid(running.pid, os.WNOHANG)
    seconds = time.monotonic() - running.started
    if not pid:
        if seconds > limit_s and not running.killed and is_stuck(running.pid, seconds, limit_s):
            running.killed = True
            os.kill(running.pid, signal.SIGUSR1)
            time.sleep(TELLING_S)
            os.killpg(running.pid, signal.SIGKILL)
        return None
    orphans = True
    try:
        os.killpg(running.pid, signal.SIGKILL)
    except ProcessLookupError:
        orphans = False
    read = [Path(f"{running.folder}.{name}") for name in ("out", "err")]
    out, err = (path.read_bytes()[:200_000].decode("utf-8", "backslashreplace") for path in read)
    return Ended(os.waitstatus_to_exitcode(status), out, err, seconds, running.killed, orphans)


def is_stuck(pid: int, seconds: float, limit_s: float) -> bool:
    """Whether a process that has run for `seconds` has had `limit_s` of a processor, or hardly asked for one, with
    those that it started: on a busy machine it may only have waited.
    """
    had, waited = processor_s(pid)
    return had > limit_s or had + waited < seconds * IDLE or seconds > PATIENCE * limit_s


def processor_s(group: int) -> tuple[float, float]:
    """Seconds of a processor that the processes in a group had, those aside that are gone, and that they waited for
    one, of which Linux may not tell.
    """
    had, waited = 0, 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                had += int(fields[11]) + int(fields[12])
                waited += int(path.with_name("schedstat").read_text(encoding="ascii").split()[1])
    return had / os.sysconf("SC_CLK_TCK"), waited / 1e9


def wait(running: Running, limit_s: float = 300) -> Ended:
    """The end of the process."""
    while (end := ended(running, limit_s)) is None:
        time.sleep(0.005)
    return end


def warm_up(modules: Sequence[str]) -> None:
    """Import what a child had imported when it ended, in that order; then leave the collector out of forks."""
    for name in modules:
        if name not in sys.modules and name != "__main__":
            with suppress(BaseException):  # some exist only as part of another's import
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run_once(argv: Sequence[str], folder: Path) -> int:
    """Run a valid command in this process, silently, so that forks find prepared what it prepared; the exit code."""
    from fp8q.cli.main import command

    own = sys.argv
    try:
        sys.argv = ["fp8q", *argv]
        with working_in(folder), silenced():
            return command()
    finally:
        sys.argv = own


def settle_caches() -> None:
    """Let caches hold what all commands use, and keep what is there now out of the collector and of a fork's end."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    tqdm.monitor_interval = 0  # no thread
    re._MAXCACHE = re._MAXCACHE2 = 1 << 16  # type: ignore[attr-defined]
    metadata.version = functools.cache(metadata.version)
    if find_spec("lm_eval"):
        leave_out_own_tasks()


def leave_out_own_tasks() -> None:
    """Let lm-eval find the tasks of --include-path alone: it reads 14,000 files of its own each time, in 20 s."""
    from lm_eval import tasks
    from lm_eval.tasks._index import TaskIndex

    found, own = TaskIndex._iter_yaml_files, Path(tasks.__file__).parent
    TaskIndex._iter_yaml_files = staticmethod(lambda root: () if root == own else found(root))


def settle_process() -> None:
    """Prepare this process for forks: a single thread, nothing for the collector, no finalizers of what stays."""
    if threading.active_count() > 1:
        raise SystemExit(f"a fork has one thread, and there are {threading.enumerate()}")
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # 200 of torch's, 30 ms a case
        finalizer.atexit = False
    gc.collect()
    gc.freeze()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make `folder` the working directory in this block."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


@contextmanager
def silenced() -> Iterator[None]:
    """Let standard output and error of this process lead nowhere in this block."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open("/dev/null", os.O_RDWR)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, stream in zip((1, 2), kept, strict=True):
            os.dup2(stream, number)
        for number in (*kept, nowhere):
            os.close(number)


def tell_modules(path: Path) -> Callable[[], None]:
    """For `Start.before`: at its end the child writes which modules it has imported."""
    return lambda: (atexit.register(lambda: path.write_text("\n".join(sys.modules), encoding="utf-8")), None)[1]
