"""Add products of codes as Hopper's tensor core does: with 14 significant bits where FP32 has 24.

One FP8 instruction (`wgmma`) adds 32 products to the accumulator like this:

    e   = the largest exponent among the products that are not zero and the accumulator; a product's is e_x + e_w, as
          the codes have them (-6 for subnormals), whether or not its significand, in [1, 4), reaches 2
    sum = Σ trunc(product / 2^(e - 13)) + trunc(accumulator / 2^(e - 13))          trunc: toward zero
    accumulator = sum · 2^(e - 13), cut to 13 bits behind its leading one

`fp22` (a sign, 8 bits of exponent, 13 of fraction) keeps this accumulator for the whole row. `two-level` starts a new
one every 128 products and adds the partial sums in FP32, rounded to nearest: "promotion", which DeepGEMM and CUTLASS do
on the CUDA cores, and cuBLAS unless `torch._scaled_mm` is given `use_fast_accum`. `fp32` is the sum of the reference,
`FP8Linear`.

Measured by others: the 14 bits and the truncation (DeepSeek-V3's report, arXiv 2412.19437, sections 3.3.2 and 3.5.2;
DeepGEMM issues 37 and 50; the operand that comes back without its last ten bits, SageAttention 2, in SageAttention
issue 287); the formula above, bit for bit against GPUs, in MMA-Sim (arXiv 2511.10909) and in "Accurate Models of NVIDIA
Tensor Cores" (Khattak and Mikaitis, arXiv 2512.07004); the promotion every 128 in mmaemu, which replays calls of
`torch._scaled_mm` on an H100. Assumed: that a kernel adds along K in order and does not split it, which cuBLAS does for
some shapes and which only shortens the chains; that TensorRT's kernels are either `fp22` or `two-level`. Ada has the
same adder for 16 products at a time (`Adder(block=16)`); Blackwell keeps 25 bits of fraction (DeepGEMM issue 176) and
is not modelled, nor is the product of queries and keys, whose sums are as short as a head.

A product has 8 significant bits, and a sum of 33 terms below 2^15 units each has 21, so FP32 holds every step exactly.
"""

import time
from dataclasses import dataclass
from itertools import product

import torch

from ...options import Accumulator

#: Fraction bits of FP32 and of the tensor core's accumulator, and the bias of FP32's exponent.
FP32_BITS = 23
ACCUMULATOR_BITS = 13
BIAS = 127
LEAST_EXPONENT = -6
#: The exponent of a zero code, which is never the largest, even doubled, in int8; and the least exponent of a sum.
NO_EXPONENT = -60
OF_NOTHING = -64
#: Rows and outputs that are added at a time, so that 32 products of each fit into the processor's cache.
TILE = (64, 256)


@dataclass(frozen=True)
class Adder:
    """A tensor core's adder: products in one instruction, and products between promotions to FP32 (None: never)."""

    block: int = 32
    promotion: int | None = None


ADDERS = {"fp22": Adder(), "two-level": Adder(promotion=128)}


def accumulated_gemm(x: torch.Tensor, weight: torch.Tensor, accumulator: Accumulator) -> torch.Tensor:
    """Multiply codes `x` [..., in] by `weight` [out, in], both of any float type; sum them in `accumulator`, float32
    [..., out].
    """
    if accumulator == "fp32":
        return torch.nn.functional.linear(x.float(), weight.float())
    return add_in(x.flatten(0, -2), weight, ADDERS[accumulator]).view(*x.shape[:-1], len(weight))


def add_in(x: torch.Tensor, weight: torch.Tensor, adder: Adder) -> torch.Tensor:
    """Multiply codes `x` [rows, in] by `weight` [out, in] and sum them with `adder`, float32 [rows, out].

    Rows are padded with zeros to whole blocks, which changes no sum.
    """
    filling = (0, -x.shape[1] % adder.block)
    x, weight = (torch.nn.functional.pad(codes.float(), filling) for codes in (x, weight))
    total = torch.empty(len(x), len(weight), device=x.device)
    for row, out in product(range(0, len(x), TILE[0]), range(0, len(weight), TILE[1])):
        rows = slice(row, row + TILE[0])
        outs = slice(out, out + TILE[1])
        used = _used(x[rows], adder)
        total[rows, outs] = _tile(x[rows, :used].t().contiguous(), weight[outs, :used].t().contiguous(), adder)
    return total


