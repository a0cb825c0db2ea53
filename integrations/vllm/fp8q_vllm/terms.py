"""The arithmetic of the GEMM of activations with FP8 weights; `gemm` makes it an operator of vLLM's.

Exact rows are all that a batch has of decoded tokens and of the ends of prompts (`rows`). They are multiplied in 16
bits, as the reference multiplies by FP8 weights alone: up to `KERNEL_ROWS` rows, and among rows of one code, by one
kernel that reads the weight in FP8 (`mixed_gemm`); more rows by torch's GEMM of 16 bits, for which the weight is
widened in each call. Both sum in FP32 and round once, to the type of x. On a CPU the same is multiplied in FP32.

What the kernel does not take is multiplied in two codes, E4M3 codes a of x / s and b of 16 times their rounding error:

    x ≈ s · (a + b / 16),   x · wᵀ ≈ s · s_w · (a · ŵᵀ + b · ŵᵀ / 16)
"""

import logging

import torch
from torch.nn.functional import linear

from .codes.encoding import CODE, encode_terms
from .codes.epilogue import Epilogue
from .codes.gemm import scale_sums, scaled_gemm
from .launching import launched
from .rows import Rows

#: The kernel's rows at most, where all are exact: with more, widening the weight takes less time than a tensor core
#: waits for the kernel's conversions (an estimate, docs/decisions/0116).
KERNEL_ROWS = 512
#: Rows that are multiplied at once: their FP32 sums take 235 MB where an 8B's gate and up are multiplied.
CHUNK = 2048
#: Why the kernel was not taken in this process, each reason once.
REFUSALS: set[str] = set()

log = logging.getLogger("vllm.fp8q")


def exact_product(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, one: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [rows, in] by the codes `weight` [out, in], [rows, out] in x's type.

    The epilogue's `input_scale` is a power of two, and `one` float32 [] is 1.
    """
    if not x.is_cuda or len(x) > KERNEL_ROWS:
        return sixteen_bit_product(x, weight, epilogue, one)
    return kernel_product(x.new_empty(len(x), len(weight)), x, weight, epilogue, one)


def with_exact_rows(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, one: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Put what `exact_product` gives for the exact ones of `rows` into `y` [rows, out], which has x's type."""
    if x.is_cuda:
        return kernel_product(y, x, weight, epilogue, one, rows)
    return _put(y, rows, exact_product(x[rows.numbers], weight, epilogue, one))


def kernel_product(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    epilogue: Epilogue,
    one: torch.Tensor,
    rows: Rows | None = None,
) -> torch.Tensor:
    """Put the products of `rows` of `x` (None: all) into `y` by the kernel, or in two codes where it is not taken."""

    def kernel() -> torch.Tensor:
        from .mixed_gemm import triton_mixed_gemm

        return triton_mixed_gemm(x.contiguous(), weight, epilogue, y, rows)

    def operations() -> torch.Tensor:
        if rows is None:
            return two_code_product(x, weight, epilogue, one)
        return _put(y, rows, two_code_product(x[rows.numbers], weight, epilogue, one))

    reason = refusal(x, weight)
    if reason is None:
        return launched(x.device, kernel, operations)
    if reason not in REFUSALS:
        REFUSALS.add(reason)
        log.warning("exact rows are multiplied in two codes, which is slower, not by the kernel of 16 bits: %s", reason)
    return operations()


def refusal(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """The reason why the kernel does not multiply `x` by `weight`; None where it does."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes activations of 16 bits, and these are {x.dtype}"
    if weight.dtype != CODE:
        return f"it takes weights in {CODE}, and these are {weight.dtype}"
    if not weight.is_contiguous():
        return "it takes weights whose rows have no gaps"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 9):
        return f"it takes GPUs of compute capability 8.9 or newer, and this has {capability[0]}.{capability[1]}"
    return None


def sixteen_bit_product(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, one: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [rows, in] as it is by the weight in x's type, which has every E4M3 code; on a CPU in FP32."""
    widened = weight.to(x.dtype if x.is_cuda else torch.float32)
    unscaled = Epilogue(one, epilogue.weight_scale, epilogue.bias)
    parts = [scale_sums(sums_of(part, widened), unscaled, 1, x.dtype, launched) for part in x.split(CHUNK)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sums_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [rows, in] by `weight` [out, in] with sums in FP32, float32 [rows, out]."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x.float(), weight)


def two_code_product(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, one: torch.Tensor) -> torch.Tensor:
    """Multiply both codes of `x` [rows, in] as rows of one FP8 GEMM of a GPU, so that the weight is read once."""
    codes = encode_terms(x, epilogue.input_scale, 2, launched).flatten(0, 1)
    return scale_sums(scaled_gemm(codes, weight, one=one), epilogue, 2, x.dtype, launched)


def _put(y: torch.Tensor, rows: Rows, exact: torch.Tensor) -> torch.Tensor:
    """Put the exact ones of `rows` into `y`."""
    return y.index_copy_(0, rows.numbers, torch.where(rows.exact[:, None], exact, y[rows.numbers]))
