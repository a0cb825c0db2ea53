"""Good FP8 checkpoints in the forms of others, made of a checkpoint in BF16 by what their writers say of them: a scale
is amax / 448, and a code the nearest of value / scale.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SINGLE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "observer": None}


def block_scales(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """amax / 448 of each block, float32 [blocks of rows, blocks of columns]."""
    return torch.stack(
        [
            torch.stack([block.abs().amax() for block in band.split(columns, 1)])
            for band in weight.float().split(rows, 0)
        ]
    ).div(448)


def codes_of(weight: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The codes of a weight under the scales of its blocks."""
    spread = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)


def rounded_again(values: torch.Tensor) -> torch.Tensor:
    """What vLLM makes of a weight for DeepGEMM: blocks under the least power of two that saturates nothing."""
    made = torch.zeros_like(values)
    for top in range(0, len(values), 128):
        for left in range(0, values.shape[1], 128):
            block = values[top : top + 128, left : left + 128]
            power = torch.exp2(torch.ceil(torch.log2(block.abs().amax().clamp_min(1e-10) / 448)))
            made[top : top + 128, left : left + 128] = (block / power).to(torch.float8_e4m3fn).float() * power
    return made


def quantized(
    source: Path, folder: Path, scaled: Callable[[torch.Tensor], Tensors], quantization_config: dict[str, Any]
) -> Path:
    """The checkpoint `source` with `scaled` in the place of the weight of each linear layer, the head excepted."""
    tensors: Tensors = {}
    for name, tensor in load_file(source / SINGLE).items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix("weight")
            tensors |= {f"{module}{last}": found.contiguous() for last, found in scaled(tensor).items()}
        else:
            tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    for companion in source.glob("*.json"):
        shutil.copy(companion, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}, indent=1))
    return folder


def fine_grained(source: Path, folder: Path, block: tuple[int, int] | None = (128, 128), powers: bool = False) -> Path:
    """As transformers' `Fp8Quantize` and `FP8Linear` have it; without a block, one scale a weight and static inputs, as
    Ministral's. `powers`: scales are rounded up to powers of two, as DeepSeek-V3.1's.
    """

    def scaled(weight: torch.Tensor) -> Tensors:
        rows, columns = block or (weight.shape[0], weight.shape[1])
        scales = block_scales(weight, rows, columns)
        if powers:
            scales = torch.exp2(torch.ceil(torch.log2(scales)))
        found = {"weight": codes_of(weight, scales, rows, columns), "weight_scale_inv": scales}
        if block is None:
            return found | {"weight_scale_inv": scales.reshape(()), "activation_scale": torch.tensor(0.02)}
        return found

    return quantized(
        source,
        folder,
        scaled,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic" if block else "static",
            "weight_block_size": list(block) if block else None,
            "modules_to_not_convert": ["lm_head"],
        },
    )


def compressed(source: Path, folder: Path, strategy: str = "tensor") -> Path:
    """As llm-compressor writes its presets FP8 (`tensor`), FP8_DYNAMIC (`channel`) and FP8_BLOCK (`block`)."""

    def scaled(weight: torch.Tensor) -> Tensors:
        rows, columns = {
            "tensor": (weight.shape[0], weight.shape[1]),
            "channel": (1, weight.shape[1]),
            "block": (128, 128),
        }[strategy]
        scales = block_scales(weight, rows, columns).bfloat16()
        found = {"weight": codes_of(weight, scales.float(), rows, columns), "weight_scale": scales}
        if strategy == "tensor":
            static = torch.tensor([0.02], dtype=torch.bfloat16)
            return found | {"weight_scale": scales.reshape(1), "input_scale": static}
        return found

    weights: dict[str, Any] = ACTIVATIONS | {"strategy": strategy, "dynamic": False, "group_size": None}
    inputs: dict[str, Any] = {
        "tensor": {"strategy": "tensor", "dynamic": False},
        "channel": {"strategy": "token", "dynamic": True},
        "block": {"strategy": "group", "dynamic": True, "group_size": 128},
    }[strategy]
    group = {
        "targets": ["Linear"],
        "weights": weights | ({"block_structure": [128, 128]} if strategy == "block" else {}),
        "input_activations": ACTIVATIONS | inputs,
        "output_activations": None,
        "format": "float-quantized",
    }
    return quantized(
        source,
        folder,
        scaled,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
            "version": "0.20.0",
        },
    )


def modelopt(
    source: Path, folder: Path, configuration: str = "FP8_DEFAULT_CFG", cache: bool = False,
    windows: "np.ndarray[Any, np.dtype[np.int64]] | None" = None,
) -> Path:  # fmt: skip
    """What ModelOpt itself quantizes and exports, on `windows` int64 [windows, context], or on random tokens."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
    from transformers import AutoModelForCausalLM

    config = getattr(mtq, configuration)
    if cache:
        config = update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokens = torch.randint(2, 2000, (2, 32), generator=torch.Generator().manual_seed(0))
    batches = [tokens] if windows is None else torch.from_numpy(windows).split(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of tensors that it copies
        mtq.quantize(model, config, lambda quantizing: [quantizing(batch) for batch in batches])
        export_hf_checkpoint(model, torch.bfloat16, export_dir=folder)
    return folder
