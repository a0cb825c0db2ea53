"""Round a block of inputs by GPTQ, or change its codes by descent, in one Triton kernel that holds it in registers.

Within a block of 128 inputs each rounding depends on the one before, so torch's operations would start some 20 kernels
for each input, of a few thousand values each: 5 · 10⁷ for an 8B, which take minutes to start. Here one program holds
the block's weights (or gradients) of 32 output channels, goes through the inputs one by one, and tells the rest of the
block after each. Around it one GEMM tells the rest of the matrix.

Values are rounded by `quantize.codes.kernels.round_e4m3`, whose integer operations the interpreter runs as a GPU does.
A row is taken out of the registers by a sum of bits, so that a zero keeps its sign.

This module imports Triton: import it where it is used.
"""

import torch
import triton
import triton.language as tl

from ..codes.kernels import FORMAT, round_e4m3

#: Output channels of one program, and its warps: 128 x 32 values stay in registers. Of two warps sm_120 spills some.
CHANNELS = 32
WARPS = 4


@triton.jit
def _nearest(
    quotient,
    dropped: tl.constexpr,
    largest: tl.constexpr,
    smallest_normal: tl.constexpr,
    steps: tl.constexpr,
    excess: tl.constexpr,
):
    """Round to the values of E4M3 codes, FP32; NaN stays NaN."""
    _, value = round_e4m3(quotient, dropped, largest, smallest_normal, steps, excess)
    return tl.where(quotient != quotient, quotient, value)


@triton.jit
def _row(numbers, rows, j):
    """Take row `j` out of the `numbers` of a block."""
    bits = tl.where(rows == j, numbers.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _round_block(
    left_at,
    values_at,
    factor_at,
    shares_at,
    inputs,
    outputs,
    factor_row,
    block: tl.constexpr,
    channels: tl.constexpr,
    dropped: tl.constexpr,
    largest: tl.constexpr,
    smallest_normal: tl.constexpr,
    steps: tl.constexpr,
    excess: tl.constexpr,
):
    """Round the weights of a block for some channels; errors over the factor's diagonal take their place."""
    row = tl.arange(0, block)
    rows = row[:, None]
    channel = tl.program_id(0) * channels + tl.arange(0, channels)
    inside = channel < outputs
    at = rows.to(tl.int64) * outputs + channel[None, :]
    left = tl.load(left_at + at, mask=(rows < inputs) & inside[None, :], other=0.0)
    for j in range(inputs):
        wanted = _row(left, rows, j)
        value = _nearest(wanted, dropped, largest, smallest_normal, steps, excess)
        lost = wanted - value
        line = tl.cast(j, tl.int64) * outputs
        tl.store(values_at + line + channel, value, mask=inside)
        diagonal = tl.load(factor_at + j * factor_row + j)
        tl.store(left_at + line + channel, tl.div_rn(lost, diagonal), mask=inside)
        factor = tl.load(factor_at + j * factor_row + row, mask=(row > j) & (row < inputs), other=0.0)
        left += (factor * tl.load(shares_at + j))[:, None] * lost[None, :]


def triton_round(left: torch.Tensor, values: torch.Tensor, factor: torch.Tensor, shares: torch.Tensor) -> None:
    """Round the inputs of a block, as `gptq.round_block` does by torch's operations.

    `left`, `values` float32 [block, out] in rows without gaps; `factor` float32 [block, block] in rows; `shares`
    float32 [block].
    """
    inputs, outputs = left.shape
    _round_block[(triton.cdiv(outputs, CHANNELS),)](
        left, values, factor, shares, inputs, outputs, factor.stride(0), triton.next_power_of_2(inputs), CHANNELS,
        *FORMAT, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _descend_block(
    values_at,
    gradient_at,
    moved_at,
    moments_at,
    steps_at,
    inputs,
    outputs,
    moments_row,
    block: tl.constexpr,
    channels: tl.constexpr,
    dropped: tl.constexpr,
    largest: tl.constexpr,
    smallest_normal: tl.constexpr,
    steps: tl.constexpr,
    excess: tl.constexpr,
):
    """Change the codes of a block for some channels, and write how far each moved."""
    row = tl.arange(0, block)
    rows = row[:, None]
    channel = tl.program_id(0) * channels + tl.arange(0, channels)
    inside = channel < outputs
    at = rows.to(tl.int64) * outputs + channel[None, :]
    gradient = tl.load(gradient_at + at, mask=(rows < inputs) & inside[None, :], other=0.0)
    for j in range(inputs):
        slope = _row(gradient, rows, j)
        line = tl.cast(j, tl.int64) * outputs
        old = tl.load(values_at + line + channel, mask=inside, other=0.0)
        wanted = tl.fma(slope, tl.load(steps_at + j), old)
        new = _nearest(wanted, dropped, largest, smallest_normal, steps, excess)
        moved = new - old
        tl.store(values_at + line + channel, new, mask=inside)
        tl.store(moved_at + line + channel, moved, mask=inside)
        column = tl.load(moments_at + j * moments_row + row, mask=row < inputs, other=0.0)
        gradient -= column[:, None] * moved[None, :]


def triton_descend(
    values: torch.Tensor, gradient: torch.Tensor, moments: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Change the `values` of a block, and return the change of each weight, float32 [block, out].

    As `gptq.descend_block` does by torch's operations, but `gradient` stays as it is. `values`, `gradient` float32
    [block, out] in rows without gaps; `moments` float32 [block, block], symmetric, in rows; `steps` float32 [block].
    """
    inputs, outputs = values.shape
    moved = torch.empty_like(values)
    _descend_block[(triton.cdiv(outputs, CHANNELS),)](
        values, gradient, moved, moments, steps, inputs, outputs, moments.stride(0), triton.next_power_of_2(inputs),
        CHANNELS, *FORMAT, num_warps=WARPS,
    )  # fmt: skip
    return moved
