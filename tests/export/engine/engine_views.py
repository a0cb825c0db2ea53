"""The output of `fp8q engine --json` for one engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8q.core.run import Run

Fp8q = Callable[..., Any]


def shown(fp8q: Fp8q, run: Run, target: str, plan: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the one engine shown, and the line on standard error."""
    result = fp8q("engine", run.root, "--target", target, "--plan", plan, "--json", *more)
    assert result.out.count("\n") == 1
    (view,) = json.loads(result.out)["engines"]
    return result.code, view, result.err.rstrip("\n")
