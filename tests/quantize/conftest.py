"""Small checkpoints, and calibration without graphs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q import api
from fp8q.calibrate.model.source import Source, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.steps import Notes
from fp8q.stages.shared import sources

if TYPE_CHECKING:
    from tests.conftest import KeepingGraphs, Texts


@pytest.fixture(scope="session")
def calibrated() -> Callable[[Run, Source, Path, CalibrateOptions], None]:
    """`calibrated(run, source, data, options)`: everything of `fp8q calibrate` but the ONNX graphs."""

    def calibrate(run: Run, source: Source, data: Path, options: CalibrateOptions) -> None:
        notes = Notes(SILENT)
        collected = corpus_stage.collect(source, load_tokenizer(source), str(data), None, options, notes)
        corpus_stage.write_corpus(run, source, collected, notes)
        measure_stage.measure(run, source, options, notes, moments=options.needs_moments)
        quantize_stage.quantize(run, source, sources.products_of(source), options, notes)

    return calibrate


@pytest.fixture(scope="session")
def rescaled(
    demo_run: Run, keeping_graphs: "KeepingGraphs", tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """`rescaled(q_scale=True)`: a copy of the demo's run, which has an FP8 cache, its scales chosen again by these
    options of `fp8q scales`.
    """

    def rescale(**options: Any) -> Run:
        copy, ignored = tmp_path_factory.mktemp("rescaled") / "run", shutil.ignore_patterns("engines", "triton")
        shutil.copytree(demo_run.root, copy, ignore=ignored)
        with keeping_graphs():
            return api.scales(copy, api.RescaleOptions(**options))

    return rescale


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


@pytest.fixture
def tiny(tmp_path: Path, demo_checkpoint: Path) -> Callable[..., Source]:
    """`tiny("OPTConfig", {…})`: a small random checkpoint of that configuration, opened."""

    def make(config: str, fields: dict[str, Any]) -> Source:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        path = tmp_path / "model"
        torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path)
        shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
        return open_source(str(path))

    return make
