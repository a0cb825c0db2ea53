"""Fields of quantization configurations that fp8q does not read: named, and refused where they change the model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.quantize.reading.codecs import CODECS
from fp8q.quantize.reading.dequantized import fp8_source, recognize
from fp8q.quantize.reading.fp8_tensors import cache_parts, open_checkpoint

from . import fp8_checkpoints

ATTENTION = "model.layers.0.self_attn"
ROTATED: dict[str, Any] = {
    "config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*o_proj$"], "location": "input"}]}}
}


@pytest.mark.parametrize(
    ("form", "said", "named"),
    [
        ("compressed-tensors", {"version": "0.20", "global_compression_ratio": 1.5, "format": "float-quantized"}, []),
        ("compressed-tensors", {"transform_config": ROTATED},
         ["changes transform_config (transforms while the model runs: R4: hadamard at input)"]),
        ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": [
            {"targets": ["Linear"], "location": "weight_output"}]}}}}, []),
        ("compressed-tensors", {"transform_config": {}}, []),
        ("compressed-tensors", {"transform_config": [1]},
         ["changes transform_config (transforms while the model runs: transform_config at unreadable)"]),
        ("compressed-tensors", {"sparsity_config": {"format": "dense"}}, []),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}},
         ["changes sparsity_config (weights stored as sparse-24-bitmask)"]),
        ("compressed-tensors", {"config_groups": {"g": {"weights": {"observer": "mse", "actorder": "weight"}}}}, []),
        ("compressed-tensors", {"config_groups": {"g": {"weights": {"actorder": "group"}}}},
         ["changes config_groups.g.weights.actorder (columns in another order)"]),
        ("compressed-tensors", {"config_groups": {"g": {"weights": {"symmetric": False}}}},
         ["changes config_groups.g.weights.symmetric (values beside a zero point)"]),
        ("compressed-tensors", {"config_groups": {"g": {"output_activations": None, "format": "float-quantized"}}}, []),
        ("compressed-tensors", {"config_groups": {"g": {"output_activations": {"num_bits": 8}}}},
         ["inputs config_groups.g.output_activations (outputs that are rounded by {'num_bits': 8})"]),
        ("compressed-tensors", {"config_groups": {"g": {"clip": 3}, "h": []}},
         ["unknown config_groups.g.clip (in no class that was read)"]),
        ("compressed-tensors", {"rounding": "up", "empty": None, "none": []},
         ["unknown rounding (in no class that was read)"]),
        ("modelopt", {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "has_zero_point": False}, []),
        ("modelopt", {"pre_quant_scale": True}, ["changes pre_quant_scale (inputs that are scaled first: True)"]),
        ("modelopt", {"quantized_layers": {"m": {"quant_algo": "FP8", "lora_rank": 32}}},
         ["changes quantized_layers.m.lora_rank (a GEMM beside each, of rank 32)"]),
        ("fp8", {"fmt": "e4m3", "scale_fmt": "ue8m0", "ignored_layers": ["lm_head"]}, []),
        ("fp8", {"fmt": "e5m2"}, ["changes fmt (codes of e5m2)"]),
        ("fp8", {"expert_dtype": "fp4"}, ["changes expert_dtype (experts in fp4)"]),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(form: str, said: dict[str, Any], named: list[str]) -> None:
    assert [f"{remark.effect} {remark}" for remark in CODECS[form].remarks(said)] == named


@pytest.fixture
def compressed(demo_checkpoint: Path, tmp_path: Path) -> Path:
    return fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "compressed")


def declare(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def test_online_rotations_are_refused_for_what_they_are(compressed: Path) -> None:
    declare(compressed, transform_config=ROTATED)
    tensors = load_file(compressed / "model.safetensors")
    tensors[f"{ATTENTION}.o_proj.R4_input.weight"] = torch.eye(256)
    save_file(tensors, compressed / "model.safetensors")
    with pytest.raises(InputError) as caught:
        open_source(str(compressed), fingerprinted=False, recognize=recognize)
    assert str(caught.value) == (
        f"{compressed / 'config.json'}: has transform_config (transforms while the model runs: R4: hadamard at input), "
        "which fp8q does not compute; give the checkpoint it was made from, in BF16"
    )


def test_an_unknown_field_is_read_past_and_named(compressed: Path) -> None:
    declare(compressed, rounding="up")
    source = open_source(str(compressed), fingerprinted=False, recognize=recognize)
    fp8 = fp8_source(source)
    assert fp8 is not None
    assert [remark.place for remark in fp8.checkpoint.declared.remarks] == ["rounding"]


def test_a_cache_in_int8_is_refused_by_name(compressed: Path) -> None:
    declare(compressed, kv_cache_scheme={"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"})
    with pytest.raises(InputError, match=r"config\.json: the cache is INT8, and what is read is compressed-tensors"):
        open_checkpoint(compressed)


def autofp8(demo: Path, folder: Path, cache: dict[str, torch.Tensor]) -> Path:
    """The demo as AutoFP8 writes it: one scale a tensor, no blocks named, its own names of scales."""
    made = fp8_checkpoints.fine_grained(demo, folder, None)
    tensors = load_file(made / "model.safetensors")
    for name in list(tensors):
        under = name.replace("weight_scale_inv", "weight_scale").replace("activation_scale", "input_scale")
        tensors[under] = tensors.pop(name)
    save_file({name: tensor.clone() for name, tensor in (tensors | cache).items()}, made / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
        "kv_cache_scheme": "static",
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_autofp8s_files_are_read_with_their_one_scale_of_the_cache(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = autofp8(demo_checkpoint, tmp_path / "auto", {f"{ATTENTION}.kv_scale": torch.tensor(0.05)})
    source = open_source(str(folder), fingerprinted=False, recognize=recognize)
    fp8 = fp8_source(source)
    assert fp8 is not None
    assert {codes.granularity for codes in fp8.weights.values()} == {"tensor"}
    assert fp8.input_scale(f"{ATTENTION}.q_proj.weight") == pytest.approx(0.02)
    assert fp8.cache_scales == {f"{ATTENTION}.k": np.float32(0.05), f"{ATTENTION}.v": np.float32(0.05)}


def test_autofp8s_scales_of_outputs_are_those_of_the_cache(demo_checkpoint: Path, tmp_path: Path) -> None:
    scales = {
        f"{ATTENTION}.k_proj.output_scale": torch.tensor(0.05),
        f"{ATTENTION}.v_proj.output_scale": torch.tensor(1.5),
    }
    source = open_source(
        str(autofp8(demo_checkpoint, tmp_path / "auto", scales)), fingerprinted=False, recognize=recognize
    )
    fp8 = fp8_source(source)
    assert fp8 is not None
    assert fp8.cache_scales == {f"{ATTENTION}.k": np.float32(0.05), f"{ATTENTION}.v": np.float32(1.5)}


@pytest.mark.parametrize(
    ("name", "parts"),
    [("a.k_scale", "k"), ("a.v_proj.v_scale", "v"), ("a.kv_scale", "kv"), ("a.k_proj.output_scale", "k"),
     ("a.o_proj.output_scale", ""), ("a.k_proj.input_scale", ""), ("kv_scale", "kv")],
)  # fmt: skip
def test_names_of_scales_of_a_cache(name: str, parts: str) -> None:
    assert cache_parts(name) == parts


def test_a_group_size_without_a_strategy_is_groups(compressed: Path, tmp_path: Path) -> None:
    shutil.copytree(compressed, tmp_path / "groups")
    config = json.loads((tmp_path / "groups" / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": None, "group_size": 32}
    (tmp_path / "groups" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"the weights of config_groups\.group_0 are FP8 by group"):
        open_checkpoint(tmp_path / "groups")
