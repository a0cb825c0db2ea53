"""Report notes and progress of the stages to a `Reporter`; the command line displays them.

The library itself prints nothing. Notes are decisions that the user should know (a default lowered, a module kept in
BF16); the run's record keeps them with the stage.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Reporter(Protocol):
    """The receiver of a stage's notes and progress."""

    def note(self, line: str) -> None:
        """Report one line that the user should read."""

    def track(self, description: str, total: int, unit: str = "steps") -> AbstractContextManager[Callable[[int], None]]:
        """Report progress towards `total` units; call the yielded function with each number of units done."""


class Silent:
    """The reporter of the Python API: it discards everything."""

    def note(self, line: str) -> None:
        """Discard the line."""

    @contextmanager
    def track(self, description: str, total: int, unit: str = "steps") -> Iterator[Callable[[int], None]]:
        """Discard the progress."""
        yield lambda done: None


SILENT = Silent()
