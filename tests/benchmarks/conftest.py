"""No recording is left of a test: benchmarks run in this process, too, and theirs would go on in it and in children."""

import pytest
import ran

from fp8q.options.declare import Options
from fp8q.stages.pipeline.stage import Stage


@pytest.fixture(autouse=True)
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo after each test what `ran.start` wraps and sets."""
    monkeypatch.setattr(Stage, "writing", Stage.writing)
    monkeypatch.setattr(Options, "__post_init__", Options.__post_init__)
    monkeypatch.setenv(ran.FILE, "")
    monkeypatch.delenv(ran.FILE)
