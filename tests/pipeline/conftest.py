"""Architectures through the whole way, each once: those trained beside the repository, and tiny random ones for what
differs in others.
"""

import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fp8q import api
from fp8q.calibrate.measure.observe import probe_groups
from fp8q.calibrate.model.gemms import attention_modules, gemm_modules, output_channel_axis, output_head
from fp8q.core.run import Run
from fp8q.export.engine.build import Job
from fp8q.export.engine.info import load_engines
from fp8q.export.modules.graph_model import GraphPlan

from ..architectures import ARCHITECTURES, TINY, Architecture, random_checkpoint, texts
from ..conftest import MadeOnce, Texts
from ..graphs import changed_engine
from ..seeing import seeing_folder
from .other_models import Logits, other_models

__all__ = ["random_checkpoint", "texts"]  # fixtures


def as_if_quantized(
    folder: Path, config: PreTrainedConfig, cache: str, dtype: torch.dtype, wide: str = ""
) -> GraphPlan:
    """Write a random checkpoint of `config` with scales as FP8's, all zero (a graph does not look at values), and
    return the plan of its graph: `cache` in FP8, GEMMs whose name contains `wide` not.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = torch.nn.Module.to(AutoModelForCausalLM.from_config(config), torch.bfloat16)
    model.save_pretrained(folder)
    products = {name: product for name, product in gemm_modules(model).items() if name != output_head(model)}
    quantized = {name: product for name, product in products.items() if not wide or wide not in name}
    groups = probe_groups(model, quantized)
    scales = {f"{name}.input_scale": torch.zeros(1) for name in quantized}
    scales |= {
        f"{name}.weight_scale": torch.zeros(
            model.get_parameter(f"{name}.weight").shape[output_channel_axis(product)], 1
        )
        for name, product in quantized.items()
    }
    cached = [f"{name}.{part}" for name in attention_modules(model).values() for part in cache]
    scales |= {f"{name}_scale": torch.zeros(1) for name in cached}
    save_file(scales, folder / "scales.safetensors")
    return GraphPlan(groups, frozenset(cached), dtype)


@dataclass(frozen=True)
class Finished:
    """A run of one architecture, calibrated and exported."""

    architecture: Architecture
    run: Run


@pytest.fixture(scope="session", name="as_if_quantized")
def as_if_quantized_fixture() -> Callable[..., GraphPlan]:
    """`as_if_quantized(folder, config, cache, dtype, wide)`."""
    return as_if_quantized


@pytest.fixture(
    params=[case for case in ARCHITECTURES if case.name in ("gpt_neox", "phi3")], ids=lambda case: case.name
)
def deep(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, GraphPlan]:
    """The random architectures of one kind of layers that `test_stamped` has in no other form, with four layers, as if
    quantized: a checkpoint whose weights mean nothing, and what of it is in FP8. Qwen3 is there in two kinds, and
    Mistral's layers are Llama's with a window, which those two kinds have.
    """
    case: Architecture = request.param
    config = getattr(transformers, case.config)(**{**TINY, **case.fields, "num_hidden_layers": 4})
    cache = {"off": "", "fp8": "kv", "v": "v"}[case.kv_cache]
    return tmp_path, as_if_quantized(tmp_path, config, cache, torch.bfloat16)


def what_it_is(case: Architecture) -> str:
    """What a test of it is called."""
    return f"{case.name}, {case.what}"


@pytest.fixture(scope="package", params=ARCHITECTURES, ids=what_it_is)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_checkpoint: Callable[[str], Path],
    random_checkpoint: Callable[..., Path], texts: Callable[[str], tuple[Path, Path]], keeping_graphs: Any,
) -> Finished:  # fmt: skip
    """Each architecture in turn, calibrated and exported once for all tests; they change nothing in it."""
    case: Architecture = request.param
    folder = tmp_path_factory.mktemp(case.name)
    model = (
        shared_checkpoint(case.name) if case.trained else random_checkpoint(folder / "model", case.config, case.fields)
    )
    calibration, evaluation = texts(case.text)
    options = api.CalibrateOptions(kv_cache=case.kv_cache, samples=16, seq_len=64, activation_terms=case.terms)
    with keeping_graphs():
        run = api.calibrate(
            str(model), str(calibration), folder / "run", str(evaluation), options, api.ExportOptions(case.dtype)
        )
    return Finished(case, run)


@pytest.fixture(scope="session")
def two_implementations() -> ModuleType:
    """`benchmarks/two_implementations.py`, whose measurements are tests too."""
    return importlib.import_module("two_implementations")


@pytest.fixture(scope="package")
def attention_run(
    tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Callable[..., Path], demo_texts: Any,
    keeping_graphs: Any,
) -> Run:  # fmt: skip
    """A Llama of one layer with a cache in FP8, two query heads to a key head, exported with attention in FP8."""
    folder = tmp_path_factory.mktemp("attention")
    model = random_checkpoint(folder / "model", "LlamaConfig", {"num_hidden_layers": 1, "num_key_value_heads": 2})
    texts = [folder / "calibration.txt", folder / "evaluation.txt"]
    for path, source in zip(texts, (demo_texts.calibration, demo_texts.evaluation), strict=True):
        path.write_text(source.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=16, seq_len=64, kv_cache="fp8")
    with keeping_graphs():  # two files of tests have it
        return api.calibrate(
            str(model), str(texts[0]), folder / "run", str(texts[1]), options, api.ExportOptions(attention="fp8")
        )


@pytest.fixture(scope="module")
def begun(made_once: MadeOnce, demo_checkpoint: Path, demo_texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose weights are rounded to nearest, on 40 windows, with two codes an activation and no graph: a copy for
    each file of tests, to learn in.
    """

    def make(folder: Path) -> None:
        api.calibrate(
            str(demo_checkpoint),
            str(demo_texts.calibration),
            folder / "run",
            str(demo_texts.evaluation),
            api.CalibrateOptions(samples=40, seq_len=128, activation_terms=2),
            api.ExportOptions(graph=False),
        )

    return Run(Path(shutil.copytree(made_once("begun", make) / "run", tmp_path_factory.mktemp("begun") / "run")))


@pytest.fixture(scope="module")
def built(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`built(change, "sm89")`: the engine of the graph of a module's `run` with a change, in its own profiles."""
    wanted = tuple(load_engines(run)[0].profiles)

    def build_changed(change: Callable[[onnx.ModelProto, Path], None], target: str) -> Path:
        return changed_engine(run, change, Job("tensorrt-rtx", target, wanted), tmp_path_factory.mktemp("changed"))

    return build_changed


@pytest.fixture(scope="package")
def others(finished: Finished) -> dict[str, Logits]:
    """The models that must not pass for the finished one, and what it is in one term."""
    return other_models(finished.run)


@pytest.fixture(scope="session")
def folders(made_once: MadeOnce, demo_texts: Texts) -> Path:
    """A checkpoint of each class that sees, rows with images, and a text."""
    words = demo_texts.calibration.read_text(encoding="utf-8")[:20_000]
    return made_once("seeing", lambda folder: seeing_folder(folder, words))
