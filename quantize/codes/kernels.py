"""Encode an activation in one pass over it, and scale the sums of its GEMMs in another, by Triton kernels.

`encoding.encode` is a chain of torch operations, each of which reads and writes the whole tensor in FP32; two terms
double the chain. Here a value is read once, in its own type, and each term is written once: 3 bytes for each BF16 value
instead of 29, and 4 instead of some 90 with two terms.

Values are rounded by integer operations on their bits, not by the GPU's conversion: so Triton's interpreter on a CPU
tests the same arithmetic, and the interpreter's own conversions are wrong (Triton 3.9: it truncates to E4M3, and loses
BF16's subnormals). A normal number is rounded by adding half of its last kept place, less one unit if that place is
even, and truncating. A subnormal number is added to the power of two whose last place is E4M3's smallest step, so
FP32's addition rounds it. The constants of the format are parameters of the kernels, since the interpreter of Triton
3.7 does not compute with global ones.

This module imports Triton, which comes with PyTorch on NVIDIA GPUs: import it where it is used.
"""

import torch
import triton
import triton.language as tl

from .epilogue import Epilogue
from .formats import E4M3, TWO_TERMS

#: Values for each program of the kernel.
BLOCK = 1024
#: FP32's fraction bits and bias; the fraction bits that E4M3 drops; E4M3's largest number as FP32 bits.
_FRACTION = 23
_BIAS = 127
_DROPPED = _FRACTION - E4M3.mantissa_bits
_LARGEST = int(torch.tensor(E4M3.max, dtype=torch.float32).view(torch.int32))
_SMALLEST_NORMAL = (_BIAS + 1 - E4M3.bias) << _FRACTION
#: The power of two whose last place in FP32 is E4M3's smallest step.
_STEPS = float(2.0 ** (1 - E4M3.bias + _DROPPED))
#: The difference of FP32's exponent and leading fraction bits from E4M3's code of the same number.
_EXCESS = (_BIAS - E4M3.bias) << E4M3.mantissa_bits
#: What `round_e4m3` knows of the format, in the order of its parameters.
FORMAT = (_DROPPED, _LARGEST, _SMALLEST_NORMAL, _STEPS, _EXCESS)


@triton.jit
def round_e4m3(
    quotient,
    dropped: tl.constexpr,
    largest: tl.constexpr,
    smallest_normal: tl.constexpr,
    steps: tl.constexpr,
    excess: tl.constexpr,
):
    """Round FP32 quotients to E4M3: their codes, int32, and the values of these codes, FP32."""
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clipped = tl.minimum(magnitude, largest)
    normal = (clipped + ((1 << (dropped - 1)) - 1) + ((clipped >> dropped) & 1)) >> dropped
    stepped = clipped.to(tl.float32, bitcast=True) + steps
    first_step = tl.full([1], steps, tl.float32).to(tl.int32, bitcast=True)
    subnormal = stepped.to(tl.int32, bitcast=True) - first_step
    small = clipped < smallest_normal
    code = tl.where(small, subnormal, normal - excess)
    value = tl.where(small, stepped - steps, (normal << dropped).to(tl.float32, bitcast=True))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    signed = value.to(tl.int32, bitcast=True) | ((bits >> 31) << 31)  # Triton 3.7 takes -x for 0 - x, which loses -0
    return code | ((bits >> 24) & 0x80), signed.to(tl.float32, bitcast=True)


