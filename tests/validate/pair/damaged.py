"""FP8 checkpoints made by hand of an original, sound and damaged: each damage is one that published files have had.

Codes are written by torch's own cast: weights with a scale a row, inputs dynamic per token, or static with a cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 448.0
Tensors = dict[str, Tensor]
#: Change tensors, and the directory that they are written to.
Damage = Callable[[Tensors, Path], object]
#: A weight in the middle of a model.
UP = "model.layers.1.mlp.up_proj"


def config(cache: bool = False) -> dict[str, object]:
    """The quantization_config of these checkpoints."""
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": eight | {"strategy": "tensor", "dynamic": False} if cache else None,
    }


def quantized(original: Path, out: Path, damage: Damage = lambda tensors, path: None, cache: bool = False) -> Path:
    """Write the checkpoint `original` to `out` in FP8, damaged."""
    shutil.copytree(original, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors: Tensors = {}
    for file in sorted(original.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if value.dim() == 2 and "proj" in name:
                scale = value.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / LARGEST
                tensors[name] = (value.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale"] = scale.to(torch.bfloat16).float()
            else:
                tensors[name] = value
            if cache and name.endswith("k_proj.weight"):
                attention = name.removesuffix("k_proj.weight")
                tensors |= {f"{attention}{part}_scale": torch.tensor([0.02]) for part in "kv"}
    fields = json.loads((out / "config.json").read_text(encoding="utf-8"))
    fields["quantization_config"] = config(cache)
    (out / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    damage(tensors, out)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, out / "model.safetensors", {"format": "pt"}
    )
    return out


def by_tensor(tensors: Tensors, shape: tuple[int, ...]) -> None:
    """Give each weight in codes one scale, and its input one, of this `shape`."""
    for name in [name for name in tensors if f"{name}_scale" in tensors]:
        values = tensors[name].float() * tensors[f"{name}_scale"]
        scale = values.abs().amax() / LARGEST
        tensors[name] = (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.reshape(shape)
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.full(shape, 0.05)


def as_static(tensors: Tensors, path: Path) -> None:
    """Declare static scales, one a tensor, as compressed-tensors does."""
    by_tensor(tensors, (1,))

    def declare(fields: dict[str, Any]) -> None:
        group = fields["quantization_config"]["config_groups"]["group_0"]
        for part in ("weights", "input_activations"):
            group[part] |= {"strategy": "tensor", "dynamic": False}

    edit_json(path / "config.json", declare)


def as_modelopt(tensors: Tensors, path: Path) -> None:
    """Declare the same as NVIDIA ModelOpt does, which transformers does not know."""
    by_tensor(tensors, ())
    cached = [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]
    for name in cached:
        attention, _, scale = name.rpartition(".")
        tensors[f"{attention}.{scale[0]}_proj.{scale}"] = tensors.pop(name).reshape(())
    declare_modelopt(path, "FP8", "FP8" if cached else None)


def as_modelopt_blocks(tensors: Tensors, path: Path) -> None:
    """Declare a scale for each block of 128 x 128, and inputs in BF16, as ModelOpt does."""
    for name in [name for name in tensors if f"{name}_scale" in tensors]:
        values = tensors[name].float() * tensors[f"{name}_scale"]
        rows, columns = values.shape
        padded = torch.nn.functional.pad(values, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / LARGEST
        codes = (blocks / scale).clamp(-LARGEST, LARGEST).flatten(2).flatten(0, 1)
        tensors[name] = codes[:rows, :columns].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    declare_modelopt(path, "FP8_PB_WO", None)


def as_modelopt_that_contradicts(tensors: Tensors, path: Path) -> None:
    """Declare one thing in config.json, and another in ModelOpt's own file."""
    as_modelopt(tensors, path)
    said = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]}
    edit_json(path / "config.json", lambda fields: fields.update(quantization_config=said))


def declare_modelopt(path: Path, algorithm: str, cache: str | None) -> None:
    """Write hf_quant_config.json, and nothing into config.json."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head"]}
    (path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}), "utf-8"
    )
    edit_json(path / "config.json", lambda fields: fields.pop("quantization_config"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    change(fields)
    path.write_text(json.dumps(fields), encoding="utf-8")


def scale_times_8(tensors: Tensors, path: Path) -> None:
    """One weight's scale is eight times too large."""
    tensors[f"{UP}.weight_scale"] *= 8


