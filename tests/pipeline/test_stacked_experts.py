"""Experts that are stored [in, out] in stacks, gpt_oss's and Llama 4's: calibrated, written, and read by others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales

from ..command_result import Result
from ..conftest import Texts
from ..mixtures import ALTERNATING, SCALED_INPUTS, WITH_OWN_GATE, random_of

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"samples": 8, "seq_len": 64, "batch_size": 4}
IDS = torch.arange(3, 51)[None]
Calibrated = Callable[..., Run]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, demo_texts: Texts) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:9_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def calibrated(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """Calibrate a random mixture; `calibrated(ALTERNATING, skip=(…))`."""

    def run(mixture: tuple[str, dict[str, Any]], **options: Any) -> Run:
        folder = tmp_path_factory.mktemp("stacked")
        random_of(folder / "model", *mixture)
        return api.calibrate(
            str(folder / "model"), str(text), folder / "run", options=CalibrateOptions(**OPTIONS | options)
        )

    return run


@pytest.fixture(scope="module")
def alternating(calibrated: Calibrated) -> Run:
    """gpt_oss's kind, rounded by GPTQ, a layer after the other."""
    return calibrated(ALTERNATING, weight_rounding="sequential")


def stored(run: Run) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in run.model.glob("model-*.safetensors"):
        tensors |= load_file(file)
    return tensors


def source_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.root.parent / "model" / "model.safetensors")


@torch.no_grad()
def reference_logits(run: Run) -> torch.Tensor:
    reference = load_reference(run.model, "exact", torch.float32)
    logits: torch.Tensor = reference.model(input_ids=IDS, past_key_values=reference.new_cache(), use_cache=True).logits
    return logits


@torch.no_grad()
def loaded_logits(path: Path, **options: Any) -> torch.Tensor:
    """Of what transformers loads, every key of which fits."""
    loading: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    model, info = loading
    assert not [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    logits: torch.Tensor = model(input_ids=IDS).logits.float()
    return logits


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_each_expert_has_codes_scales_and_its_biases(alternating: Run) -> None:
    """Code × scale against the stack, by hand: its even columns are the gate's rows."""
    tensors, source = stored(alternating), source_of(alternating)
    experts = "model.layers.1.mlp.experts"
    assert {name for name in load_scales(alternating).weights if name.startswith(experts)} == {
        f"{experts}.{number}.{gemm}" for number in range(4) for gemm in ("gate_proj", "up_proj", "down_proj")
    }
    both = source[f"{experts}.gate_up_proj"].float()
    for gemm, weight in (("gate_proj", both[2, :, ::2].T), ("up_proj", both[2, :, 1::2].T)):
        codes = tensors[f"{experts}.2.{gemm}.weight"]
        assert codes.dtype == torch.float8_e4m3fn
        assert apart(codes.float() * tensors[f"{experts}.2.{gemm}.weight_scale"], weight) < 0.05
    assert torch.equal(tensors[f"{experts}.2.up_proj.bias"], source[f"{experts}.gate_up_proj_bias"][2, 1::2])
    assert torch.equal(tensors[f"{experts}.2.down_proj.bias"], source[f"{experts}.down_proj_bias"][2])
    assert not any(name.endswith(("gate_up_proj", "gate_up_proj_bias")) for name in tensors)


def test_the_reference_is_near_transformers_model(alternating: Run) -> None:
    """Attention sinks, windows, limits and biases as transformers' own eager forward pass has them."""
    original = loaded_logits(alternating.root.parent / "model", dtype=torch.float32)
    assert 0 < apart(reference_logits(alternating), original) < 0.2


def test_it_is_validated_and_has_no_graph(alternating: Run) -> None:
    options = api.ValidateOptions(runtimes=("bf16", "reference"), context=32, max_tokens=128)
    assert {"bf16", "reference"} <= api.validate(alternating.root, options=options).runtimes.keys()
    assert "experts without a gate, or with one of their own" in str(alternating.without_graph())


def test_the_card_and_a_note_say_who_reads_such_experts(alternating: Run, fp8q: Callable[..., Result]) -> None:
    card = (alternating.model / "README.md").read_text(encoding="utf-8")
    reason = "transformers reads the experts of GptOssForCausalLM from tensors that hold all of a layer"
    assert f"**transformers does not run its experts in FP8**: {reason}" in " ".join(card.split())
    result = fp8q("lint", alternating.model)
    assert result.code == 0
    assert " error " not in result.out


@pytest.mark.parametrize("mixture", [ALTERNATING, WITH_OWN_GATE], ids=["gpt_oss", "MiniMax-M3"])
def test_experts_that_stay_in_bf16_stay_in_their_stacks(
    mixture: tuple[str, dict[str, Any]], calibrated: Calibrated
) -> None:
    """What no loader reads in single experts is written as it was stored, and transformers loads the whole."""
    run = calibrated(mixture, skip=("*.experts.*",))
    tensors, source = stored(run), source_of(run)
    stacks = {name for name in source if ".experts." in name}
    assert {name for name in tensors if ".experts." in name} == stacks
    assert all(torch.equal(tensors[name], source[name]) for name in stacks)
    weights = load_scales(run).weights
    assert weights
    assert not any(".experts." in name for name in weights)
    assert apart(loaded_logits(run.model, dtype=torch.float32), reference_logits(run)) < 0.01
    assert "does not run its experts in FP8" not in (run.model / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scaled(calibrated: Calibrated) -> Run:
    """Llama 4's kind, rounded by GPTQ, with a scale for each token, as loaders have it for experts."""
    return calibrated(SCALED_INPUTS, weight_rounding="gptq", form=("dynamic",))


def test_experts_of_scaled_inputs_get_codes_that_transformers_loads(scaled: Run) -> None:
    """It makes a module of each expert where a checkpoint is quantized; codes × scales against the stack, by hand.

    The logits are not the same: of what has two axes, as the input of these, compressed-tensors 0.20 rounds nothing.
    """
    tensors, source = stored(scaled), source_of(scaled)
    experts = "model.layers.2.feed_forward.experts"
    gate, up = source[f"{experts}.gate_up_proj"][3].float().T.chunk(2)
    for gemm, weight in (("gate_proj", gate), ("up_proj", up)):
        values = tensors[f"{experts}.3.{gemm}.weight"].float() * tensors[f"{experts}.3.{gemm}.weight_scale"]
        assert apart(values, weight) < 0.05
    assert apart(loaded_logits(scaled.model, dtype=torch.float32), reference_logits(scaled)) < 0.2


def test_the_router_and_nothing_else_of_llama_4_stays(scaled: Run) -> None:
    skipped = json.loads((scaled.root / "scales.json").read_text(encoding="utf-8"))["skipped"]
    assert {name.rpartition(".")[2] for name in skipped} == {"router", "lm_head"}
    experts = "model.layers.2.feed_forward.experts.0"
    activations = load_scales(scaled).activations
    assert activations[f"{experts}.gate_proj"] == activations[f"{experts}.up_proj"]


@pytest.mark.parametrize("options", [{"weight_rounding": "sequential"}, {"stream": True}], ids=["sequential", "stream"])
def test_scaled_inputs_in_other_ways(options: dict[str, Any], calibrated: Calibrated, scaled: Run) -> None:
    run = calibrated(SCALED_INPUTS, **options)
    assert apart(reference_logits(run), reference_logits(scaled)) < 0.2
    assert "whose inputs the router scales" in str(run.without_graph())
    if "stream" in options:
        one, other = (load_file(each.root / "statistics.safetensors") for each in (run, scaled))
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
