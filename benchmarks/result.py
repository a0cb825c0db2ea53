"""What a result says beside its figures: of which commit, on which machine, with which libraries and which defaults.

`results/<benchmark>.json` is what the tables in docs are made from (`tables.py`). A figure depends on the defaults of
the options that its benchmark leaves alone, so they stand beside it, and `tests/benchmarks` fails when one of them is
no longer the default: the result is to be made again then, or says nothing of the version it is committed with.
"""

import argparse
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8q.core.record import library_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GATES = ("min_fp8_share", "max_ppl_increase")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A benchmark's parser, with the one option that all have: `--save`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json too")
    return parser


def described(benchmark: str, options: Sequence[type] = ()) -> dict[str, Any]:
    """What stands beside the figures, before they are measured. `options`: classes whose defaults they follow."""
    return {
        "benchmark": benchmark,
        "commit": commit(),
        "machine": machine(),
        "versions": library_versions(),
        "defaults": {kind.__name__: defaults(kind) for kind in options},
    }


def publish(head: Mapping[str, Any], figures: Mapping[str, Any], save: str | None) -> int:
    """Write the result where it was asked for, print it as one line, and give the exit status: 1 for a limit missed."""
    result = {**head, **figures}
    if save:
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        (RESULTS / f"{save}.json").write_text(text, encoding="utf-8")
    print(json.dumps(result))
    return 0 if result.get("passed", True) else 1


def defaults(kind: type) -> dict[str, Any]:
    """The defaults of an option class, as JSON has them, but for its gates, which change no figure."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(kind())))
    return {name: value for name, value in found.items() if name not in GATES}


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
    """The commit that is measured; a plus behind it where tracked files differ from it."""
    short = _git("rev-parse", "--short", "HEAD")
    return short + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
