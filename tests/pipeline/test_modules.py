"""Modules that are no plain linear layers: those nobody knows stay in BF16 by declaration, Conv1D takes every option
that a linear layer does.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from fp8q import api
from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.model.gemms import multiplies_as_linear, other_matrix_modules
from fp8q.core.run import Run
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.clip import lost_share
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.weights.gptq import compensation, gptq_codes
from fp8q.quantize.weights.mse import mse_scales
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from fp8q.stages.quantize import rescaled
from tests.noise import check_codes

pytestmark = pytest.mark.slow


class OddLinear(nn.Linear):
    """A linear layer with a forward of its own, which computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight.t()) * 0.5


class OddMLP(nn.Module):
    """An MLP as researchers write them: a linear layer of their own, and a convolution over channels."""

    def __init__(self, config: Any):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.mix = OddLinear(config.intermediate_size, config.intermediate_size, bias=False)
        self.conv = nn.Conv1d(config.intermediate_size, config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.silu(self.mix(self.up_proj(x)))
        y: torch.Tensor = self.conv(mixed.transpose(1, 2)).transpose(1, 2)
        return y


@pytest.fixture(scope="module")
def demo_text(tmp_path_factory: pytest.TempPathFactory, demo_texts: Any) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    return path


def test_modules_nobody_knows_stay_in_bf16_and_are_listed(
    random_checkpoint: Callable[..., Path], demo_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", OddMLP)
    model = random_checkpoint(tmp_path / "model", "LlamaConfig", {"num_hidden_layers": 1, "num_key_value_heads": 2})
    run = api.calibrate(
        str(model),
        str(demo_text),
        tmp_path / "run",
        options=api.CalibrateOptions(samples=4, seq_len=64, skip=("*.v_proj",)),
    )
    scales, attention, mlp = load_scales(run), "model.layers.0.self_attn", "model.layers.0.mlp"
    assert set(scales.weights) == {*(f"{attention}.{part}_proj" for part in "qko"), f"{mlp}.up_proj"}
    assert {name: skipped.reason for name, skipped in scales.skipped.items()} == {
        f"{mlp}.mix": "of class OddLinear, which does not compute as a linear layer does",
        f"{mlp}.conv": "of class Conv1d, which does not compute as a linear layer does",
        f"{attention}.v_proj": "stays in BF16 (--skip *.v_proj)",
        "lm_head": "output head: its error would go straight into the logits",
    }
    (note,) = run.record().stages["quantize"].notes
    assert note == (
        f"{attention}.v_proj in BF16 beside {attention}.q_proj, {attention}.k_proj in FP8: vLLM makes one GEMM of "
        "them and refuses such a checkpoint; "
        "keep all of a group in BF16, or none, if vLLM is to serve it"
    )
    ids = load_tokens(run, run.evaluation)[:32].reshape(4, 8)
    reference = load_reference(run.model, "exact", torch.float32)
    with torch.inference_mode():
        expected = reference.model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
    logits, _ = OnnxRuntimeSession(run.onnx_fp32).forward(ids, np.ones_like(ids), np.tile(np.arange(8), (4, 1)))
    check_codes(run, ids, logits, expected)
    (engine,) = api.build_engine(run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=64))
    assert (engine.promised_products, engine.fp8_products) == (4, 4)


class PlainSubclass(nn.Linear):
    """It has the forward pass of its base."""


def test_a_linear_layer_is_known_by_its_forward_pass_as_modelopts_registry_knows_it() -> None:
    from modelopt.torch.quantization.nn import QuantModuleRegistry

    modules = [nn.Linear(4, 4), Conv1D(4, 4), PlainSubclass(4, 4), OddLinear(4, 4), FalconLinear(4, 4), nn.Identity()]
    assert [multiplies_as_linear(module) for module in modules] == [True, True, True, False, True, False]
    assert [module in QuantModuleRegistry for module in modules] == [True, True, True, False, True, False]


def test_calibrating_does_not_import_modelopt() -> None:
    program = "import sys, fp8q.stages.shared.sources, fp8q.stages.quantize, fp8q.calibrate.model.gemms; "
    program += "print([name for name in sys.modules if name.startswith('modelopt')])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_norms_and_embeddings_are_no_products_whatever_their_shape() -> None:
    class HeadNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 16))

    class Positions(HeadNorm):
        pass

    Positions.__name__ = "LearnedPositionalEmbedding"
    model: Any = nn.ModuleDict(
        {
            "norm": HeadNorm(),
            "embed": nn.Embedding(4, 4),
            "positions": Positions(),
            "linear": nn.Linear(4, 4),
            "conv": nn.Conv2d(4, 4, 1),
        }
    )
    assert list(other_matrix_modules(model)) == ["conv"]


