"""FP8 checkpoints as a source: the numbers that their codes stand for, held against transformers' own loading."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from fp8q.calibrate.model.bf16_gemms import gemms_in_fp32
from fp8q.calibrate.model.source import Source, load_model
from fp8q.core.errors import InputError
from fp8q.quantize.reading.dequantized import fp8_source
from fp8q.stages.shared.sources import opened

from . import fp8_checkpoints

MODULE = "model.layers.1.mlp.down_proj"
WEIGHT, SCALE = f"{MODULE}.weight", f"{MODULE}.weight_scale"
IDS = torch.arange(5, 69)[None]
FORMS: dict[str, Callable[[Path, Path], Path]] = {
    "tensor": lambda source, folder: fp8_checkpoints.compressed(source, folder, "tensor"),
    "channel": lambda source, folder: fp8_checkpoints.compressed(source, folder, "channel"),
    "block": lambda source, folder: fp8_checkpoints.compressed(source, folder, "block"),
    "fine 128x128": fp8_checkpoints.fine_grained,
    "fine 96x160": lambda source, folder: fp8_checkpoints.fine_grained(source, folder, (96, 160)),
    "fine tensor": lambda source, folder: fp8_checkpoints.fine_grained(source, folder, None),
    "modelopt": fp8_checkpoints.modelopt,
    "modelopt blocks": lambda source, folder: fp8_checkpoints.modelopt(
        source, folder, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"
    ),
}
#: ModelOpt's export takes a warning that is an error for its own failure.
as_modelopt_warns = pytest.mark.filterwarnings("default")


@pytest.fixture
def channel(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """The demo with a scale a channel."""
    return fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "channel", "channel")


def change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Put `tensors` in the place of those of `MODULE` in the checkpoint in `folder`; None takes one out."""
    file = folder / fp8_checkpoints.SINGLE
    held = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for last, tensor in tensors.items():
        if tensor is None:
            del held[f"{MODULE}.{last}"]
        else:
            held[f"{MODULE}.{last}"] = tensor
    save_file(held, file, {"format": "pt"})
    return folder


