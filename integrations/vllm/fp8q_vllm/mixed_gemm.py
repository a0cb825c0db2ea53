"""Multiply FP8 weights by rows of 16 bits in one Triton kernel, and scale, add the bias and round in its epilogue.

    y = cast( (Σ_k fp16(x[k] / s) · fp16(ŵ[n, k])) · (s · s_w[n]) + bias[n] )

Every E4M3 code is an FP16 number. So is x / s of a BF16 x, under a scale s that is a power of two, from 2^-17 (eight
significant bits, of which the last is FP16's smallest step, 2^-24) to 65,280 (the largest number of eight significant
bits in FP16's range); and of an FP16 x from 2^-14 to 65,504. Below, the error is at most 2^-25, where that of two codes
is 2^-14; above, x / s is clipped at 65,504, where two codes clip at 476. Calibration's scale puts the largest value at
448 or less. A product has at most 15 significant bits, and sums are FP32's, in the tensor core's FP16 unit and not in
its FP8 unit, which drops bits of a sum (docs/numbers.md).

The weight is the GEMM's left side, so that its 64 or 128 rows fill the tensor core's tile, and few tokens are a narrow
right side. A decode step is bound by reading the weight; where it makes too few programs to keep the memory busy, its
inputs are split, and a second kernel adds the parts in their order, so that the same call gives the same bits.

The tiles are fixed by the shape: nothing is tuned while CUDA graphs are captured. This module imports Triton: import it
where it is used.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .codes.epilogue import Epilogue
from .codes.kernels import store_scaled
from .rows import Rows

#: FP16's largest number.
LARGEST = tl.constexpr(65504.0)
#: Programs that keep a GPU's memory busy, about two for each multiprocessor; the most parts of a sum, and their least
#: length.
PROGRAMS = 256
PARTS = 8
PART_INPUTS = 512
#: Columns for each program of the kernel that adds the parts.
BLOCK = 1024


@dataclass(frozen=True)
class Tiles:
    """A program's share of a GEMM: `tokens` by `outputs`, whose `inputs` are read at once, `stages` tiles ahead."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int


#: The tiles by the most rows that they are for; more rows take the last.
TILES = {
    16: Tiles(16, 64, 128, warps=4, stages=4),
    32: Tiles(32, 64, 128, warps=4, stages=4),
    64: Tiles(64, 128, 64, warps=8, stages=4),
    128: Tiles(128, 128, 64, warps=8, stages=3),
}


