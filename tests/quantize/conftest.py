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
from fp8q.options import CalibrateOptions, RescaleOptions
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.stage import Notes
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
        quantize_stage.quantize(run, source, sources.gemms_of(source), options, notes)

    return calibrate


#: The demo's first layer in one code, rounded by GPTQ, and all else in BF16.
FIRST_LAYER = CalibrateOptions(
    samples=6, seq_len=64, batch_size=2, stream=False, skip=("model.layers.[!0].*",), weight_rounding="gptq"
)


@pytest.fixture(scope="module")
def first_layer(
    tmp_path_factory: pytest.TempPathFactory, source: Source, data: Path, calibrated: Callable[..., None]
) -> Run:
    """The run of `FIRST_LAYER`, with a static scale for an input and one for each output channel."""
    made = Run(tmp_path_factory.mktemp("first-layer") / "run")
    calibrated(made, source, data, FIRST_LAYER)
    return made


@pytest.fixture(scope="module")
def rescaled_layer(first_layer: Run, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`rescaled_layer(form=("block",))`: a copy of `first_layer`, or of the run `of`, its scales chosen again by these
    options of `fp8q scales`.
    """

    def rescale(of: Run | None = None, notes: Notes | None = None, **options: Any) -> Run:
        copy = Run(Path(shutil.copytree((of or first_layer).root, tmp_path_factory.mktemp("rescaled-layer") / "run")))
        chosen = quantize_stage.rescaled(copy, RescaleOptions(**options))
        quantize_stage.quantize(copy, source, sources.gemms_of(source, chosen), chosen, notes or Notes(SILENT))
        return copy

    return rescale


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
