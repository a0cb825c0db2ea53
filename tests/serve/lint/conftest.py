"""A good repository, to be damaged: the counting model as `chat`, and its plain engine."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import TritonOptions

from ..counting_model import make_wide_run, record_engine


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run; nothing is changed in it."""
    run = make_wide_run(tmp_path_factory.mktemp("whole") / "run")
    record_engine(run)
    api.triton(run.root, TritonOptions(name="chat"))
    return run


@pytest.fixture
def good(whole: Run, tmp_path: Path) -> Run:
    """A copy that a test may damage."""
    return Run(Path(shutil.copytree(whole.root, tmp_path / "run")))


@pytest.fixture
def found(good: Run) -> Callable[[], list[str]]:
    """`found()`: what the lint says of the repository now, a line each."""
    return lambda: [f"{finding.severity:<8}{finding}" for finding in api.lint(good.triton).findings]
