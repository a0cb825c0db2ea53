"""Tell why a committed result no longer stands for the code beside it.

A result must name a commit of this history whose tree had no changes, and the options behind it must be those that the
same benchmark would run with today: a default that changed, or a field that was removed since, changes them. A field
that is new since had no value then. What it stands for in older records is already declared, for resuming runs of
older versions: the value in `Stage.older`, or else today's default. So a new option that changes nothing when left
alone leaves results as they are, and one that changes figures (`--bos auto`) makes them stale.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import ran
from result import FOLLOWING, ROOT

from fp8q import options
from fp8q.stages.pipeline import stages
from fp8q.stages.pipeline.stage import Stage

#: Scripts that measure nothing.
WRITERS = ("run", "stale", "missed", "tables", "markdown", "read_options")
#: A field that is new since -> how the names of models begin for which its older value gives other results: of the
#: models that are measured, AutoTokenizer gives those of Qwen2 alone other tokens than their tokenizer.json has.
OTHER_FOR = {"CalibrateOptions.tokenizer": '"qwen2'}
#: Defaults that other options decide -> what they were in runs with a graph, as those of benchmarks are.
MEANT = {"tokenizer": "file"}
#: Files that no benchmark reads, beside those that follow from results.
UNREAD = (
    *FOLLOWING,
    "tests",
    "notebooks",
    ".ci",
    "Makefile",
    "benchmarks/pages",
    *(f"benchmarks/{name}.py" for name in WRITERS),
)


def stale_options(result: Mapping[str, Any]) -> list[str]:
    """List the options of a result that today's code would not run with."""
    if not result.get("options"):
        return [] if result.get("options") == {} else ["no options are recorded"]
    reasons = [reason for name, record in result["options"].items() for reason in _differing(name, record["defaults"])]
    text = json.dumps(result)
    return [reason for reason in reasons if OTHER_FOR.get(reason.split(" ")[0], "") in text]


def _differing(name: str, measured: Mapping[str, Any]) -> Iterator[str]:
    """Compare the defaults of the option class `name` then with today's."""
    kind = getattr(options, name, None)
    if kind is None:
        yield f"{name} was removed"
        return
    measured, today, older = _meant(measured), _meant(ran.defaults(kind)), older_values(name)
    for field in sorted(measured.keys() | today.keys()):
        if field not in today:
            yield f"{name}.{field} was removed"
        elif field not in measured:
            before = older.get(field, today[field])
            if before != today[field]:
                yield f"{name}.{field} is new; without it {before} was run, and today's default is {today[field]}"
        elif measured[field] != today[field]:
            yield f"{name}.{field} was {measured[field]} and is {today[field]}"


def _meant(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `_flat` with what defaults mean that other options decide."""
    return {field: MEANT.get(field) if value is None else value for field, value in _flat(values).items()}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with those of nested option classes, whose names no outer field has."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


@cache
def older_values(name: str) -> dict[str, Any]:
    """Return the values, declared by stages, that fields of the option class `name` have in records without them."""
    kind = getattr(options, name)
    found: dict[str, Any] = {}
    for stage in vars(stages).values():
        if isinstance(stage, Stage):
            found |= {field: value for field, value in stage.older.items() if field in kind.keyed()}
    return found


def stale_commit(result: Mapping[str, Any]) -> list[str]:
    """Tell why the commit of a result is none that a reader can measure again; raises HistoryError where git cannot
    know.
    """
    commit = str(result["commit"])
    if commit.endswith("+"):
        return [f"was measured with uncommitted changes on {commit[:-1]}"]
    if git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0:
        scripts = (f"{result['benchmark']}.py", f"{result['benchmark']}/run.py")
        if any(git("cat-file", "-e", f"{commit}:benchmarks/{script}").returncode == 0 for script in scripts):
            return []
        return [f"{commit} has no benchmarks/{scripts[0]}, so it is not what was measured"]
    if (shallow := git("rev-parse", "--is-shallow-repository")).returncode != 0 or shallow.stdout.strip() == "true":
        raise HistoryError("there is no git history here, or not all of it")
    return [f"{commit} is no commit of this history"]


class HistoryError(Exception):
    """Git is not there, or its clone is shallow, so that it cannot say whether a commit is in the history."""


def is_fresh(result: Mapping[str, Any]) -> bool:
    """Tell whether a result is of the code and the options of today, so that measuring again would say the same."""
    if stale_options(result) or stale_commit(result):
        return False
    outside = [f":(exclude){pattern}" for pattern in UNREAD]
    return git("diff", "--quiet", result["commit"], "HEAD", "--", ".", *outside).returncode == 0


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """Run git in the repository."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise HistoryError("git is not installed") from None
