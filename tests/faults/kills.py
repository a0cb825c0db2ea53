"""Kills: a calibration or conversion ended by SIGKILL, SIGINT or SIGTERM at a random moment, run again to its end, and
held against one that nobody disturbed: the same files, the same bytes.

A moment is a change of a file (the process ends itself just before its n-th), which is where a half-written state
would be, or a time. Most calibrations go on with a run of another text, whose graphs the new scales are carried into: a
second each, where an export takes many.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from case import copy_world
from oracle import TRACES, snapshot
from workers import Ended, Start, ended, launch, wait
from world import SHORT

if TYPE_CHECKING:
    from campaign import Campaign

#: The audit events before which a file is about to change.
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.truncate", "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
#: One in so many is a real process; one in so many begins with nothing, and exports.
REAL_EVERY, FRESH_EVERY = 10, 8


@dataclass(frozen=True)
class Killed:
    """One kill: how, whether of a streamed calibration or of a conversion, and what was wrong afterwards."""

    what: str
    streamed: bool
    converts: bool
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Undisturbed:
    """A calibration to its end: file -> SHA-256, how many changes of files it took, and seconds."""

    files: dict[str, str]
    changes: int
    seconds: float


@dataclass(frozen=True)
class Kind:
    """A command that is killed: a conversion, or a calibration, which is streamed or not, and goes on with a run but
    where it is `fresh`.
    """

    streamed: bool = False
    fresh: bool = False
    converts: bool = False

    @property
    def out(self) -> str:
        """The directory that it writes."""
        return "out" if self.converts else "quantized"

    def __str__(self) -> str:
        return "".join(f", {name}" for name, value in vars(self).items() if value)


def kind_of(index: int) -> Kind:
    """A third of the kills is of conversions, another of streamed calibrations."""
    if index % 3 == 1:
        return Kind(converts=True)
    return Kind(streamed=index % 3 == 2, fresh=index % FRESH_EVERY == FRESH_EVERY - 1)


def argv_of(kind: Kind) -> list[str]:
    """The command that is killed."""
    if kind.converts:
        return ["convert", "sharded", "--out", kind.out, "--threads", "1"]
    text = ["--data", "texts/text.jsonl", "--eval-data", "texts/other.txt", "--kv-cache", "fp8"]
    return ["calibrate", "tiny", *text, "--out", kind.out, *SHORT, *(["--stream"] if kind.streamed else [])]


def counting(tell: Path) -> Callable[[], None]:
    """For `Start.before`: write at the end how many changes of files there were."""

    def begin() -> None:
        import atexit

        seen = [0]

        def count(event: str, details: tuple[object, ...]) -> None:
            seen[0] += is_change(event, details)

        sys.addaudithook(count)
        atexit.register(lambda: tell.write_text(str(seen[0])))

    return begin


def is_change(event: str, details: tuple[object, ...]) -> bool:
    """Whether an audit event comes before a change of a file."""
    if event == "open":
        return isinstance(details[2], int) and bool(details[2] & WRITES)
    return event in CHANGES


def ending(at: int, number: int) -> Callable[[], None]:
    """For `Start.before`: the process sends itself the signal `number` before its change of a file number `at`."""

    def begin() -> None:
        left = [at]

        def hook(event: str, details: tuple[object, ...]) -> None:
            if is_change(event, details):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), number)

        sys.addaudithook(hook)

    return begin


def digests(run: Path) -> dict[str, str]:
    """Every file of a run but its record, which tells times, and its lock."""
    paths = [path for path in sorted(run.rglob("*")) if path.name not in ("run.json", ".lock")]
    return {
        str(path.relative_to(run)): sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in paths
    }


def undisturbed(campaign: "Campaign", kind: Kind) -> Undisturbed:
    """The command, with nothing in its way."""
    folder = begin(campaign, "undisturbed", kind)
    tell = folder.with_name("changes")
    end = wait(launch(Start(argv_of(kind), folder, before=counting(tell))))
    if end.code:
        raise SystemExit(f"fp8q {' '.join(argv_of(kind))}: ended with {end.code}: {end.err}")
    return Undisturbed(digests(folder / kind.out), int(tell.read_text()), end.seconds)


def begin(campaign: "Campaign", name: str, kind: Kind) -> Path:
    """A world of its own, without a run to go on with where the kind is fresh."""
    folder = campaign.root / name
    campaign.clear(folder)
    copy_world(campaign.world, folder)
    if kind.fresh:
        shutil.rmtree(folder / "quantized")
    return folder


def kill_cases(campaign: "Campaign", seed: int, count: int) -> list[Killed]:
    """Kill `count` commands, each at a moment of its own, and finish them."""
    references: dict[Kind, Undisturbed] = {}
    killed = []
    for index in range(count):
        draw = random.Random(f"{seed}:kill:{index}")
        kind = kind_of(index)
        if kind not in references:
            references[kind] = undisturbed(campaign, kind)
        done = kill_one(campaign, draw, references[kind], kind, real=index % REAL_EVERY == REAL_EVERY - 1)
        for fault in done.faults:
            print(f"KILL {seed}:{index} {done.what}\n    {fault}", flush=True)
        killed.append(done)
    return killed


def kill_one(campaign: "Campaign", draw: random.Random, reference: Undisturbed, kind: Kind, real: bool) -> Killed:
    """One kill, and the same command again to its end."""
    folder = begin(campaign, "killed", kind)
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    at, moment = draw.randint(1, reference.changes), draw.uniform(0.05, 1) * (reference.seconds + 10 * real)
    if draw.random() < 0.6 and not real:
        what = f"before change {at} of {reference.changes}"
        first = wait(launch(Start(argv_of(kind), folder, before=ending(at, number))))
    else:
        what = f"after {moment:.2f} of {reference.seconds:.2f} s"
        first = after(Start(argv_of(kind), folder, real=real), moment, number)
    what = f"{number.name} {what}{kind}{', a real process' * real}"
    temporary = folder.with_name("killed.tmp")
    faults = of_interrupt(first, number) if number != signal.SIGKILL else []
    if number != signal.SIGKILL:
        faults += [f"TMPDIR/{name} is left" for name in snapshot(temporary)]
    shutil.rmtree(temporary)
    if kind.converts and digests(folder / kind.out) == reference.files:  # it had ended, and refuses to begin again
        campaign.clear(folder)
        return Killed(what, kind.streamed, kind.converts, tuple(faults))
    again = wait(launch(Start(argv_of(kind), folder)))
    if again.code:
        faults.append(f"the second run ended with {again.code}: {again.err[-300:]}")
    else:
        faults += differences(reference.files, digests(folder / kind.out))
    campaign.clear(folder)
    return Killed(what, kind.streamed, kind.converts, tuple(faults))


def after(start: Start, seconds: float, number: int) -> Ended:
    """Start a command, and send it a signal after so many seconds, where it still runs."""
    running, until = launch(start), time.monotonic() + seconds
    while time.monotonic() < until:
        if (end := ended(running, 300)) is not None:
            return end
        time.sleep(0.002)
    os.kill(running.pid, number)
    return wait(running)


def of_interrupt(end: Ended, number: int) -> list[str]:
    """What is wrong with the end of an interrupted process: 128 and the signal's number and one line, or too late."""
    faults = [f"{trace} in {end.err[-500:]!r}" for trace in TRACES if trace in end.err]
    said = [line for line in end.err.splitlines() if line.startswith("fp8q: ")]
    early = end.code == -number  # Python itself had hardly begun
    if end.code not in (0, 128 + number) and not early:
        faults.append(f"exit {end.code}: {end.err[-300:]!r}")
    if end.code == 128 + number and len(said) != 1:
        faults.append(f"{len(said)} lines: {end.err[-300:]!r}")
    return faults


def differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    """What differs between two runs."""
    names = sorted(wanted.keys() | found.keys())
    words = {
        name: "is left" if name not in wanted else "is missing" if name not in found else "differs" for name in names
    }
    return [f"{name} {words[name]}" for name in names if wanted.get(name) != found.get(name)]
