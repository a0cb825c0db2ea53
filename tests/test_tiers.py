"""The tiers of the suite, tried on two tests of their own."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers
from tests.tiers import by_commit

ROOT = Path(__file__).resolve().parent.parent
HOOKS = "from tests.tiers import pytest_addoption, pytest_configure, pytest_runtest_setup, pytest_terminal_summary\n"
TESTS = """
from types import SimpleNamespace
from tests import tiers
def test_first(): tiers.time = SimpleNamespace(monotonic=lambda: {now})
def test_second(): pass
"""


def outcome(folder: Path, now: str, *options: str) -> str:
    """What pytest says of two tests, with such a clock after the first."""
    (folder / "conftest.py").write_text(HOOKS, encoding="utf-8")
    (folder / "test_both.py").write_text(TESTS.format(now=now), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_test_that_would_begin_too_late_is_left_out_and_counted(tmp_path: Path) -> None:
    text = outcome(tmp_path, "float('inf')", "--minutes", "5")
    assert "1 passed, 1 skipped" in text
    assert "- 1 tests were left out: their time was over -" in text


@pytest.mark.parametrize("options", [(), ("--minutes", "5")])
def test_with_time_for_all_nothing_is_left_out(tmp_path: Path, options: tuple[str, ...]) -> None:
    text = outcome(tmp_path, "0.0", *options)
    assert "2 passed" in text
    assert "left out" not in text


def test_a_whole_tier_is_refused_on_a_full_disk_in_one_line_and_chosen_tests_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_200_000_000))
    config: Any = SimpleNamespace(
        getoption=lambda name: None, stash={}, option=SimpleNamespace(markexpr=""),
        args_source=pytest.Config.ArgsSource.TESTPATHS,
    )  # fmt: skip
    with pytest.raises(pytest.UsageError, match=r"has 1\.2 GB free, and all tests of a tier take up to 5; free some"):
        tiers.pytest_configure(config)
    config.args_source = pytest.Config.ArgsSource.ARGS
    tiers.pytest_configure(config)


def test_groups_come_in_the_order_of_their_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So all workers of a run have one order, and the next commit has another."""
    groups = [f"pipeline/test_{letter}.py" for letter in "abcdefgh"]
    orders = []
    for commit in ("a1", "b2", "a1"):
        monkeypatch.setattr(tiers, "commit", lambda commit=commit: commit)
        orders.append(sorted(groups, key=by_commit))
    assert orders[0] == orders[2] != orders[1]
    assert len({by_commit(group) for group in groups}) == len(groups)
