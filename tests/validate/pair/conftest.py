"""Compare a checkpoint made of the demo with the demo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.reporter import SILENT, Reporter
from fp8q.options import PairOptions
from fp8q.validate.pair.document import PairComparison
from tests.calibrate.conftest import Notebook
from tests.validate.pair import damaged
from tests.validate.pair.damaged import quantized


@pytest.fixture
def compared(demo_checkpoint: Path, demo_texts: Any, tmp_path: Path) -> Callable[..., PairComparison]:
    """Damage an FP8 checkpoint of the demo, and compare it with the demo on some windows of 64 tokens."""

    def compare(
        damage: damaged.Damage = lambda tensors, path: None, cache: bool = False, out: str = "out",
        report: Reporter = SILENT, **more: Any,
    ) -> PairComparison:  # fmt: skip
        candidate = tmp_path / "candidate"
        if not candidate.exists():
            quantized(demo_checkpoint, candidate, damage, cache)
        size = {"context": 64, "max_tokens": 800} | more
        options = PairOptions(data=str(demo_texts.evaluation), out=tmp_path / out, **size)
        return api.compare_checkpoints(demo_checkpoint, candidate, options, report)

    return compare


@pytest.fixture
def compared_briefly(compared: Callable[..., PairComparison]) -> Callable[..., PairComparison]:
    """Compare the demo on the fewest windows."""
    return partial(compared, max_tokens=660)


@pytest.fixture
def report() -> Notebook:
    """A reporter that keeps its notes."""
    return Notebook()
