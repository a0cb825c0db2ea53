"""A bar says which unit it waits for, where the pace of those before says nothing of it."""

from threading import RLock

import pytest
from rich.progress import Task, TaskID

from fp8q.cli.console import Remaining


@pytest.mark.parametrize(
    ("done", "since", "now", "said"),
    [
        (5, 10.0, 12.0, None),  # 2 s into a unit, of which one took 2
        (5, 10.0, 140.0, "at 6 of 6 windows for 2 min 10 s"),
        (0, 0.0, 9.0, None),
        (0, 0.0, 75.0, "at 1 of 6 windows for 1 min 15 s"),
        (2, 100.0, 200.0, None),  # units of 50 s: twice that is no surprise
        (6, 10.0, 500.0, None),
    ],
)
def test_a_unit_that_takes_far_longer_is_named_with_its_time(
    done: int, since: float, now: float, said: str | None
) -> None:
    task = Task(TaskID(0), "Exporting", 6, done, lambda: now, fields={"since": since}, _lock=RLock())
    task.start_time = 0.0
    task.finished_time = now if done == 6 else None
    shown = Remaining("windows").render(task).plain
    assert shown == said if said else not shown.startswith("at ")
