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
    done = 0
    ended = Event()

    def advance(units: int) -> None:
        nonlocal done
        done += units

    def tell() -> None:
        while not ended.wait(EVERY_S):
            say(progress_line(with_standing(description, standing), done, total, unit, time.monotonic() - start))

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


def progress_line(description: str, done: int, total: int, unit: str, seconds: float) -> str:
    """State how much was done in `seconds`, and, by the same pace, how long the rest takes."""
    share = f" ({done / total:.0%})" if total and unit != "%" else ""
    left = f", about {duration(seconds * (total - done) / done)} left" if done else ""
    return f"{description}: {done:,} of {total:,} {unit}{share} in {duration(seconds)}{left}"


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
