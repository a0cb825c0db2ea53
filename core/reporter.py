"""Report notes and progress of the stages to a `Reporter`; the command line displays them.

The library itself prints nothing. Notes are decisions that the user should know (a default lowered, a module kept in
BF16); the run's record keeps them with the stage. The functions of `api` report to the logger `fp8q` by default, at
INFO, which shows nothing until a program asks for it: `logging.basicConfig(level=logging.INFO)`.

Where no terminal draws a bar, long work says each minute how much of it is done and how long the rest takes. A thread
does, since one step may take longer than a minute: a window of a large model on a CPU, or its loading.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Protocol

from .columns import duration

#: Tells how far work has come in words of its own, such as a loss; empty while there is nothing to tell.
Standing = Callable[[], str]
#: Seconds between two lines on the same work.
EVERY_S = 60.0
#: Work that took less time is not worth a line, in seconds.
WORTH_A_LINE_S = 1.0


class Reporter(Protocol):
    """The receiver of a stage's notes and progress."""

    def note(self, line: str) -> None:
        """Report one line that the user should read."""

    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Report progress towards `total` units; call the yielded function with each number of units done. Show
        behind the description what `standing` tells by then.
        """


@contextmanager
def minutes(
    say: Callable[[str], None], description: str, total: int, unit: str, standing: Standing | None = None
) -> Iterator[Callable[[int], None]]:
    """Say each minute how much of the block's work is done, and when it has ended in which time, where that is worth a
    line.
    """
    start = time.monotonic()
    pace = WorkPace()
    ended = Event()

    def advance(units: int) -> None:
        nonlocal pace
        pace = WorkPace(pace.done + units, units, time.monotonic() - start)

    def tell() -> None:
        while not ended.wait(EVERY_S):
            say(progress_line(with_standing(description, standing), pace, total, unit, time.monotonic() - start))

    teller = Thread(target=tell, name="fp8q progress", daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        ended.set()
        teller.join()
    seconds = time.monotonic() - start
    if seconds > WORTH_A_LINE_S:
        say(f"{description}: {total:,} {unit} in {duration(seconds)}")


def with_standing(description: str, standing: Standing | None) -> str:
    """The description of work, and how far it has come in words of its own."""
    if standing and (words := standing()):
        return f"{description}, {words}"
    return description


@dataclass(frozen=True)
class WorkPace:
    """The units that are `done`, `last` of them by the last step, which ended after `seconds`."""

    done: int = 0
    last: int = 0
    seconds: float = 0.0

    def left(self, total: int, seconds: float) -> float:
        """The seconds that the rest of `total` takes, `seconds` after the beginning. Between two steps it falls, down
        to the time of the steps behind the one that runs.
        """
        of_unit = self.seconds / self.done
        behind = max(0, total - self.done - self.last)
        return max(of_unit * (total - self.done) - (seconds - self.seconds), of_unit * behind)


def progress_line(description: str, pace: WorkPace, total: int, unit: str, seconds: float) -> str:
    """State how much was done in `seconds`, and, by the same pace, how long the rest takes."""
    share = f" ({pace.done / total:.0%})" if total and unit != "%" else ""
    left = f", about {duration(pace.left(total, seconds))} left" if pace.done else ""
    return f"{description}: {pace.done:,} of {total:,} {unit}{share} in {duration(seconds)}{left}"


class Logged:
    """The default reporter of the Python API: notes and progress go to the logger `fp8q`, at INFO."""

    def __init__(self) -> None:
        """Take the logger `fp8q`."""
        self.logger = logging.getLogger("fp8q")

    def note(self, line: str) -> None:
        """Log the line."""
        self.logger.info("%s", line)

    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Log each minute how much is done."""
        return minutes(self.note, description, total, unit, standing)


class Silent:
    """A reporter that discards everything."""

    def note(self, line: str) -> None:
        """Discard the line."""

    @contextmanager
    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Discard the progress."""
        yield lambda done: None


SILENT = Silent()
LOGGED = Logged()
