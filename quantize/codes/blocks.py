"""Scales of blocks: 128 × 128 of a weight, and 128 values of a token for its input (DeepSeek-V3, section 3.3.2).

A block at the end of a side that is no multiple of 128 is smaller. A group's scale is its amax / 448 in FP32, of an
amax of at least 1e-10: what vLLM and SGLang compute (`per_token_group_quant_fp8`). Where they multiply by DeepGEMM both
scales are powers of two (UE8M0): that of a group is rounded up, and a weight whose scales are none is rounded again.
"""

import torch

from .encoding import code_values, scales_of
from .formats import E4M3

#: Rows and columns of a block, and values of a group.
SIDE = 128
#: The smallest amax of a group.
LEAST_AMAX = 1e-10


def spread_scales(scale: torch.Tensor, rows: slice, columns: int) -> torch.Tensor:
    """The scales of some `rows` of a weight with so many `columns`, float32 [rows, columns]; `scale` float32 [blocks of
    rows, blocks of columns].
    """
    of_rows = torch.arange(rows.start, rows.stop, device=scale.device) // SIDE
    return scale[of_rows].repeat_interleave(SIDE, 1)[:, :columns]


def block_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Code × scale of `codes` float8_e4m3fn [out, in] under `scale` float32 [blocks, blocks], float32 [out, in]."""
    values = codes.float()
    for start in range(0, len(codes), SIDE):
        rows = slice(start, min(start + SIDE, len(codes)))
        values[rows] *= spread_scales(scale, rows, codes.shape[1])
    return values


def group_values(x: torch.Tensor, powers: bool) -> torch.Tensor:
    """Quantize and dequantize `x` [..., width] under a scale for each 128 values, float32 of its shape; `powers`: the
    scales are rounded up to powers of two.
    """
    width = x.shape[-1]
    groups = torch.nn.functional.pad(x.float(), (0, -width % SIDE)).unflatten(-1, (-1, SIDE))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(LEAST_AMAX)
    scales = scales_of(amax, E4M3, "power-of-two") if powers else amax.div_(E4M3.max)
    values: torch.Tensor = code_values(groups, scales).mul_(scales)
    return values.flatten(-2)[..., :width]


def weight_blocks(weight: torch.Tensor) -> torch.Tensor:
    """The blocks of `weight` [out, in] as rows [blocks, 128 · 128], those at the end of a side filled with zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % SIDE, 0, -rows % SIDE))
    height, width = (size // SIDE for size in padded.shape)
    return padded.view(height, SIDE, width, SIDE).transpose(1, 2).reshape(-1, SIDE * SIDE)
