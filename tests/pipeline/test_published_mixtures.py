"""Mixtures by the class that they are published under: calibrated, and held against transformers' own model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.reading.run_checkpoint import in_files, stored_patterns
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.shared.sources import NUMBERED_OTHERWISE, gemms_of, opened

from ..conftest import Texts
from ..noise import MARGIN
from ..published import ERNIE, MINIMAX, STEP, random_class

pytestmark = pytest.mark.slow

IDS = torch.arange(3, 51)[None]
OPTIONS: dict[str, Any] = {"samples": 4, "seq_len": 48, "batch_size": 2}
Calibrated = Callable[..., Run]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, demo_texts: Texts) -> Calibrated:
    """`calibrated(STEP, skip=(…))`: a run of a random checkpoint of the class."""

    def run(mixture: tuple[str, dict[str, Any]], **options: Any) -> Run:
        folder = tmp_path_factory.mktemp("published")
        text = folder / "text.txt"
        text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:9_000], encoding="utf-8")
        model = random_class(folder / "model", *mixture)
        return api.calibrate(str(model), str(text), folder / "run", options=CalibrateOptions(**OPTIONS | options))

    return run


@pytest.fixture(scope="module", params=[STEP, MINIMAX, ERNIE], ids=["Step 3.7", "MiniMax-M3", "ERNIE 4.5 VL"])
def run(request: pytest.FixtureRequest, calibrated: Calibrated) -> Run:
    return calibrated(request.param)


def own_model(path: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = transformers.AutoModelForMultimodalLM.from_pretrained(path, **options).eval()
    return model


def stored(run: Run) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in run.model.glob("model-*.safetensors"):
        tensors |= load_file(file)
    return tensors


@torch.no_grad()
def dequantized(run: Run) -> PreTrainedModel:
    """transformers' model of the source in FP32, each weight that the run has codes of replaced by code × scale."""
    model = own_model(run.root.parent / "model", dtype=torch.float32)
    tensors, patterns = stored(run), stored_patterns(run.model)
    for name in load_scales(run).weights:
        under = in_files(name, patterns)
        weight = tensors[f"{under}.weight"].float() * tensors[f"{under}.weight_scale"]
        owner, _, gemm = name.rpartition(".")
        experts, _, number = owner.rpartition(".")
        if not number.isdecimal() or not experts.endswith(".experts"):
            model.get_submodule(name).get_parameter("weight").copy_(weight)
        elif gemm == "down_proj":
            model.get_submodule(experts).get_parameter("down_proj")[int(number)] = weight
        else:
            stack = model.get_submodule(experts).get_parameter("gate_up_proj")[int(number)]
            stack.chunk(2)[gemm == "up_proj"].copy_(weight)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    scores: torch.Tensor = model(input_ids=IDS, use_cache=False).logits.float()
    return scores


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_the_reference_is_transformers_model_of_the_dequantized_weights(run: Run) -> None:
    reference = load_reference(run.model, "exact", torch.float32)
    original = logits(own_model(run.root.parent / "model", dtype=torch.float32))
    assert 0 < apart(logits(reference.model), original) < 0.6
    reference.leave_inputs()
    assert apart(logits(reference.model), logits(dequantized(run))) < 1e-5


def test_the_lint_finds_no_error_in_towers(run: Run) -> None:
    """MiniMax-M3's files call the layers of the tower otherwise than the class: config.json has both names."""
    errors = [finding for part in api.lint(run.model).parts for finding in part.findings if finding.severity == "error"]
    assert not [str(error) for error in errors if "split-projections" not in str(error)]


def test_it_is_validated(run: Run) -> None:
    options = api.ValidateOptions(runtimes=("bf16", "reference"), context=32, max_tokens=128)
    assert {"bf16", "reference"} <= api.validate(run.root, options=options).runtimes.keys()