@pytest.mark.parametrize(
    "name", ["NormedProjection", "LayerNormMLP", "AbnormalMixer", "EmbeddingProjection", "PatchEmbedder"]
)
def test_a_module_with_a_matrix_is_not_hidden_by_a_norm_or_an_embedding_within_its_name(name: str) -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 16))

    Mixer.__name__ = name
    model: Any = nn.ModuleDict({"mix": Mixer()})
    assert list(other_matrix_modules(model)) == ["mix"]


def stored(run: Run, name: str) -> torch.Tensor:
    with safe_open(run.model / "model-00001-of-00001.safetensors", "pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


@pytest.fixture(scope="module")
def conv1d(
    random_checkpoint: Callable[..., Path], demo_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """A GPT-2 stored under the names of 2019, calibrated layer by layer, with scales and rounding of least error."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = random_checkpoint(folder / "model", "GPT2Config", {"n_inner": 192})
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    options = api.CalibrateOptions(
        samples=4, seq_len=64, stream=True, weight_method="mse", weight_rounding="gptq", kv_cache="fp8", only=("*.0.*",)
    )
    return model, api.calibrate(str(model), str(demo_text), folder / "run", options=options)


def test_a_conv1d_is_quantized_by_its_output_channels_along_axis_1(conv1d: tuple[Path, Run]) -> None:
    model, run = conv1d
    scales = load_scales(run)
    layer = "transformer.h.0"
    assert set(scales.weights) == {
        f"{layer}.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    weights = load_file(model / "model.safetensors")
    for name, summary in scales.weights.items():
        weight = weights[f"{name.removeprefix('transformer.')}.weight"]  # [in, out]
        assert (summary.axis, summary.channels, summary.rounding) == (1, weight.shape[1], "gptq")
        scale, codes = stored(run, f"{name}.weight_scale"), stored(run, f"{name}.weight")
        assert (codes.shape, scale.shape) == (weight.shape, (1, weight.shape[1]))
        columns = weight.t().contiguous()
        np.testing.assert_array_equal(scale[0].numpy(), mse_scales(columns))
        lost = lost_share(scales.activations[name].sqnr_db)
        expected = gptq_codes(columns, scale[0], compensation(load_moments(run.moments, name), lost))
        assert torch.equal(codes.t().view(torch.uint8), expected.view(torch.uint8))
        assert not torch.equal(codes.t().view(torch.uint8), encode(columns, scale[0][:, None]).view(torch.uint8))
    assert stored(run, "h.1.mlp.c_fc.weight").equal(weights["h.1.mlp.c_fc.weight"])


def test_graph_and_reference_read_both_kinds_of_names(conv1d: tuple[Path, Run]) -> None:
    _, run = conv1d
    ids = load_tokens(run, run.evaluation)[:32].reshape(4, 8)
    reference = load_reference(run.model, "exact", torch.float32)
    with torch.inference_mode():
        expected = reference.model(
            input_ids=torch.from_numpy(ids), past_key_values=reference.new_cache(), use_cache=True
        ).logits.numpy()
    logits, _ = OnnxRuntimeSession(run.onnx_fp32).forward(ids, np.ones_like(ids), np.tile(np.arange(8), (4, 1)))
    check_codes(run, ids, logits, expected)


def test_choosing_again_keeps_what_was_asked_for_unless_told_otherwise(conv1d: tuple[Path, Run]) -> None:
    _, run = conv1d
    assert rescaled(run, api.RescaleOptions()).only == ("*.0.*",)
    assert rescaled(run, api.RescaleOptions(only=("*.mlp.*",))).only == ("*.mlp.*",)


def test_the_checkpoint_says_who_can_load_it(conv1d: tuple[Path, Run]) -> None:
    _, run = conv1d
    document = json.loads((run.model / "config.json").read_text())["quantization_config"]
    assert document == {
        "format": "fp8q",
        "reason": (
            "FP8 codes in Conv1D modules, for which compressed-tensors has no form; fp8q and the graphs that "
            "it exports serve this checkpoint, transformers and vLLM cannot"
        ),
    }
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert "**transformers and vLLM cannot load it**: GPT2LMHeadModel keeps its weights in Conv1D modules" in card
    assert "from_pretrained(" not in card
    assert "vllm serve" not in card
    assert card.startswith("---\ntags: [fp8]\n---\n")
    assert run.record().stages["quantize"].notes == [
        (
            "GPT2LMHeadModel keeps its weights in Conv1D modules, for which Hugging Face has no FP8 form: fp8q and "
            "ONNX "
            "run `model/`, transformers and vLLM cannot load it"
        )
    ]
