"""What the terminal is spared: text of files that would move, colour, hide or turn round what stands there, and lines
without end.
"""

import json
import unicodedata
import warnings
from io import StringIO
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies
from rich.console import Console

from fp8q.cli import console, views
from fp8q.cli.console import Terminal, one_line
from fp8q.core.errors import visible
from fp8q.core.findings import Finding
from fp8q.stages.lint import Linted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2K\rb", r"a\x1b[2K\rb"),  # ANSI: erase the line
        ("bell\x07 del\x7f", r"bell\x07 del\x7f"),
        ("c1 \x9b2J", r"c1 \x9b2J"),  # the one-byte form of ESC [
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),  # right to left
        ("a\u200bb\ufeff\u2060", r"a\u200bb\ufeff\u2060"),  # of no width
        ("\U000e0041", r"\U000e0041"),  # a tag, invisible
        ("caf\udce9", r"caf\udce9"),
        ("a\tb\nc", r"a\tb\nc"),
        ("KL × 10⁶ …, größer, 模型", "KL × 10⁶ …, größer, 模型"),
    ],
)
def test_what_is_no_printable_character_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


@hypothesis.given(strategies.text())
def test_no_control_passes_and_one_line_stays_one(text: str) -> None:
    line = one_line(text)
    assert not [c for c in line if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert one_line(line) == line


def test_a_long_line_keeps_its_beginning_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8Q_DEBUG", raising=False)
    text = "a" * 1000 + "b" * 5000 + "c" * 400
    assert one_line(text) == (f"{'a' * 1000} … (5,000 characters left out; FP8Q_DEBUG=1 shows them) … {'c' * 400}")
    assert one_line("d" * 1500) == "d" * 1500
    monkeypatch.setenv("FP8Q_DEBUG", "1")
    assert one_line(text) == text


EVIL = "model.\x1b[2Klayers\u202e.0"


def test_notes_tables_and_results_show_it_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.note(f"{EVIL} [red]")
    terminal.say(EVIL)
    terminal.table(f"Modules of {EVIL}", ("module",), [(EVIL,)])
    out, err = capsys.readouterr()
    assert err == "model.\\x1b[2Klayers\\u202e.0 [red]\n"
    assert out.count("model.\\x1b[2Klayers\\u202e.0") == 3
    assert not set("\x1b\u202e") & set(out + err)


@pytest.mark.usefixtures("quick_work_shown")
def test_progress_shows_it_escaped_on_a_terminal_and_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Terminal().track(f"{EVIL} [red]", 2, "graphs") as advance:
        advance(2)
    assert capsys.readouterr().err.startswith("model.\\x1b[2Klayers\\u202e.0 [red]: 2 graphs in ")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with Terminal().track(f"{EVIL} [red]", 2, "graphs") as advance:
        advance(2)
    drawn = capsys.readouterr().err
    assert "model.\\x1b[2Klayers\\u202e.0 [red]" in drawn
    assert "\u202e" not in drawn


def test_a_bar_of_slow_steps_says_how_long_the_others_take() -> None:
    """Three of ten steps of 100 s each, by a clock of the test's."""
    now, drawn = [0.0], StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=120, get_time=lambda: now[0])
    with console.bar(terminal, "Measuring", 10, "steps") as advance:
        for _ in range(3):
            now[0] += 100
            advance(1)
    assert "11:40" in drawn.getvalue()


def test_a_finding_of_the_lint_shows_it_escaped_and_json_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = Linted(Path("g.onnx"), "opset 23", [Finding("F101", "scale", "error", EVIL, None, "is no scale")])
    views.linted(found, False)
    assert "model.\\x1b[2Klayers\\u202e.0" in capsys.readouterr().out
    views.linted(found, True)
    assert json.loads(capsys.readouterr().out)["findings"][0]["node"] == EVIL


def test_a_warning_of_a_library_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        console.tame_warnings()
        warnings.warn(f"the name\n {EVIL}\nis deprecated", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "UserWarning: the name model.\\x1b[2Klayers\\u202e.0 is deprecated\n"
