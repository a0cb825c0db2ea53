"""`fp8q lint CKPT` as its users meet it: exit codes, JSON, forms that are not read, the base install."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8q.quantize.reading.quantization_config import READ

from .conftest import Damaged

Fp8q = Callable[..., Any]
MODULE = "model.layers.1.mlp.down_proj"
ORIGINAL = "give the checkpoint it was made from, in BF16"


def test_an_error_is_exit_3_and_names_the_tensor(fp8q: Fp8q, damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    it.tensors[it.scale(MODULE)].fill_(0)
    it.save()
    result = fp8q("lint", it.folder)
    told = (
        f"C111 checkpoint-scale-value: {MODULE}.weight_scale_inv: holds 0 (12 of 12 are not positive and finite); "
        "leave the module in BF16, or export the checkpoint again"
    )
    what = f"{it.folder}: an FP8 checkpoint in the form fp8, 28 weights in codes, one scale a block"
    assert (result.code, result.out) == (3, f"{what}\nerror   {told}\n")
    assert result.err == f"fp8q: {it.folder}: {told}\n"
    shown = json.loads(fp8q("lint", it.folder, "--json").out)["findings"]
    assert [(entry["file"], entry["rule"], entry["module"]) for entry in shown] == [(str(it.folder), "C111", MODULE)]


def test_a_warning_alone_is_exit_0(fp8q: Fp8q, damaged: Callable[[str], Damaged]) -> None:
    it = damaged("compressed-tensors")
    it.tensors[f"{MODULE.replace('down', 'up')}.input_scale"].mul_(2)
    it.save()
    result = fp8q("lint", it.folder)
    assert (result.code, result.err) == (0, "")
    assert "warning C117 shared-input-scale: " in result.out


def test_a_checkpoint_without_any_scale_names_the_first_tensor(fp8q: Fp8q, damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    it.tensors = {name: tensor for name, tensor in it.tensors.items() if not name.endswith("_inv")}
    it.save()
    result = fp8q("lint", it.folder)
    first = "C104 scale-there: model.layers.0.mlp.down_proj.weight: has no weight_scale_inv"
    remedy = "export the checkpoint again, and take no 1.0 for it"
    assert (result.code, result.err) == (3, f"fp8q: {it.folder}: 28 errors, first {first}; {remedy}\n")


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}}


MXFP4 = "load it with transformers' Mxfp4Config(dequantize=True), save it with save_pretrained and give that"
PACKED = "quant_method is 'compressed-tensors' with the format 'pack-quantized' (INT4 or INT8)"
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}
ENDLESS = ("(a+)+$", "(.?|.?)?" * 24, ".*" * 8)
PATTERN = "has the pattern {!r}, which is not read (it repeats too much to be tried); name the modules plainly"
BLOCK = "weight_block_size is [0, 128], and should be two sizes such as [128, 128]; set those of the blocks"


@pytest.mark.parametrize(
    ("said", "found", "way_round"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq' (INT4 or INT8)", ORIGINAL),
        ({"quant_method": "quark"}, "quant_method is 'quark'", ORIGINAL),
        ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4' (MXFP4)", MXFP4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
         "quant_method is 'modelopt' with quant_algo 'NVFP4' (NVFP4)", ORIGINAL),
        (COMPRESSED | {"format": "pack-quantized"}, PACKED, ORIGINAL),
        (COMPRESSED | {"format": "mixed-precision"}, "the weights of config_groups.g are INT4", ORIGINAL),
        ({"format": "fp8q", "reason": "Conv1D"}, "quant_method is '' (fp8q's own form, of Conv1D or INT8)", ORIGINAL),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, BLOCK, None),
        *(({"quant_method": "fp8", "modules_to_not_convert": [each]}, PATTERN.format(each[:80]), None)
          for each in ENDLESS),
    ],
)  # fmt: skip
def test_a_form_that_is_not_read_is_named_with_what_is(
    said: dict[str, Any], found: str, way_round: str | None, fp8q: Fp8q, damaged: Callable[[str], Damaged]
) -> None:
    it = damaged("fp8")
    it.config["quantization_config"] = said
    it.save()
    told = f"{found}, and what is read is {READ}; {way_round}" if way_round else found
    assert fp8q("lint", it.folder).complaint() == f"{it.folder / 'config.json'}: {told}"


def test_a_checkpoint_in_bf16_is_exit_2(fp8q: Fp8q, demo_checkpoint: Path) -> None:
    assert fp8q("lint", demo_checkpoint).complaint() == (
        f"{demo_checkpoint}: is a checkpoint that says nothing of quantization: config.json has no "
        "quantization_config; name one in FP8, an ONNX file, a Triton repository or a run"
    )


def test_a_file_of_the_index_that_is_missing_is_found(fp8q: Fp8q, damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    it.save()
    index = {"metadata": {}, "weight_map": dict.fromkeys(it.tensors, "model-00001-of-00002.safetensors")}
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (it.folder / "model.safetensors").rename(it.folder / "model-00001-of-00002.safetensors")
    (it.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = fp8q("lint", it.folder)
    assert result.code == 3
    assert (
        "error   C101 checkpoint-files: model-00002-of-00002.safetensors: there is no such file; copy or" in result.out
    )


def test_a_stack_of_experts_in_one_tensor_has_a_scale_for_each(fp8q: Fp8q, damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    stack = "model.layers.1.mlp.experts.down_proj"
    it.tensors[stack] = torch.stack([it.tensors[f"{MODULE}.weight"].view(torch.uint8)] * 3).view(torch.float8_e4m3fn)
    it.tensors[f"{stack}_scale_inv"] = torch.stack([it.tensors[it.scale(MODULE)]] * 3)
    it.save()
    assert fp8q("lint", it.folder).out.endswith("29 weights in codes, one scale a block\nno findings\n")
    del it.tensors[f"{stack}_scale_inv"]
    it.save()
    assert f"C104 scale-there: {stack}: has no weight_scale_inv" in fp8q("lint", it.folder).out


def test_a_checkpoint_is_linted_with_the_base_install(
    base_install: Callable[..., subprocess.CompletedProcess[str]], goods: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(goods["modelopt"], tmp_path / "checkpoint"))
    shown = base_install("lint", folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.endswith("no findings\n")
