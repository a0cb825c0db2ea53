"""The two tiers of the suite: `make test` leaves out what is marked `slow`, `make test-all` nothing.

A test is slow by a mark of its own, by its file's (`pytestmark`), or because it needs one of `SLOW_FIXTURES`; the mark
`quick` on a test or a file keeps it in `make test` all the same: there the demo goes the whole way once, and some tests
look at its run. Plain `pytest` selects as `make test` does; paths or `-m` on the command line select by themselves.

With `--minutes N` no test begins once N minutes are over: those left are skipped, and the last lines say how many. So
`.ci/run` ends in time on a slow machine too. Groups of tests then come in an order that follows from the commit, so
that no test is left out of every run; under `make test-isas` those that compute with torch come first.
"""

import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir

import pytest

#: Each calibrates, exports or builds, which takes ten seconds to minutes.
SLOW_FIXTURES = frozenset({"attention_run", "demo_run", "finished", "own_triton", "rescaled", "triton"})
#: What `make test` selects; `make test-slow` selects the others.
QUICK = "not slow or quick"
LONGEST_SHOWN = 10
#: Bytes of the temporary files of a whole tier: 4 GB at most at a time, of tests that run and of runs that many share.
LEAST_FREE = 5e9
#: The property of a report that has the tier of its test.
TIER = "tier"
#: When no further test begins, by `time.monotonic`.
DEADLINE = pytest.StashKey[float]()
TIME_IS_OVER = "no time is left for it"


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin too late."""
    if time.monotonic() > item.config.stash[DEADLINE]:
        pytest.skip(TIME_IS_OVER)


def by_commit(group: str) -> bytes:
    """A sorting key of a group of tests that is another with every commit."""
    return sha256(f"{commit()} {group}".encode()).digest()


@cache
def commit() -> str:
    """Name the commit; empty where there is no git, or no history."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--minutes`."""
    parser.addoption("--minutes", type=float, metavar="N", help="begin no test once N minutes are over")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what is slow where neither paths nor marks are asked for, note when the time is over, and refuse a
    whole tier where its temporary files find no place: on a full disk hundreds of tests fail, each for another reason.
    """
    minutes = config.getoption("minutes")
    config.stash[DEADLINE] = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    if not config.option.markexpr:
        config.option.markexpr = QUICK  # pytest-xdist hands it on to its workers
    if not hasattr(config, "workerinput") and (free := shutil.disk_usage(gettempdir()).free) < LEAST_FREE:
        raise pytest.UsageError(
            f"{gettempdir()}: has {free / 1e9:.1f} GB free, and all tests of a tier take up to {LEAST_FREE / 1e9:.0f}; "
            "free some, or name another folder in TMPDIR"
        )


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark `slow` whatever needs a fixture that is, and let each test's reports say its tier."""
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        slow = item.get_closest_marker("slow") and not item.get_closest_marker("quick")
        item.user_properties.append((TIER, "slow" if slow else "quick"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what each tier took, and its longest tests, with the fixtures that they were the first to need."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = dict(report.user_properties).get(TIER, "lost with its worker")
                seconds[str(tier)][report.nodeid] += report.duration
    late = [each for each in terminalreporter.stats.get("skipped", ()) if TIME_IS_OVER in str(each.longrepr)]
    if late:
        terminalreporter.write_sep("-", f"{len(late)} tests were left out: their time was over")
    for tier, tests in sorted(seconds.items()):
        terminalreporter.write_sep("-", f"{tier}: {len(tests)} tests, {sum(tests.values()):.0f} s; the longest")
        for test, duration in sorted(tests.items(), key=lambda entry: -entry[1])[:LONGEST_SHOWN]:
            terminalreporter.write_line(f"{duration:6.1f} s  {test}")
