"""Progress on a terminal: one bar a time, with rate and time left; in a log, one line when it is done."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .signals import drawing

#: What took less time is not worth a line in a log, in seconds.
WORTH_A_LINE_S = 1.0


@contextmanager
def bar(console: Console, description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Draw a bar towards `total` units on a terminal; the value of the `with` takes each number of units done."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as progress:
        drawing.set()
        task = progress.add_task(description, total=total, rate="")

        def advance(done: int) -> None:
            progress.advance(task, done)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:,.0f} {unit}/s" if speed and unit in ("tokens", "windows") else "")

        try:
            yield advance
        finally:
            drawing.clear()


@contextmanager
def timed(say: Callable[[str], None], description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Say what the block did, and in which time, where that is worth a line."""
    start = time.monotonic()
    yield lambda done: None
    seconds = time.monotonic() - start
    if seconds > WORTH_A_LINE_S:
        say(f"{description}: {total:,} {unit} in {seconds:.1f} s")
