"""Architectures through the whole way, each once: those trained beside the repository, and tiny random ones for what
differs in others.
"""

import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import onnx
import pytest
import torch
import transformers
from onnx.external_data_helper import uses_external_data
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fp8q import api
from fp8q.calibrate.measure.observe import probe_groups
from fp8q.calibrate.model.products import attention_modules, matrix_products, output_axis, output_head
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.info import load_engines
from fp8q.export.graph.modules import GraphPlan
from fp8q.files import share
from fp8q.options import KvCache, Terms
from fp8q.reporter import SILENT
from fp8q.run import Run

TINY = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One case: a trained checkpoint beside the repository, or where `fields` are given a tiny random one of
    transformers' class `config`. Seven take their activations in two `terms`; what each makes of the other number is in
    `benchmarks/architectures.py`, and of the random ones in `benchmarks/unseen_architectures.py`.
    """

    name: str
    what: str
    kv_cache: KvCache
    dtype: Literal["bf16", "fp16"] = "bf16"
    config: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    text: str = "python"
    terms: Terms = 1

    @property
    def trained(self) -> bool:
        """Whether perplexity means anything."""
        return not self.config


ARCHITECTURES = [
    Architecture("llama", "tied head, cache in the compute type, graph in FP16", "off", "fp16", terms=2),
    Architecture("qwen2", "q/k/v biases", "fp8"),
    Architecture("opt", "as many KV heads as heads, learned positions", "fp8", terms=2),
    Architecture("gemma", "scaled embeddings, wide heads", "off"),
    Architecture("gpt2", "Conv1D, fused q/k/v without rotary embedding, learned positions", "fp8", terms=2),
    Architecture("stories260k", "heads too small for a fused attention kernel", "fp8", text="tinystories"),
    Architecture(
        "mistral",
        "a window shorter than the text",
        "fp8",
        terms=2,
        config="MistralConfig",
        fields={"num_key_value_heads": 2, "sliding_window": 4},
    ),
    Architecture(
        "qwen3",
        "q/k norms, heads wider than the model",
        "off",
        terms=2,
        config="Qwen3Config",
        fields={"num_key_value_heads": 2, "head_dim": 48},
    ),
    Architecture(
        "gpt_neox",
        "fused q/k/v, partial rotary embedding, a head stored under another name",
        "fp8",
        terms=2,
        config="GPTNeoXConfig",
    ),
    Architecture(
        "phi3",
        "fused q/k/v and gate/up",
        "fp8",
        terms=2,
        config="Phi3Config",
        fields={"num_key_value_heads": 2, "pad_token_id": 0},
    ),
]


def as_if_quantized(
    folder: Path, config: PreTrainedConfig, cache: str, dtype: torch.dtype, wide: str = ""
) -> GraphPlan:
    """Write a random checkpoint of `config` with scales as FP8's, all zero (a graph does not look at values), and
    return the plan of its graph: `cache` in FP8, products whose name contains `wide` not.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = torch.nn.Module.to(AutoModelForCausalLM.from_config(config), torch.bfloat16)
    model.save_pretrained(folder)
    products = {name: product for name, product in matrix_products(model).items() if name != output_head(model)}
    quantized = {name: product for name, product in products.items() if not wide or wide not in name}
    groups = probe_groups(model, quantized)
    scales = {f"{name}.input_scale": torch.zeros(1) for name in quantized}
    scales |= {
        f"{name}.weight_scale": torch.zeros(model.get_parameter(f"{name}.weight").shape[output_axis(product)], 1)
        for name, product in quantized.items()
    }
    scales |= {f"{name}.{part}_scale": torch.zeros(1) for name in attention_modules(model).values() for part in cache}
    save_file(scales, folder / "scales.safetensors")
    return GraphPlan(groups, cache, dtype)


@dataclass(frozen=True)
class Finished:
    """A run of one architecture, calibrated and exported."""

    architecture: Architecture
    run: Run


