"""How the command line looks: progress and notes on standard error, results on standard output."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

#: Columns of a table that no terminal bounds.
PIPE_WIDTH = 200
#: What took less time is not worth a line in a log, in seconds.
WORTH_A_LINE_S = 1.0


class Terminal:
    """A reporter that draws on standard error, and prints tables on standard output."""

    def __init__(self, quiet: bool = False) -> None:
        """Find out what the terminal can do; `quiet`: say nothing on it."""
        self.out = Console(highlight=False, quiet=quiet, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self.err = Console(stderr=True, highlight=False, quiet=quiet)

    def note(self, line: str) -> None:
        """Print one line, unwrapped."""
        self.err.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def track(self, description: str, total: int, unit: str = "steps") -> Iterator[Callable[[int], None]]:
        """Draw a bar towards `total` units, with the rate and the time left; in a log, one line when it is done."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
        )
        if not self.err.is_terminal:
            start = time.monotonic()
            yield lambda done: None
            seconds = time.monotonic() - start
            if seconds > WORTH_A_LINE_S:
                self.note(f"{description}: {total:,} {unit} in {seconds:.1f} s")
            return
        with Progress(*columns, console=self.err) as progress:
            task = progress.add_task(description, total=total, rate="")

            def advance(done: int) -> None:
                progress.advance(task, done)
                speed = progress.tasks[0].speed
                progress.update(task, rate=f"{speed:,.0f} {unit}/s" if speed and unit in ("tokens", "windows") else "")

            yield advance

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()
    ) -> None:
        """Print a table; the columns named in `numeric` are aligned to the right."""
        table = Table(
            title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
        )
        for column in columns:
            table.add_column(column, justify="right" if column in numeric else "left", overflow="fold", no_wrap=False)
        for row in rows:
            table.add_row(*map(Text, row))
        self.out.print(table)
        self.out.print()