@triton.jit
def _multiply(
    x_at,
    weight_at,
    input_scale_at,
    weight_scale_at,
    bias_at,
    numbers_at,
    exact_at,
    sums_at,
    out_at,
    rows,
    outputs,
    inputs,
    part_inputs,
    weight_step,
    has_bias: tl.constexpr,
    bf16: tl.constexpr,
    chosen: tl.constexpr,
    parts: tl.constexpr,
    even: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    stages: tl.constexpr,
):
    """Multiply the rows `numbers` of x (unless `chosen`: all) by some outputs' weights, over a part of the inputs.

    BF16 values are passed as their bits, int16: Triton's interpreter loses BF16's subnormals.
    """
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    token = tl.program_id(1) * tile_tokens + tl.arange(0, tile_tokens)
    column = tl.arange(0, tile_inputs)
    part = tl.program_id(2)
    row = tl.load(numbers_at + token, mask=token < rows, other=0) if chosen else token.to(tl.int64)
    x_rows = x_at + (row * inputs)[:, None]
    weight_rows = weight_at + (output.to(tl.int64) * inputs)[:, None]
    inverse = tl.div_rn(1.0, tl.load(input_scale_at))
    total = tl.zeros([tile_outputs, tile_tokens], tl.float32)
    for first in tl.range(part * part_inputs, min((part + 1) * part_inputs, inputs), tile_inputs, num_stages=stages):
        at = (first + column)[None, :]
        token_inside = (token < rows)[:, None]
        output_inside = (output < outputs)[:, None]
        if not even:
            token_inside = token_inside & (at < inputs)
            output_inside = output_inside & (at < inputs)
        code = tl.load(weight_rows + at, mask=output_inside, other=0).to(tl.float8e4nv, bitcast=True)
        x = tl.load(x_rows + at, mask=token_inside, other=0)
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if bf16 else x.to(tl.float32)
        quotient = tl.clamp(x * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
        total = tl.dot(code.to(tl.float16), tl.trans(quotient), total)
    inside = (output < outputs)[:, None] & (token < rows)[None, :]
    if parts > 1:
        to = (part * rows + token).to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(sums_at + to, total, mask=inside)
    else:
        if chosen:
            inside = inside & (tl.load(exact_at + token, mask=token < rows, other=0) != 0)[None, :]
        store_scaled(
            total, input_scale_at, weight_scale_at, bias_at, out_at, (row * outputs)[None, :] + output[:, None],
            output[:, None], inside, weight_step, has_bias, bf16,
        )  # fmt: skip


@triton.jit
def _add_parts(
    input_scale_at,
    weight_scale_at,
    bias_at,
    numbers_at,
    exact_at,
    sums_at,
    out_at,
    rows,
    outputs,
    weight_step,
    has_bias: tl.constexpr,
    bf16: tl.constexpr,
    chosen: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
):
    """Add the parts of a row's sums in their order, and store them as `_multiply` does."""
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * block + tl.arange(0, block)
    inside = output < outputs
    row = tl.load(numbers_at + token) if chosen else token
    total = tl.load(sums_at + token * outputs + output, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        total += tl.load(sums_at + (part * rows + token) * outputs + output, mask=inside, other=0.0)
    if chosen:
        inside = inside & (tl.load(exact_at + token) != 0)
    store_scaled(
        total, input_scale_at, weight_scale_at, bias_at, out_at, row * outputs + output, output, inside, weight_step,
        has_bias, bf16,
    )  # fmt: skip


def parts_of(rows: int, outputs: int, inputs: int) -> int:
    """The number of parts that the inputs of a GEMM are split into: a power of two."""
    tiles = tiles_of(rows)
    programs = triton.cdiv(outputs, tiles.outputs) * triton.cdiv(rows, tiles.tokens)
    parts = 1
    while parts < PARTS and parts * programs < PROGRAMS and inputs >= 2 * parts * PART_INPUTS:
        parts *= 2
    return parts


def tiles_of(rows: int) -> Tiles:
    """The tiles of a GEMM of so many rows."""
    return TILES[min((most for most in TILES if rows <= most), default=max(TILES))]


def triton_mixed_gemm(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, out: torch.Tensor, rows: Rows | None
) -> torch.Tensor:
    """Multiply the exact ones of `rows` of `x` [tokens, in] (None: all) by `weight` float8_e4m3fn [out, in].

    Returns `out` [tokens, out] with their products; its other rows stay as they are. `x` is in BF16 or FP16, and `out`
    in the same type; all three have their rows without gaps. The epilogue's `input_scale` is a power of two.
    """
    count = len(x) if rows is None else len(rows.numbers)
    if not count:
        return out
    outputs, inputs = weight.shape
    tiles = tiles_of(count)
    parts = parts_of(count, outputs, inputs)
    bf16 = x.dtype == torch.bfloat16
    bits = torch.int16 if bf16 else torch.float16
    sums = torch.empty((parts, count, outputs) if parts > 1 else (1,), dtype=torch.float32, device=x.device)
    bias = sums if epilogue.bias is None else epilogue.bias
    numbers = sums if rows is None else rows.numbers
    exact = sums if rows is None else rows.exact.view(torch.uint8)
    addresses = (epilogue.input_scale, epilogue.weight_scale, bias, numbers, exact, sums, out.view(bits))
    weight_step = int(epilogue.weight_scale.numel() > 1)
    fixed = {"has_bias": epilogue.bias is not None, "bf16": bf16, "chosen": rows is not None, "parts": parts}
    tile = {"tile_tokens": tiles.tokens, "tile_outputs": tiles.outputs, "tile_inputs": tiles.inputs}
    _multiply[(triton.cdiv(outputs, tiles.outputs), triton.cdiv(count, tiles.tokens), parts)](
        x.view(bits), weight.view(torch.uint8), *addresses, count, outputs, inputs,
        triton.cdiv(inputs, parts * tiles.inputs) * tiles.inputs, weight_step, **fixed, **tile,
        even=inputs % tiles.inputs == 0, stages=tiles.stages, num_warps=tiles.warps, enable_fp_fusion=False,
    )  # fmt: skip
    if parts > 1:
        _add_parts[(count, triton.cdiv(outputs, BLOCK))](
            *addresses, count, outputs, weight_step, **fixed, block=BLOCK, enable_fp_fusion=False
        )
    return out
