"""Calibration without graphs, for tests of what the stages before them write."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fp8q.calibrate.model.source import Source, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.options import CalibrateOptions
from fp8q.reporter import SILENT
from fp8q.run import Run
from fp8q.stages import choosing, corpora, measuring, sources
from fp8q.stages.steps import Notes

if TYPE_CHECKING:
    from tests.conftest import Texts


@pytest.fixture(scope="session")
def calibrated() -> Callable[[Run, Source, Path, CalibrateOptions], None]:
    """`calibrated(run, source, data, options)`: everything of `fp8q calibrate` but the ONNX graphs."""

    def calibrate(run: Run, source: Source, data: Path, options: CalibrateOptions) -> None:
        notes = Notes(SILENT)
        collected = corpora.collect(source, load_tokenizer(source), str(data), None, options, notes)
        corpora.write_corpus(run, source, collected, notes)
        measuring.measure(run, source, options, notes)
        choosing.quantize(run, source, sources.products_of(source), options, notes)

    return calibrate


@pytest.fixture(scope="module")
def source(demo_checkpoint: Path) -> Source:
    """The demo."""
    return open_source(str(demo_checkpoint))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, demo_texts: "Texts") -> Path:
    """A few windows of text."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:8_000], encoding="utf-8")
    return path