@pytest.fixture(scope="session")
def random_checkpoint(demo_checkpoint: Path) -> Callable[..., Path]:
    """`random_checkpoint(path, "Phi3Config", {…})`: write a tiny one in BF16, its values spread as trained ones are
    (norms around 1), with the demo's tokenizer.
    """

    def write(path: Path, config: str, fields: dict[str, Any]) -> Path:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**(TINY | fields)))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.1)
        torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path)
        shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
        return path

    return write


@pytest.fixture(scope="session", name="as_if_quantized")
def as_if_quantized_fixture() -> Callable[..., GraphPlan]:
    """`as_if_quantized(folder, config, cache, dtype, wide)`."""
    return as_if_quantized


@pytest.fixture(params=[case for case in ARCHITECTURES if not case.trained], ids=lambda case: case.name)
def deep(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, GraphPlan]:
    """Each random architecture with four layers, as if quantized: a checkpoint whose weights mean nothing, and what of
    it is in FP8.
    """
    case: Architecture = request.param
    config = getattr(transformers, case.config)(**{**TINY, **case.fields, "num_hidden_layers": 4})
    cache = {"off": "", "fp8": "kv", "v": "v"}[case.kv_cache]
    return tmp_path, as_if_quantized(tmp_path, config, cache, torch.bfloat16)


@pytest.fixture(scope="session")
def texts(
    tmp_path_factory: pytest.TempPathFactory, shared_data: Callable[[str], Path]
) -> Callable[[str], tuple[Path, Path]]:
    """`texts("python")`: a calibration and an evaluation text of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("texts")
    sources = {
        "python": ("python-calibration.txt", "python-evaluation.txt"),
        "tinystories": ("tinystories-train-1000.txt", "tinystories-valid-excerpt.txt"),
    }

    def cut(kind: str) -> tuple[Path, Path]:
        paths = folder / f"{kind}-calibration.txt", folder / f"{kind}-evaluation.txt"
        for path, source, size in zip(paths, sources[kind], (24_000, 8_000), strict=True):
            path.write_text(shared_data(source).read_text(encoding="utf-8")[:size], encoding="utf-8")
        return paths

    return cut


def what_it_is(case: Architecture) -> str:
    """What a test of it is called."""
    return f"{case.name}, {case.what}"


@pytest.fixture(scope="package", params=ARCHITECTURES, ids=what_it_is)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_checkpoint: Callable[[str], Path],
    random_checkpoint: Callable[..., Path], texts: Callable[[str], tuple[Path, Path]],
) -> Finished:  # fmt: skip
    """Each architecture in turn, calibrated and exported once for all tests; they change nothing in it."""
    case: Architecture = request.param
    folder = tmp_path_factory.mktemp(case.name)
    model = (
        shared_checkpoint(case.name) if case.trained else random_checkpoint(folder / "model", case.config, case.fields)
    )
    calibration, evaluation = texts(case.text)
    options = api.CalibrateOptions(kv_cache=case.kv_cache, samples=16, seq_len=64, activation_terms=case.terms)
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
def built(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`built(change, "sm89")`: the engine of the graph of a module's `run` with a change, in its own profiles."""
    wanted = tuple(load_engines(run)[0].profiles)

    def build_changed(change: Callable[[onnx.ModelProto, Path], None], target: str) -> Path:
        directory = tmp_path_factory.mktemp("changed")
        model = onnx.load_model(run.onnx, load_external_data=False)
        change(model, run.model)
        (directory / "model.onnx").write_bytes(model.SerializeToString())
        for name in {
            entry.value
            for tensor in model.graph.initializer
            if uses_external_data(tensor)
            for entry in tensor.external_data
            if entry.key == "location"
        }:
            share(run.model / name, directory / name)
        plan = directory / f"{target}.plan"
        plan.write_bytes(build(directory / "model.onnx", Job("tensorrt-rtx", target, wanted), SILENT))
        return plan

    return build_changed