def weight_of_another_layer(tensors: Tensors, path: Path) -> None:
    """One module has the weight and the scale of the layer before."""
    for part in ("weight", "weight_scale"):
        tensors[f"{UP}.{part}"] = tensors[f"{UP.replace('.1.', '.0.')}.{part}"].clone()


def zero_weight(tensors: Tensors, path: Path) -> None:
    """One weight is zero."""
    tensors[f"{UP}.weight"] = torch.zeros_like(tensors[f"{UP}.weight"].float()).to(torch.float8_e4m3fn)


def norm_of_the_other_sign(tensors: Tensors, path: Path) -> None:
    """The last norm has the other sign, so that the likeliest tokens become the least likely."""
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]


def nan_code(tensors: Tensors, path: Path) -> None:
    """One code is NaN."""
    codes = tensors[f"{UP}.weight"].view(torch.uint8).clone()
    codes[0, 0] = 0x7F
    tensors[f"{UP}.weight"] = codes.view(torch.float8_e4m3fn)


def renamed(tensors: Tensors, path: Path) -> None:
    """One weight lies under a name that no module has."""
    for part in ("weight", "weight_scale"):
        tensors[f"{UP.replace('up_proj', 'w3')}.{part}"] = tensors.pop(f"{UP}.{part}")


def another_seed(tensors: Tensors, path: Path) -> None:
    """All weights are of another training run: here random numbers of the same size."""
    torch.manual_seed(1)
    for name in tensors:
        if name.endswith("proj.weight"):
            tensors[name] = (torch.randn(tensors[name].shape) * 100).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def disguised(tensors: Tensors, path: Path) -> None:
    """config.json says FP8, and the weights are BF16."""
    for name in [name for name in tensors if f"{name}_scale" in tensors]:
        tensors[name] = (tensors[name].float() * tensors.pop(f"{name}_scale")).to(torch.bfloat16)


def cache_scales_of_one(tensors: Tensors, path: Path) -> None:
    """Every scale of the cache is 1.0, the value of one that was never set."""
    for name in tensors:
        if name.endswith((".k_scale", ".v_scale")):
            tensors[name] = torch.ones(1)


def other_beginning(tensors: Tensors, path: Path) -> None:
    """The tokenizer puts the first token of its vocabulary in front of a text, which the original's does not."""

    def change(fields: dict[str, Any]) -> None:
        token = min(fields["model"]["vocab"], key=fields["model"]["vocab"].get)
        first = {"SpecialToken": {"id": token, "type_id": 0}}
        fields["post_processor"]["single"].insert(0, first)
        fields["post_processor"]["special_tokens"] = {token: {"id": token, "ids": [0], "tokens": [token]}}

    edit_json(path / "tokenizer.json", change)


def other_template(tensors: Tensors, path: Path) -> None:
    """The chat template is that of another model."""
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")


def endless(tensors: Tensors, path: Path) -> None:
    """generation_config.json names another token as the end of a text."""
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")


def as_integers(tensors: Tensors, path: Path, bits: int) -> None:
    """Write weights in INT8 with inputs dynamic per token (W8A8), or packed in INT4 by groups of 64 (W4A16)."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    largest = 2 ** (bits - 1) - 1
    for name in [name for name in tensors if f"{name}_scale" in tensors]:
        values = tensors.pop(name).float() * tensors[f"{name}_scale"]
        groups = values.reshape(len(values), -1, 64) if bits == 4 else values[:, None]
        scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12).div(largest).to(torch.bfloat16)
        codes = (groups / scales.float()).round().clamp(-largest, largest).to(torch.int8).reshape(values.shape)
        tensors[f"{name}_scale"] = scales[..., 0]
        if bits == 4:
            tensors |= {f"{name}_packed": pack_to_int32(codes, 4), f"{name}_shape": torch.tensor(values.shape)}
        else:
            tensors[name] = codes

    def change(fields: dict[str, Any]) -> None:
        said = fields["quantization_config"]
        whole = {"num_bits": bits, "type": "int", "symmetric": True}
        grouped = {"strategy": "group", "group_size": 64} if bits == 4 else {"strategy": "channel"}
        inputs = None if bits == 4 else whole | {"strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": whole | grouped | {"dynamic": False}, "input_activations": inputs}
        said |= {"format": "pack-quantized" if bits == 4 else "int-quantized", "config_groups": {"group_0": group}}

    edit_json(path / "config.json", change)
