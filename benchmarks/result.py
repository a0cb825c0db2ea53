"""The record beside a result's figures: commit, machine, libraries, command, seconds, and the options of every stage.

`results/<benchmark>.json` is what the tables in docs are made from (`tables.py`). A figure depends on the code and on
all options behind it, so they stand beside it: `ran` records the options while the benchmark runs, and a result is
saved only of a tree without changes, so that its commit is what was measured. `stale.py` tells which results are no
longer of today's options (docs/decisions/0037).
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import ran

from fp8q.core.record import library_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: Files that follow from results or describe them, and are no part of what is measured.
FOLLOWING = ("benchmarks/results", "docs", "*.md")
STARTED = monotonic()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Make a benchmark's parser, with the one option that all have: `--save`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="NAME", type=save_name, help="write benchmarks/results/NAME.json too")
    return parser


def save_name(name: str) -> str:
    """Accept the name to save under, where the tree is what its commit says: the type of `--save`.

    Raises argparse's error before anything is measured, since a result of uncommitted changes cannot be made again.
    """
    if changed := changes():
        raise argparse.ArgumentTypeError(f"{name}: {changed[0]} differs from its commit; commit first, then measure")
    return name


def described(benchmark: str) -> dict[str, Any]:
    """Describe what is about to be measured, and record the options of what runs from now on."""
    ran.start()
    return {
        "benchmark": benchmark,
        "commit": commit(),
        "machine": machine(),
        "versions": library_versions(),
        "command": command(sys.argv),
    }


def publish(head: Mapping[str, Any], figures: Mapping[str, Any], save: str | None) -> int:
    """Write the result where it was asked for, print it as one line, and give the exit status: 1 for a limit missed."""
    record = {"took_seconds": round(monotonic() - STARTED, 1), "options": ran.options()}
    result = {**head, **record, **figures}
    if save:
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        (RESULTS / f"{save}.json").write_text(text, encoding="utf-8")
    print(json.dumps(result))
    return 0 if result.get("passed", True) else 1


def command(words: list[str]) -> str:
    """Write the command that a reader types, from the repository's root; of a path elsewhere only the name is left."""
    return shlex.join(["python", *(_typed(word) for word in words)])


def _typed(word: str) -> str:
    """Write paths within a word relative to the repository's root."""
    if os.path.exists(word) and Path(word).suffix == ".py":  # a list of names is no path
        word = str(Path(word).resolve())
    inside = word.replace(f"{ROOT}/", "").replace(f"{ROOT.parent}/shared/", "../shared/")
    return re.sub(r"(?<![^=,])/[^=,]*/", "", inside)


def machine() -> str:
    """Processor, cores, memory and GPUs."""
    processor = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    name = processor[1] if processor else "processor unknown"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores, {name}, {memory:.0f} GB, {gpus()}"


def gpus() -> str:
    """The names of the GPUs that torch sees."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or "no GPU"


def commit() -> str:
    """Name the commit that is measured, with a plus where tracked files differ from it."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if changes() else "")


def changes() -> list[str]:
    """List the tracked files that differ from the commit, without those that follow from results."""
    outside = [f":(exclude){pattern}" for pattern in FOLLOWING]
    listed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *outside)
    return [line.split(maxsplit=1)[1] for line in listed.splitlines()]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
