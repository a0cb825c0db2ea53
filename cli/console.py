"""Write to the terminal: progress and notes on standard error, results on standard output.

What is shown may come from a file: the name of a tensor, of an ONNX node, a library's message. `visible` and `one_line`
are where such text passes on its way to a terminal, so that none of it can move the cursor, colour, hide or turn round
what stands there. JSON does not: it has escapes of its own, and a program reads it.

Progress on a terminal is one bar at a time, with rate and time left; in a log `core.reporter.minutes` has it.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ..core.columns import duration
from ..core.errors import visible
from ..core.reporter import Standing, minutes, with_standing
from .signals import drawing

#: The seconds by which a bar's pace is judged. Rich forgets steps after half a minute, and one of a large model takes
#: longer: nothing would ever be said of the time left.
PACE_S = 3600.0
#: A unit that takes so many times as long as the average before it, and so many seconds, is named with its time.
PACE_TIMES = 3.0
WAITED_S = 10.0


class Remaining(ProgressColumn):
    """The time left; or, where the pace of the units before says nothing of the one that runs, that unit and its time,
    in the place of `00:02` for minutes.
    """

    def __init__(self, unit: str):
        """Name `unit`, a plural."""
        super().__init__()
        self._unit = unit
        self._left = TimeRemainingColumn(compact=True)

    def render(self, task: Task) -> Text:
        """Return the text of the column; `since` in the task's fields: its elapsed seconds at the last advance."""
        since = float(task.fields["since"])
        done = int(task.completed)
        waited = (task.elapsed or 0.0) - since
        usual = since / done if done else 0.0
        if task.finished or task.total is None or waited < max(WAITED_S, PACE_TIMES * usual):
            return self._left.render(task)
        return Text(f"at {done + 1:,} of {int(task.total):,} {self._unit} for {duration(waited)}")


@contextmanager
def bar(
    console: Console, description: str, total: int, unit: str, standing: Standing | None = None
) -> Iterator[Callable[[int], None]]:
    """Draw a bar towards `total` units on a terminal; the value of the `with` takes each number of units done."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        Remaining(unit),
    )
    with Progress(*columns, console=console, speed_estimate_period=PACE_S) as progress:
        drawing.set()
        task = progress.add_task(description, total=total, rate="", since=0.0)

        def advance(done: int) -> None:
            progress.advance(task, done)
            speed = progress.tasks[0].speed
            rate = f"{speed:,.0f} {unit}/s" if speed and unit in ("tokens", "windows") else ""
            elapsed = progress.tasks[0].elapsed or 0.0
            progress.update(task, description=with_standing(description, standing), rate=rate, since=elapsed)

        try:
            yield advance
        finally:
            drawing.clear()


#: Columns of a table that no terminal bounds.
PIPE_WIDTH = 200
#: The most characters of a line, and how many are kept of one that has more, at its beginning and its end.
LONGEST = 1500
HEAD = 1000
TAIL = 400


def one_line(text: str) -> str:
    """`text` as one visible line, its middle left out where it is long, unless FP8Q_DEBUG is set."""
    line = visible(" ".join(text.split()))
    if len(line) <= LONGEST or os.environ.get("FP8Q_DEBUG"):
        return line
    left = len(line) - HEAD - TAIL
    return f"{line[:HEAD]} … ({left:,} characters left out; FP8Q_DEBUG=1 shows them) … {line[-TAIL:]}"


def complain(message: str) -> None:
    """Say why the program ends, in one line."""
    sys.stderr.write(f"fp8q: {one_line(message)}\n")


def warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """Show a library's warning as one line (`warnings.showwarning`)."""
    sys.stderr.write(f"{one_line(f'{category.__name__}: {message}')}\n")


def tame_warnings() -> None:
    """Let `warn` show whatever libraries warn of."""
    warnings.showwarning = warn


class Terminal:
    """A reporter that draws on standard error, and prints tables on standard output."""

    def __init__(self, quiet: bool = False) -> None:
        """Find out what the terminal can do; `quiet`: say nothing on it."""
        self.out = Console(highlight=False, quiet=quiet, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self.err = Console(stderr=True, highlight=False, quiet=quiet)

    def note(self, line: str) -> None:
        """Print one line on standard error, unwrapped."""
        self.err.print(one_line(line), markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Print one line of the result, unwrapped."""
        self.out.print(visible(line), markup=False, soft_wrap=True)

    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Draw a bar towards `total` units, with the rate and the time left; in a log, a line each minute, and
        one at the end.
        """
        shown = visible(description)
        if self.err.is_terminal:
            return bar(self.err, shown, total, unit, standing)
        return minutes(self.note, shown, total, unit, standing)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()
    ) -> None:
        """Print a table; the columns named in `numeric` are aligned to the right."""
        table = Table(
            title=Text(visible(title)), title_justify="left", title_style="bold", header_style="bold", box=None,
            pad_edge=False,
        )  # fmt: skip
        for column in columns:
            table.add_column(column, justify="right" if column in numeric else "left", overflow="fold", no_wrap=False)
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        self.out.print(table)
        self.out.print()
