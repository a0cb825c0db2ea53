"""The help pages: examples that are understood as they stand, and the options that most need."""

import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from fp8q.cli import commands, launch
from fp8q.cli.help_pages import ALL, PAGES

Fp8q = Callable[..., Any]

COMMANDS = [name for name in commands.app if not name.startswith("-")]


def options_of(text: str) -> list[str]:
    """The first name of each option in a help's panels."""
    return re.findall(r"^│ (?:\* )? *(--[a-z0-9-]+)", text, re.MULTILINE)


def test_every_command_has_a_page() -> None:
    assert sorted(PAGES) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_a_page_are_understood(command: str) -> None:
    for call, purpose in PAGES[command].examples:
        words = [word for word in shlex.split(call) if not word.startswith("FP8Q_API_KEY=")]
        assert words[:2] == ["fp8q", command]
        _, _, understood = launch.understand(words[1:])
        assert list(understood) == [command]
        assert purpose


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_the_selection_and_the_whole_help_every_option(
    fp8q: Fp8q, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands.app, "_console", Console(width=200))
    page, most, every = PAGES[command], fp8q(command, "--help").out, fp8q(command, ALL).out
    assert f"Examples:\n  {page.examples[0][0]}  " in most
    if not page.selection:
        assert options_of(most) == options_of(every)
        assert len(options_of(every)) <= 13
        return
    assert sorted(options_of(most)) == sorted(page.selection)
    assert set(page.selection) < set(options_of(every))
    assert 7 <= len(page.selection) <= 13
    assert f"These are the options that are used most. `fp8q {command} {ALL}` shows all." in most
    assert ALL not in every


def test_a_narrow_terminal_has_the_purpose_below_each_example(fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.app, "_console", Console(width=80))
    assert "  fp8q lint RUN\n" not in fp8q("lint", "--help").out
    assert "  fp8q tune RUN\n      # the cost of every loss\n" in fp8q("tune", "--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_paragraph_breaks_where_the_terminal_ends(fp8q: Fp8q, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where the docstring's lines end: the next word would not have fitted."""
    monkeypatch.setattr(commands.app, "_console", Console(width=80))
    description = fp8q(command, "--help").out.partition("\n\n")[2].partition("Examples:")[0]
    lines = description.splitlines()
    assert lines
    for line, following in pairwise(lines):
        if line.strip() and following.strip():
            assert len(line.rstrip()) + 1 + len(following.split()[0]) > 80, line