@triton.jit
def _encode(
    x_at,
    scale_at,
    codes_at,
    count,
    bf16: tl.constexpr,
    terms: tl.constexpr,
    divisor: tl.constexpr,
    block: tl.constexpr,
    dropped: tl.constexpr,
    largest: tl.constexpr,
    smallest_normal: tl.constexpr,
    steps: tl.constexpr,
    excess: tl.constexpr,
):
    """Encode `count` values in one term or two.

    BF16 values are passed as their bits, int16, which are the upper half of FP32's.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    scale = tl.load(scale_at)
    x = tl.load(x_at + at, mask=inside, other=0)
    x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if bf16 else x.to(tl.float32)
    # Two terms have a power of two as their scale, so a product with its inverse is the quotient, and faster.
    inverse = tl.div_rn(1.0, scale)
    quotient = x * inverse if terms == 2 else tl.div_rn(x, scale)
    code, value = round_e4m3(quotient, dropped, largest, smallest_normal, steps, excess)
    tl.store(codes_at + at, code.to(tl.uint8), mask=inside)
    if terms == 2:
        rest = (x - value * scale) * divisor
        second, _ = round_e4m3(rest * inverse, dropped, largest, smallest_normal, steps, excess)
        tl.store(codes_at + count + at, second.to(tl.uint8), mask=inside)


def triton_encode(x: torch.Tensor, scale: torch.Tensor, terms: int) -> torch.Tensor:
    """Encode `x` under the scalar float32 `scale` by one kernel, float8_e4m3fn [terms, *x.shape].

    The codes are those of `encoding.encode` for one of the `terms`, and of `encoding.encode_two` for two; only the sign
    of a NaN may differ. `x` of any float type is on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
    """
    bf16 = x.dtype == torch.bfloat16
    x = x.contiguous().view(torch.int16) if bf16 else x.contiguous()
    codes = torch.empty((terms, *x.shape), dtype=torch.uint8, device=x.device)
    count = x.numel()
    if count:
        _encode[((count + BLOCK - 1) // BLOCK,)](
            x, scale, codes, count, bf16, terms, float(TWO_TERMS.divisor), BLOCK,
            *FORMAT,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn)


@triton.jit
def round_bf16(number):
    """Round FP32 numbers to BF16: their bits, int16."""
    bits = number.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(nan, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def store_scaled(
    total,
    input_scale_at,
    weight_scale_at,
    bias_at,
    out_at,
    to,
    output,
    inside,
    weight_step,
    has_bias: tl.constexpr,
    bf16: tl.constexpr,
):
    """Scale the sums of an `output`, add its bias, cast once, and store them in the places `to`; `weight_step` 0: one
    weight scale.

    BF16 results are stored as their bits, int16: Triton's interpreter truncates where a GPU rounds.
    """
    factor = tl.load(input_scale_at) * tl.load(weight_scale_at + output * weight_step, mask=inside, other=0.0)
    total = total * factor
    if has_bias:
        total += tl.load(bias_at + output, mask=inside, other=0.0).to(tl.float32)
    if bf16:
        tl.store(out_at + to, round_bf16(total), mask=inside)
    else:
        tl.store(out_at + to, total.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _scale(
    sums_at,
    input_scale_at,
    weight_scale_at,
    bias_at,
    out_at,
    rows,
    outputs,
    weight_step,
    has_bias: tl.constexpr,
    bf16: tl.constexpr,
    terms: tl.constexpr,
    divisor: tl.constexpr,
    block: tl.constexpr,
):
    """Add both terms' sums of one row, and store them as `store_scaled` does."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < outputs
    total = tl.load(sums_at + row * outputs + column, mask=inside, other=0.0)
    if terms == 2:
        total += tl.load(sums_at + (rows + row) * outputs + column, mask=inside, other=0.0) * (1.0 / divisor)
    to = row * outputs + column
    store_scaled(
        total, input_scale_at, weight_scale_at, bias_at, out_at, to, column, inside, weight_step, has_bias, bf16
    )


def triton_scale(sums: torch.Tensor, epilogue: Epilogue, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Scale the `sums` of products of codes by one kernel, to `dtype` [rows, out]: what `gemm.scale_sums` computes.

    `sums` float32 [terms · rows, out] is read once, and the result is written once. A GEMM and the sum after it are
    rounded one by one (`enable_fp_fusion`), as torch's operations are.
    """
    rows = sums.shape[0] // terms
    outputs = sums.shape[1]
    out = torch.empty(rows, outputs, dtype=dtype, device=sums.device)
    bf16 = dtype == torch.bfloat16
    if out.numel():
        scales = epilogue.weight_scale
        bias = epilogue.bias
        _scale[(rows, (outputs + BLOCK - 1) // BLOCK)](
            sums.contiguous(), epilogue.input_scale, scales, sums if bias is None else bias.contiguous(),
            out.view(torch.int16) if bf16 else out, rows, outputs, int(scales.numel() > 1), bias is not None, bf16,
            terms, float(TWO_TERMS.divisor), BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return out