def test_a_weight_of_two_stored_ones_has_codes_that_transformers_loads(calibrated: Calibrated) -> None:
    """MiniMax-M3's, with every expert; the scales of inputs are as static as transformers has them."""
    run = calibrated(MINIMAX)
    joined = "model.language_model.layers.1.mlp.shared_experts.gate_up_proj"
    assert joined in load_scales(run).weights
    under = "language_model.model.layers.1.block_sparse_moe.shared_experts.gate_up_proj"
    assert in_files(joined, stored_patterns(run.model)) == under
    assert {name.rpartition(".")[2] for name in stored(run) if name.startswith(f"{under}.")} == {
        "weight", "weight_scale", "input_scale",
    }  # fmt: skip
    loading: Any = transformers.AutoModelForMultimodalLM.from_pretrained(
        run.model, dtype=torch.float32, output_loading_info=True
    )
    model, info = loading
    assert not any(info.values()), info
    reference = load_reference(run.model, "exact", torch.float32).model
    assert apart(logits(model), logits(reference)) < 0.2


def test_a_weight_of_two_stored_codes_is_quantized_again(tmp_path: Path) -> None:
    """The source has codes of gate and up; as one weight it was taken for one that the source has in BF16."""
    api.convert(str(random_class(tmp_path / "model", *MINIMAX)), tmp_path / "fp8", api.ConvertOptions(threads=1))
    source = opened(str(tmp_path / "fp8"))
    joined = "model.language_model.layers.1.mlp.shared_experts.gate_up_proj"
    weights = source.weights()
    assert weights.coded(source.stored(f"{joined}.weight"))
    assert not gemms_of(source).in_bf16.intersection({joined})
    both = load_file(tmp_path / "fp8" / "model.safetensors")
    shared = "language_model.model.layers.1.block_sparse_moe.shared_experts"
    values = [
        both[f"{shared}.{gemm}.weight"].float() * both[f"{shared}.{gemm}.weight_scale"]
        for gemm in ("gate_proj", "up_proj")
    ]
    assert torch.equal(weights.tensor(source.stored(f"{joined}.weight")), torch.cat(values))


def test_stacks_of_experts_that_stay_in_bf16_are_written_as_they_were(calibrated: Calibrated) -> None:
    """Step 3.7's: transformers 5.23 leaves them in the type that they are stored in, and so reads the whole in BF16."""
    run = calibrated(STEP, skip=("*.experts.*",))
    tensors, source = stored(run), load_file(run.root.parent / "model" / "model.safetensors")
    stacks = {name for name in source if ".moe." in name and name.endswith("_proj.weight")}
    assert len(stacks) == 6
    assert all(torch.equal(tensors[name], source[name]) for name in stacks)
    assert not any(".experts." in name for name in tensors if "share" not in name)
    rounded = logits(load_reference(run.model, "fast", torch.bfloat16).model)
    exact = logits(load_reference(run.model, "exact", torch.float32).model)
    loaded = logits(own_model(run.model, dtype=torch.bfloat16))
    assert apart(loaded, exact) < MARGIN * apart(rounded, exact) < 1


def test_experts_that_files_number_behind_others_stay_in_bf16(calibrated: Calibrated) -> None:
    """ERNIE 4.5 VL's of images; and the card says that transformers loads no FP8 checkpoint of the class, by its own
    words of the source without a single code.
    """
    run = calibrated(ERNIE)
    scales = load_scales(run)
    behind = {name: skipped.reason for name, skipped in scales.skipped.items() if ".vision_moe.experts." in name}
    assert behind
    assert {*behind.values()} == {NUMBERED_OTHERWISE}
    assert any(".text_moe.experts." in name for name in scales.weights)
    assert "divides the experts of its files among two modules" in str(run.without_graph())
    card = " ".join((run.model / "README.md").read_text(encoding="utf-8").split())
    assert "transformers loads no FP8 checkpoint of Ernie4_5_VLMoeForConditionalGeneration" in card
    source = run.root.parent / "model"
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    written = json.loads((run.model / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    own_model(source, dtype=torch.float32)
    every_layer = written | {"ignore": ["re:.*"]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": every_layer}), encoding="utf-8")
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        own_model(source, dtype=torch.float32)


@pytest.mark.parametrize("mixture", [STEP, MINIMAX, ERNIE], ids=["Step 3.7", "MiniMax-M3", "ERNIE 4.5 VL"])
def test_a_layer_at_a_time_measures_the_same(mixture: tuple[str, dict[str, Any]], calibrated: Calibrated) -> None:
    one, other = (
        load_file(calibrated(mixture, stream=stream).root / "statistics.safetensors") for stream in (False, True)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor.nan_to_num(-1), other[name].nan_to_num(-1)) for name, tensor in one.items())