def configure(folder: Path, quantization: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as refused:
        opened(str(folder))
    return str(refused.value)


def dequantized(folder: Path, name: str) -> torch.Tensor:
    """Code × scale in float64, a value at a time as the form's shapes say, rounded once to FP32."""
    held = load_file(folder / fp8_checkpoints.SINGLE)
    codes = held[name].double()
    scales = (held[f"{name}_scale"] if f"{name}_scale" in held else held[f"{name}_scale_inv"]).double()
    rows, columns = codes.shape
    if scales.numel() == 1 or scales.numel() == rows:
        return (codes * scales.reshape(-1, 1)).float()
    grid = scales.reshape(scales.shape[0], -1)
    sides = (96, 160) if "96x160" in folder.name else (128, 128)
    return (codes * grid[torch.arange(rows) // sides[0]][:, torch.arange(columns) // sides[1]]).float()


@as_modelopt_warns
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_read_as_the_numbers_they_stand_for(demo_checkpoint: Path, tmp_path: Path, form: str) -> None:
    folder = FORMS[form](demo_checkpoint, tmp_path / form)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint / name, folder)
    source = opened(str(folder))
    weights, original = source.weights(), set(load_file(demo_checkpoint / fp8_checkpoints.SINGLE))
    assert set(weights.names()) == original
    coded = [name for name in original if weights.coded(name)]
    assert len(coded) == 28
    for name in [*coded[:3], WEIGHT]:
        assert weights.dtype(name) == "F32"
        assert torch.equal(weights.tensor(name), dequantized(folder, name))
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(weights.tensor(norm), load_file(demo_checkpoint / fp8_checkpoints.SINGLE)[norm])


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_the_numbers_are_those_that_compressed_tensors_decompresses_to(
    demo_checkpoint: Path, tmp_path: Path, strategy: str
) -> None:
    folder = fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "given", strategy)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with suppress(RuntimeError):  # of blocks it can group no 704 inputs by 128
        theirs(IDS)  # it decompresses when it is called
    ours = load_model(opened(str(folder)), torch.float32)
    for name, parameter in ours.named_parameters():
        assert torch.equal(theirs.get_parameter(name), parameter), name


def test_the_model_is_the_one_that_transformers_dequantizes(demo_checkpoint: Path, tmp_path: Path) -> None:
    """In BF16, to the last bit: one rounding of code × scale. (Blocks that do not divide transformers refuses.)"""
    folder = fp8_checkpoints.fine_grained(demo_checkpoint, tmp_path / "given", (64, 64))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = load_model(opened(str(folder)), torch.bfloat16)
    for name, parameter in ours.named_parameters():
        assert torch.equal(theirs.get_parameter(name), parameter), name
    with torch.inference_mode(), gemms_in_fp32():
        assert torch.equal(ours(IDS).logits, theirs(IDS, use_cache=False).logits)


def test_the_fingerprint_is_of_the_given_files(demo_checkpoint: Path, channel: Path, tmp_path: Path) -> None:
    source = opened(str(channel))
    assert source.fingerprint != opened(str(demo_checkpoint)).fingerprint
    change(channel, weight_scale=load_file(channel / fp8_checkpoints.SINGLE)[SCALE] * 2)
    assert opened(str(channel)).fingerprint != source.fingerprint


@as_modelopt_warns
def test_what_modelopt_says_is_in_the_fingerprint(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = fp8_checkpoints.modelopt(demo_checkpoint, tmp_path / "given")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint / name, folder)
    before: Source = opened(str(folder))
    assert fp8_source(before) is not None
    said = folder / "hf_quant_config.json"
    said.write_text(said.read_text() + "\n")
    assert opened(str(folder)).fingerprint != before.fingerprint


def test_a_bf16_checkpoint_is_no_fp8_checkpoint(demo_checkpoint: Path) -> None:
    assert fp8_source(opened(str(demo_checkpoint))) is None


AGAIN = "export the checkpoint again"
READ = (
    "what is read is compressed-tensors (float-quantized), modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO) and "
    "fp8 (blocks or one scale a tensor)"
)


def test_codes_without_a_scale(channel: Path) -> None:
    assert refusal(change(channel, weight_scale=None)) == (
        f"{WEIGHT}: has no scale (weight_scale), and codes without one say nothing; {AGAIN}"
    )


def test_no_scales_at_all_names_the_first_tensor(channel: Path) -> None:
    file = channel / fp8_checkpoints.SINGLE
    held = {name: tensor.clone() for name, tensor in load_file(file).items() if not name.endswith("_scale")}
    save_file(held, file, {"format": "pt"})
    assert refusal(channel) == (
        f"model.layers.0.mlp.down_proj.weight: has no scale (weight_scale), and codes without one say nothing; {AGAIN}"
    )


def test_scales_that_do_not_tile(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "given", "block")
    assert refusal(change(folder, weight_scale=torch.ones(2, 5))) == (
        f"{SCALE}: has the shape [2, 5], which does not tile {WEIGHT} [256, 704]; {AGAIN}"
    )


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_a_scale_that_is_none(channel: Path, value: float, shown: str) -> None:
    scale = load_file(channel / fp8_checkpoints.SINGLE)[SCALE].float()
    scale[3] = value
    assert refusal(change(channel, weight_scale=scale)) == (
        f"{SCALE}: holds {shown} (1 of 256 are not positive and finite), which is no scale; {AGAIN}"
    )


def test_a_block_of_zeros_may_have_the_scale_0(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "given", "block")
    scale = load_file(folder / fp8_checkpoints.SINGLE)[SCALE].clone()
    scale[0, 0] = 0
    weights = opened(str(change(folder, weight_scale=scale))).weights()
    assert not weights.tensor(WEIGHT)[:128, :128].any()
    assert weights.tensor(WEIGHT)[:128, 128:].any()


def test_codes_of_another_format(channel: Path) -> None:
    wide = load_file(channel / fp8_checkpoints.SINGLE)[WEIGHT].float()
    assert refusal(change(channel, weight=wide.to(torch.float8_e5m2), weight_scale=None)) == (
        f"{channel / fp8_checkpoints.SINGLE}: {WEIGHT} is F8_E5M2 [256, 704], and what is read are matrices in "
        "F8_E4M3; give the checkpoint it was made from, in BF16"
    )


def test_codes_that_config_json_does_not_speak_of(channel: Path) -> None:
    assert refusal(configure(channel, None)) == (
        f"{channel / fp8_checkpoints.SINGLE}: model.layers.0.mlp.down_proj.weight is F8_E4M3, and config.json has no "
        f"quantization_config that says what its codes stand for; {READ}; {AGAIN}"
    )


def test_a_config_that_speaks_of_codes_that_are_not_there(demo_checkpoint: Path, channel: Path) -> None:
    shutil.copy(demo_checkpoint / fp8_checkpoints.SINGLE, channel)
    assert refusal(channel) == (
        f"{channel / 'config.json'}: says that {channel} is quantized, and no tensor there holds FP8 codes; where the "
        "weights are numbers, take quantization_config out of config.json, and hf_quant_config.json away"
    )


ORIGINAL = "give the checkpoint it was made from, in BF16"


@pytest.mark.parametrize(
    ("said", "found", "way_round"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq' (INT4 or INT8)", ORIGINAL),
        ({"quant_method": "awq"}, "quant_method is 'awq' (INT4)", ORIGINAL),
        (
            {"quant_method": "mxfp4"},
            "quant_method is 'mxfp4' (MXFP4)",
            "load it with transformers' Mxfp4Config(dequantize=True), save it with save_pretrained and give that",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_method is 'modelopt' with quant_algo 'NVFP4' (NVFP4)",
            ORIGINAL,
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "quant_method is 'compressed-tensors' with the format 'pack-quantized' (INT4 or INT8)",
            ORIGINAL,
        ),
        ({"quant_method": "quanto"}, "quant_method is 'quanto'", ORIGINAL),
    ],
)
def test_a_form_that_is_not_read(channel: Path, said: dict[str, object], found: str, way_round: str) -> None:
    assert refusal(configure(channel, said)) == f"{channel / 'config.json'}: {found}, and {READ}; {way_round}"
