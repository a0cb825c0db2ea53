"""Long work says each minute how far it is, where no terminal draws a bar; from Python it does so to a logger."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from fp8q.core import reporter


def test_a_line_says_the_share_the_time_and_the_time_left() -> None:
    pace = reporter.WorkPace(done=30, last=10, seconds=60.0)
    assert reporter.progress_line("Evaluating bf16", pace, 120, "windows", 60.0) == (
        "Evaluating bf16: 30 of 120 windows (25%) in 1 min 0 s, about 3 min 0 s left"
    )
    assert reporter.progress_line("Evaluating bf16", reporter.WorkPace(), 120, "windows", 60.0) == (
        "Evaluating bf16: 0 of 120 windows (0%) in 1 min 0 s"
    )
    built = reporter.WorkPace(done=50, last=1, seconds=30.0)
    assert reporter.progress_line("Building", built, 100, "%", 30.0) == (
        "Building: 50 of 100 % in 30.0 s, about 30.0 s left"
    )


def test_the_time_left_falls_between_two_steps() -> None:
    """30 of 120 took 60 s, 10 a step of 20 s: 180 s are left, and no less than the 160 s of the steps behind this."""
    pace = reporter.WorkPace(done=30, last=10, seconds=60.0)
    assert [pace.left(120, seconds) for seconds in (60.0, 70.0, 80.0, 200.0)] == [180.0, 170.0, 160.0, 160.0]
    assert reporter.WorkPace(done=110, last=20, seconds=110.0).left(120, 115.0) == 5.0
    assert reporter.WorkPace(done=110, last=20, seconds=110.0).left(120, 200.0) == 0.0


def wait_for(met: Callable[[], bool]) -> None:
    """Wait until the condition is `met`, or fail after half a minute."""
    end = time.monotonic() + 30
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.usefixtures("quick_work_shown")
def test_lines_come_while_one_step_lasts_and_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "EVERY_S", 0.01)
    said = list[str]()
    with reporter.minutes(said.append, "Measuring", 4, "windows") as advance:
        advance(1)  # on a busy machine behind a first line
        wait_for(lambda: any(line.startswith("Measuring: 1 of 4 windows (25%) in ") for line in said))
    assert said[-1].startswith("Measuring: 4 windows in ")
    lines = len(said)
    time.sleep(0.05)
    assert len(said) == lines


def test_a_line_says_how_far_work_has_come_in_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "EVERY_S", 0.01)
    said, words = list[str](), [""]
    with reporter.minutes(said.append, "Learning", 4, "steps", lambda: words[-1]):
        wait_for(lambda: bool(said))
        words.append("held-out KL 3.2e-04 nats")
        wait_for(lambda: said[-1].startswith("Learning, "))
    assert said[0].startswith("Learning: 0 of 4 steps")
    assert said[-1].startswith("Learning, held-out KL 3.2e-04 nats: 0 of 4 steps")


@pytest.mark.usefixtures("quick_work_shown")
def test_an_error_ends_the_lines_and_no_work_is_said_to_be_done() -> None:
    said = list[str]()
    with pytest.raises(ValueError, match="^broken$"), reporter.minutes(said.append, "Measuring", 4, "windows"):
        raise ValueError("broken")
    assert said == []


@pytest.mark.usefixtures("quick_work_shown")
def test_python_s_default_is_the_logger_fp8q_at_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fp8q"):
        reporter.LOGGED.note("100 % of a default was lowered")
        with reporter.LOGGED.track("Measuring", 2, "windows") as advance:
            advance(2)
    assert caplog.record_tuples[0] == ("fp8q", logging.INFO, "100 % of a default was lowered")
    assert caplog.messages[1].startswith("Measuring: 2 windows in 0.")