def _used(x: torch.Tensor, adder: Adder) -> int:
    """The length, in whole blocks, of `x` [rows, in] without the zeros at its end, which change no sum: of the tokens
    that come later, whose probabilities are half of all.
    """
    last = x.any(0).nonzero()
    if not len(last):
        return 0
    return -(-(int(last[-1]) + 1) // adder.block) * adder.block


def _tile(x: torch.Tensor, weight: torch.Tensor, adder: Adder) -> torch.Tensor:
    """Add the products of `x` [in, rows] and `weight` [in, out], float32 [rows, out].

    The axis of the sum is first, so that every step is one operation over [block, rows, out].
    """
    exponents = _exponents(x), _exponents(weight)
    size = (x.shape[1], weight.shape[1])
    total = torch.zeros(size, device=x.device)
    sum_ = torch.zeros(size, device=x.device)
    products = torch.empty(adder.block, *size, device=x.device)
    product_exponents = torch.empty(adder.block, *size, device=x.device, dtype=torch.int8)
    for start in range(0, len(x), adder.block):
        block = slice(start, start + adder.block)
        torch.mul(x[block, :, None], weight[block, None, :], out=products)
        torch.add(exponents[0][block, :, None], exponents[1][block, None, :], out=product_exponents)
        sum_ = _instruction(products, product_exponents.amax(0), sum_)
        if adder.promotion and (start + adder.block) % adder.promotion == 0:
            total = total + sum_
            sum_ = torch.zeros_like(sum_)
    return total + sum_


def _instruction(products: torch.Tensor, largest: torch.Tensor, sum_: torch.Tensor) -> torch.Tensor:
    """Compute one instruction: add `products` [block, rows, out], which are overwritten, to `sum_` [rows, out].

    `largest` int8 [rows, out]: the largest exponent of the products.
    """
    sum_exponent = (sum_.view(torch.int32) >> FP32_BITS & 0xFF) - BIAS  # of zero: -127
    exponent = torch.maximum(largest.int(), sum_exponent).clamp_min(OF_NOTHING)
    unit = _power_of_two(exponent - ACCUMULATOR_BITS)
    inverse_unit = _power_of_two(ACCUMULATOR_BITS - exponent)
    aligned = products.mul_(inverse_unit).trunc_().sum(0) + (sum_ * inverse_unit).trunc_()
    bits = (aligned * unit).view(torch.int32) & -(1 << FP32_BITS - ACCUMULATOR_BITS)
    return bits.view(torch.float32) + 0.0  # which makes +0 of -0


def _exponents(codes: torch.Tensor) -> torch.Tensor:
    """The exponents of E4M3 codes, int8 of their shape; `NO_EXPONENT` for zero."""
    exponents = (torch.frexp(codes)[1] - 1).clamp_min_(LEAST_EXPONENT)
    return exponents.masked_fill_(codes == 0, NO_EXPONENT).to(torch.int8)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Two to the power of int32 exponents, float32, exactly."""
    return (exponent + BIAS << FP32_BITS).view(torch.float32)


def seconds_per_multiply_add(accumulator: Accumulator, device: str) -> float:
    """Measure the seconds that adding one product takes on `device`: two million are timed."""
    x = torch.ones(32, 256, device=device)
    weight = torch.ones(256, 256, device=device)
    best = float("inf")
    for _ in range(3):  # the first is slower
        start = time.perf_counter()
        accumulated_gemm(x, weight, accumulator).sum().item()
        best = min(best, time.perf_counter() - start)
    return best / (len(x) * weight.numel())
