"""One scale for a whole weight (`--weight-scale tensor`), through the checkpoint, its readers and the graph."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.model.source import Source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import BF16, DYNAMIC, ONE, DistillOptions, ScaleOptions
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.lint.check import checkpoint_findings
from fp8q.quantize.reading.compressed_tensors import quantization_config
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.clip import scale_of
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import Scheme
from fp8q.quantize.weights.channels import (
    QuantizedWeight,
    WeightScaling,
    joined_families,
    quantize_scaled,
    tensor_scales,
)
from fp8q.quantize.weights.mse import mse_scale, mse_scales
from fp8q.serve.loop.cache import BLOCK
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages import distill as distill_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.report.rows import fact_rows
from tests.noise import check_codes

LAYER = "model.layers.0"
#: The fixture `rescaled_layer`.
RescaledLayer = Callable[..., Run]


@pytest.fixture(scope="module")
def tensor(rescaled_layer: RescaledLayer) -> Run:
    """The same run with a scale for each weight."""
    return rescaled_layer(weight_scale="tensor")


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    (shard,) = run.model.glob("*.safetensors")
    return load_file(shard)


def log_p(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids).logits.float()
    return logits.log_softmax(-1)


def test_weights_that_servers_join_are_those_of_one_tensor_in_one_module() -> None:
    groups = [["a.q", "a.k", "a.v"], ["b.gate", "b.up", "c.proj"], ["a.o"]]
    modules = ["a.q", "a.v", "b.gate", "b.up", "c.proj", "a.o", "d"]
    assert joined_families(modules, groups) == [["a.q", "a.v"], ["b.gate", "b.up"], ["c.proj"], ["a.o"], ["d"]]


def test_the_amax_of_all_gives_the_scale_of_each_and_zeros_have_none() -> None:
    weights = {
        "q": torch.tensor([[1.0, -448.0]]),
        "k": torch.tensor([[896.0, 0.0], [1.0, 2.0]]),
        "o": torch.zeros(2, 2),
    }
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    scales = tensor_scales([["q", "k"], ["o"]], weights.__getitem__, "amax")
    assert scales == {"q": 2.0, "k": 2.0}
    scaling = WeightScaling("amax", scales)
    found = scaling.scale("k", weights["k"])
    assert found is not None
    assert found.tolist() == [2.0, 2.0]
    assert scaling.scale("k", torch.zeros(2, 2, dtype=torch.bfloat16)) is None
    assert scaling.scale("o", weights["o"]) is None  # of each channel, and all are zero


def test_the_scale_of_least_squared_error_is_the_best_of_all_for_the_values_together() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(48, 64).mul_(0.02).bfloat16(), torch.randn(16, 64).mul_(0.05).bfloat16()]
    best = float(mse_scale(weights)[0])
    values = torch.cat([weight.flatten() for weight in weights])
    assert best == mse_scales(values[None])[0]

    def error(scale: float) -> float:
        codes = (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return float((codes.double() * scale - values.double()).square().sum())

    amax = float(scale_of(float(values.abs().max()), E4M3))
    patterns = [int(torch.tensor(scale).bfloat16().view(torch.int16)) for scale in (amax / 2, amax * 1.2)]
    errors = [error(float(each.view(torch.bfloat16))) for each in torch.arange(*patterns, dtype=torch.int16)]
    assert error(best) <= min(errors) * (1 + 1e-6)


def test_the_files_have_one_scale_a_weight_and_say_so(tensor: Run, first_layer: Run) -> None:
    scales, stored, before = load_scales(tensor), tensors_of(tensor), tensors_of(first_layer)
    assert scales.tensor_weights == [*scales.weights] == [*load_scales(first_layer).weights]
    assert load_scales(first_layer).tensor_weights == []
    assert stored.keys() == before.keys()
    one = {module: stored[f"{module}.weight_scale"] for module in scales.weights}
    assert {tuple(scale.shape) for scale in one.values()} == {(1,)}
    for parent, parts in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
        assert len({float(one[f"{LAYER}.{parent}.{part}"]) for part in parts}) == 1
    for module, weight in scales.weights.items():
        assert weight.scale_min == weight.scale_max == float(one[module])
        assert (weight.rounding, weight.channels, weight.stored) == ("gptq", len(stored[f"{module}.weight"]), 1)
    config = json.loads((tensor.model / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("tensor", "tensor")
    card = (tensor.model / "README.md").read_text(encoding="utf-8")
    assert "E4M3 weights with one scale per tensor, the same for those that servers join, E4M3 activations" in card
    assert any("E4M3, a scale per tensor, by mse" in row.value for row in fact_rows(tensor))
    assert checkpoint_findings(tensor.model)[1] == []


def test_the_scale_is_that_of_all_that_are_joined(tensor: Run, source: Source) -> None:
    weights, stored = source.weights(), tensors_of(tensor)
    parts = [f"{LAYER}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    wanted = mse_scale([weights.tensor(f"{part}.weight").to(torch.bfloat16) for part in parts])
    assert {float(stored[f"{part}.weight_scale"]) for part in parts} == {float(wanted)}


def test_channels_again_give_back_the_files_of_before(
    tensor: Run, first_layer: Run, rescaled_layer: RescaledLayer
) -> None:
    again = rescaled_layer(tensor, weight_scale="channel")
    for path in (*first_layer.model.rglob("*"), first_layer.scales):
        assert (again.root / path.relative_to(first_layer.root)).read_bytes() == path.read_bytes(), path.name


def test_transformers_computes_what_the_reference_does(tensor: Run, first_layer: Run, demo_checkpoint: Path) -> None:
    """And the loss stands between a scale for each channel and no codes of these weights at all."""
    ids = torch.arange(3, 131).reshape(2, 64)
    found = log_p(load_reference(tensor.model, "exact", torch.float32).model, ids)
    loaded = log_p(AutoModelForCausalLM.from_pretrained(tensor.model, dtype=torch.float32), ids)
    float_model = log_p(AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32), ids)
    by_channel = log_p(load_reference(first_layer.model, "exact", torch.float32).model, ids)

    def kl(model: torch.Tensor) -> float:
        return float((float_model.exp() * (float_model - model)).sum(-1).mean())

    assert (loaded - found).abs().mean() < 0.3 * (float_model - found).abs().mean()
    assert 0.8 * kl(by_channel) < kl(found) < 3 * kl(by_channel)


def test_gptq_rounds_under_the_shared_scale(tensor: Run, source: Source) -> None:
    stored, module = tensors_of(tensor), f"{LAYER}.mlp.down_proj"
    scale, codes = stored[f"{module}.weight_scale"], stored[f"{module}.weight"].float()
    weight = source.weights().tensor(f"{module}.weight").bfloat16()
    nearest = quantize_scaled(weight, scale.expand(len(weight)), "mse")
    assert isinstance(nearest, QuantizedWeight)
    assert (codes != nearest.codes.float()).float().mean() > 0.1


@pytest.mark.slow
def test_the_graph_has_one_scale_and_gives_the_logits_of_the_reference(
    tensor: Run, tmp_path: Path, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    run = Run(Path(shutil.copytree(tensor.root, tmp_path / "run")))
    api.export(run.root)  # which lints the graphs
    graph = onnx.load(run.onnx, load_external_data=False).graph
    shapes = {each.name: list(each.dims) for each in graph.initializer if each.name.endswith(".weight_scale")}
    assert shapes == {f"{module}.weight_scale": [] for module in load_scales(run).weights}
    ids = np.arange(3, 35, dtype=np.int64).reshape(2, 16)
    session = OnnxRuntimeSession(run.onnx_fp32)
    filled = np.repeat([[0, 1]], [BLOCK, 16], axis=1).repeat(2, axis=0)
    logits, _ = session.forward(ids, filled, np.tile(np.arange(16), (2, 1)), session.new_cache(2, BLOCK).past(0, 2))
    check_codes(run, ids, logits, exact_logits(run, ids))
    before = run.onnx.read_bytes()
    api.export(run.root, weight_scale="mul")  # there is one scale already
    assert run.onnx.read_bytes() == before


def test_experts_keep_a_scale_for_each_channel_in_config() -> None:
    expert = "model.layers.0.mlp.experts.3.up_proj"
    static = {"model.layers.0.y": Scheme("tensor", ONE)}
    dynamic = {expert: Scheme("channel", DYNAMIC), "model.layers.0.x": Scheme("tensor", DYNAMIC)}
    config: Any = quantization_config([], None, static | dynamic, experts=True)
    groups = {name: (group["targets"], group["weights"]["strategy"]) for name, group in config["config_groups"].items()}
    assert groups == {
        "group_0": (["Linear"], "tensor"),
        "dynamic": (["model.layers.0.x"], "tensor"),
        "group_1": ([r"re:.*\.experts\.\d+\..*"], "channel"),
    }
    alone = {expert: Scheme("channel", BF16), "model.layers.0.x": Scheme("tensor", BF16)}
    config = quantization_config([], None, static | alone, experts=True)
    groups = {name: (group["targets"], group["weights"]["strategy"]) for name, group in config["config_groups"].items()}
    assert groups["weights_alone"] == (["model.layers.0.x"], "tensor")
    assert groups["experts_alone"] == ([expert], "channel")


def test_what_has_no_form_of_it_is_refused(tensor: Run) -> None:
    with pytest.raises(InputError) as refused:
        api.tune(tensor.root)
    assert str(refused.value) == (
        f"{tensor.root}: has weights with one scale, which `fp8q tune` has no candidates of; `fp8q scales "
        f"{tensor.root} --weight-scale channel` gives each output channel its own"
    )
    with pytest.raises(InputError) as refused:
        distill_stage.distill(tensor, Notes(SILENT), None, DistillOptions(scales="learned"))
    assert str(refused.value) == (
        "--scales learned: lets each output channel have its own scale, and the run has one for each weight; leave it "
        "out, or choose `fp8q scales --weight-scale channel` before"
    )
    with pytest.raises(InputError, match=r"^--inherit: takes codes and scales as they were given, and --weight-scale "):
        ScaleOptions(inherit=True, weight_scale="tensor")


@pytest.mark.parametrize(("value", "told"), [
    ("mul", "--weight-scale mul: is called --apply-scales now; write --apply-scales mul"),
    ("row", "--weight-scale row: is none of channel, tensor"),
])  # fmt: skip
def test_the_older_values_of_the_option_name_the_new_one(fp8q: Callable[..., Any], value: str, told: str) -> None:
    done = fp8q("calibrate", "model", "--data", "text", "--out", "run", "--weight-scale", value)
    assert (done.code, done.err) == (2, f"fp8q: {told}\n")
