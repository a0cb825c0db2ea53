"""Progress on a terminal: one bar a time, with rate and time left. In a log: `core.reporter.minutes`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..core.reporter import Standing, with_standing
from .signals import drawing


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
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as progress:
        drawing.set()
        task = progress.add_task(description, total=total, rate="")

        def advance(done: int) -> None:
            progress.advance(task, done)
            speed = progress.tasks[0].speed
            rate = f"{speed:,.0f} {unit}/s" if speed and unit in ("tokens", "windows") else ""
            progress.update(task, description=with_standing(description, standing), rate=rate)

        try:
            yield advance
        finally:
            drawing.clear()
