"""Encode numbers: divide by a scale in FP32, clip, and round once to nearest even, to one or two codes for each value.

The checkpoint's writer, the rounding of weights, the reference and the graph's operators all call these functions. On a
GPU, where Triton's kernels start, one kernel encodes an activation (`kernels`).
"""

from collections.abc import Callable
from typing import Literal

import torch

from .formats import E4M3, TWO_TERMS, Grid

CODE = torch.float8_e4m3fn
#: `calibrate.model.launching.launched`: takes the device, the kernel's work, and the same by torch's operations.
Launch = Callable[[torch.device, Callable[[], torch.Tensor], Callable[[], torch.Tensor]], torch.Tensor]
#: The exponent's bits of an FP32 number, and those of E4M3's smallest normal one, 2^(1 - bias).
_EXPONENT = 0x7F800000
_SMALLEST_NORMAL = (127 + 1 - E4M3.bias) << 23
#: Values of which a CPU makes codes and converts them sooner than it starts four more operators.
FEW = 4096
#: Added to the bits of a power of two, this multiplies it by 1.5 · 2^(23 - mantissa bits).
_STEPS = ((23 - E4M3.mantissa_bits) << 23) + (1 << 22)


def scales_of(amax: torch.Tensor, format: Grid, grid: Literal["bf16", "power-of-two"] = "bf16") -> torch.Tensor:
    """The scales on `grid` of `amax` float32, of its shape and on its device: what `clip.scale_of` gives."""
    largest = torch.full((), format.clip, device=amax.device)  # a GPU multiplies by the inverse of a number of Python's
    bits = (amax / largest).view(torch.int32)
    step = 0x10000 if grid == "bf16" else 0x800000
    return ((bits + (step - 1)) & -step).view(torch.float32)


def encode(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 codes of x / scale, float8_e4m3fn of x's shape; NaN stays NaN.

    `x` of any float type, `scale` float32 broadcastable to it. torch's own cast has differed between versions on
    overflow, so the quotient is clipped before it.
    """
    return round_quotients(x.float() / scale)


def round_quotients(quotients: torch.Tensor) -> torch.Tensor:
    """Round float32 `quotients` to E4M3 codes, float8_e4m3fn of their shape; they are clipped in place."""
    return quotients.clamp_(-E4M3.max, E4M3.max).to(CODE)


def code_values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of the codes of `encode`, float32 of x's shape, computed in FP32 without making the codes.

    On a CPU this takes two fifths of the time of `encode(x, scale).float()`, whose conversion from codes has no vector
    instruction.
    """
    quotient = x.float() / scale
    return nearest_values(quotient).copysign_(quotient)  # zeros have the sign that their codes have


def nearest_values(quotient: torch.Tensor) -> torch.Tensor:
    """The E4M3 values nearest to `quotient`, float32 of its shape; zeros have any sign.

    Adding and subtracting 1.5 · 2^23 steps of the grid leaves whole steps, since FP32 rounds the sum to nearest even.
    Where there are few values, making the codes takes fewer operators, and half of the time.
    """
    clipped = quotient.clamp(-E4M3.max, E4M3.max)
    if clipped.numel() <= FEW:
        return clipped.to(CODE).float()
    binade = (clipped.view(torch.int32) & _EXPONENT).clamp_min_(_SMALLEST_NORMAL)
    steps = binade.add_(_STEPS).view(torch.float32)
    return clipped.add_(steps).sub_(steps)


def encode_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """INT8 codes of x / scale, int8 of x's shape, as ONNX's QuantizeLinear with zero point 0 gives them."""
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


#: The smallest scale of a token, vLLM's: 512 times smaller than that of an amax of 1.
SMALLEST_TOKEN_SCALE = 1 / (E4M3.max * 512)


def token_scales(x: torch.Tensor) -> torch.Tensor:
    """The scale of each token of `x` [..., width] in dynamic form: its amax / 448 in FP32, float32 [..., 1].

    This is what vLLM computes (csrc/quantization/w8a8/fp8/common.cu, `dynamic_per_token_scaled_fp8_quant_kernel`), with
    its smallest scale. compressed-tensors computes the quotient in the type of `x`: in FP32 it is this one, in BF16 it
    is rounded to nearest, so that the largest value of a token may saturate (docs/decisions/0066).
    """
    amax = x.abs().amax(-1, keepdim=True).float()
    return amax.div_(E4M3.max).clamp_min_(SMALLEST_TOKEN_SCALE)


#: Kind of form -> the function of its scales of run time: of a tensor [..., width], float32 that broadcasts to it.
RUN_TIME_SCALES = {
    "dynamic": token_scales,
}
#: Name of a format -> its encoding function.
ENCODERS = {"e4m3": encode, "int8": encode_int8}


def encode_two(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two codes a and b of x / scale, float8_e4m3fn of x's shape each: a as in `encode`, b of a's rounding error.

    `scale` float32, a power of two, so that the error of a is exact in FP32 for every BF16 `x`.
    """
    first = encode(x, scale)
    return first, encode((x.float() - first.float() * scale) * TWO_TERMS.divisor, scale)


def encode_terms(x: torch.Tensor, scale: torch.Tensor, terms: int, launch: Launch) -> torch.Tensor:
    """The codes of `encode` or `encode_two`, float8_e4m3fn [terms, *x.shape]; by a kernel where `launch` starts it."""

    def kernel() -> torch.Tensor:
        from . import kernels

        return kernels.triton_encode(x, scale, terms)

    return launch(x.device, kernel, lambda: torch.stack(encode_two(x, scale) if terms == 2 else (encode(x, scale),)))


def two_code_values(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the two codes that `encode_two` gives, float32 of x's shape each."""
    first = code_values(x, scale)
    return first, code_values((x.float() - first * scale).mul_(TWO_TERMS.divisor), scale)


def code_tables(scale: torch.Tensor, terms: int) -> torch.Tensor:
    """The codes of all 65,536 BF16 bit patterns under a scalar float32 `scale`, as BF16 numbers [terms, 65536].

    A BF16 activation has no other values, so looking codes up is exact, and on a CPU six times as fast as computing
    them.
    """
    patterns = torch.arange(1 << 16, device=scale.device, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    codes = encode_two(patterns, scale) if terms == 2 else (encode(patterns, scale),)
    return torch.stack([term.to(torch.bfloat16) for term in codes])
