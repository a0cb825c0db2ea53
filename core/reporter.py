"""Report notes and progress of the stages: a `Reporter` takes notes and progress; the command line draws them.

The library itself prints nothing. Notes are decisions the user should know of (a default lowered, a module
kept in BF16); the run directory remembers them with the stage that made them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Reporter(Protocol):
    """The receiver of a stage's notes and progress."""

    def note(self, line: str) -> None:
        """Take one line that the user should read."""

    def track(self, description: str, total: int, unit: str = "steps") -> AbstractContextManager[Callable[[int], None]]:
        """Show progress towards `total` units; the value of the `with` is called with each number of units done."""


class Silent:
    """The reporter of the Python API: says nothing."""

    def note(self, line: str) -> None:
        """Drop the line."""

    @contextmanager
    def track(self, description: str, total: int, unit: str = "steps") -> Iterator[Callable[[int], None]]:
        """Count nothing."""
        yield lambda done: None


SILENT = Silent()
