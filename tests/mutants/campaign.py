"""Apply each mutation to a copy of the tree, run its tests, and tell which mutations no test notices.

    python -m tests.mutants.campaign                      what `make mutants` runs
    python -m tests.mutants.campaign overlap-threshold    these alone, again, whatever is known of them
    python -m tests.mutants.campaign --quick              by those of its tests alone that `make test` runs

The copy is in a temporary folder; the working tree is never changed. The test that fails runs once more without the
mutation, since one that fails anyway notices nothing. Verdicts are in `build/mutants.json`, each with a hash of the
mutation, its file and its tests, so that a call goes on where another stopped, and only what changed is run again. Exit
1 where a mutation survives.

Each run is a process forked from one that has imported pytest and torch, and nothing of fp8q: importing them takes more
time than most of these tests.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from ..tiers import QUICK
from .mutation import ROOT, Mutation, mutations

#: Whether only the quick tests count -> the file of verdicts.
VERDICTS = {False: ROOT / "build" / "mutants.json", True: ROOT / "build" / "mutants-quick.json"}
#: Not a part of what is tested; the environment is linked.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "runs", "__pycache__", ".*_cache", ".hypothesis")
#: A mutation that makes a test hang is noticed.
LIFE_S = 600
#: pytest's exit codes: all passed, some failed, none was selected.
PASSED, FAILED, NONE = 0, 1, 5
FORKS = get_context("forkserver")
IMPORTED = ["pytest", "xdist", "hypothesis", "schemathesis.pytest.plugin", "numpy", "torch", "transformers"]


def copied_tree(folder: Path) -> Path:
    """Copy the repository into `folder` as `fp8q`, the name that tests import it by, beside a link to what lies beside
    the repository.
    """
    tree = Path(shutil.copytree(ROOT, folder / "fp8q", ignore=LEFT_OUT, symlinks=True))
    for name, target in ((tree / ".venv", ROOT / ".venv"), (folder / "shared", ROOT.parent / "shared")):
        if target.exists():
            name.symlink_to(target)
    return tree


def pytest_in(tree: Path, arguments: Sequence[str], output: Path) -> None:
    """Run pytest in a copied tree, in this process, and end it with pytest's exit code."""
    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree.parent)
    # compiled files are told by size and second, which a mutation may leave as they were
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    sys.path[:] = [str(tree.parent), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "fp8q")]:
        del sys.modules[name]
    import pytest

    # plugins that are imported already are not looked through for assertions
    warning = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    code = pytest.main(["-n", "0", "-q", "--tb=line", "-p", "no:cacheprovider", *warning, *arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_tests(tree: Path, tests: Sequence[str], *more: str) -> tuple[int, str]:
    """Run `tests` of a copied tree; return pytest's exit code and its output."""
    output = tree.parent / "output.txt"
    process = FORKS.Process(target=pytest_in, args=(tree, [*more, *tests], output))
    process.start()
    process.join(LIFE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return FAILED, f"FAILED {tests[0]} hangs"
    return process.exitcode, output.read_text(encoding="utf-8", errors="replace")


def verdict_of(mutation: Mutation, tree: Path, quick: bool = False) -> str:
    """Apply `mutation` to `tree`, run its tests (with `quick` those of `make test`) and take it back: `survived`, or
    `killed by` the test.

    Raises RuntimeError where the tests do not even run, or the one that failed fails without the mutation.
    """
    path = tree / mutation.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutation.applied(source), encoding="utf-8")
    try:
        code, output = run_tests(tree, mutation.tests, "-x", *(("-m", QUICK) if quick else ()))
    finally:
        path.write_text(source, encoding="utf-8")
    if code == PASSED or (quick and code == NONE):
        return "survived"
    if code != FAILED:
        raise RuntimeError(f"{mutation.name}: pytest ended with {code}\n{output}")
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    test = failed[1] if failed else mutation.tests[0]
    code, output = run_tests(tree, [test])
    if code != PASSED:
        raise RuntimeError(f"{mutation.name}: {test} fails without it too\n{output}")
    return f"killed by {test}"


def known_verdicts(quick: bool) -> dict[str, dict[str, str]]:
    """Read the verdicts of earlier calls: name -> its `key` and `verdict`."""
    path = VERDICTS[quick]
    known: dict[str, dict[str, str]] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return known


def run_all(wanted: Sequence[Mutation], jobs: int, quick: bool) -> dict[str, str]:
    """Return the verdict on each of `wanted`, run in as many trees at once as `jobs`; each is saved at once."""
    known, trees, one_at_a_time = known_verdicts(quick), SimpleQueue[Path](), Lock()

    def run(mutation: Mutation) -> tuple[str, str]:
        tree, begun, key = trees.get(), time.monotonic(), mutation.key(ROOT)
        try:
            verdict = verdict_of(mutation, tree, quick)
        finally:
            trees.put(tree)
        with one_at_a_time:
            known[mutation.name] = {"key": key, "verdict": verdict}
            VERDICTS[quick].parent.mkdir(exist_ok=True)
            VERDICTS[quick].write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
        print(f"{mutation.name}: {verdict} ({time.monotonic() - begun:.0f} s)", flush=True)
        return mutation.name, verdict

    FORKS.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        for job in range(jobs):
            trees.put(copied_tree(Path(folder) / str(job)))
        with ThreadPoolExecutor(jobs) as pool:
            return dict(pool.map(run, wanted))


def main(names: Sequence[str], jobs: int, quick: bool = False) -> int:
    """Run the mutations of these `names`, or all that have no verdict yet; return the exit code."""
    every, known = mutations(), known_verdicts(quick)
    if unknown := [name for name in names if name not in every]:
        print(f"there is no mutation {unknown[0]}; there are {', '.join(every)}", file=sys.stderr)
        return 2
    verdicts = {
        name: known[name]["verdict"]
        for name, mutation in every.items()
        if not names and name in known and known[name]["key"] == mutation.key(ROOT)
    }
    if wanted := [mutation for name, mutation in every.items() if name not in verdicts and name in (names or every)]:
        verdicts |= run_all(wanted, jobs, quick)
    survivors = [name for name, verdict in verdicts.items() if verdict == "survived"]
    print(f"{len(verdicts) - len(survivors)} killed, {len(survivors)} survived: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tell which mutations no test notices.")
    parser.add_argument("names", nargs="*", help="mutations; all that have no verdict yet by default")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at once")
    parser.add_argument("--quick", action="store_true", help="only by tests of `make test`")
    asked = parser.parse_args()
    sys.exit(main(asked.names, asked.jobs, asked.quick))
