"""The arithmetic of the GEMM of activations in two terms with FP8 weights; `gemm` makes it an operator of vLLM's.

    x ≈ s · (a + b / 16),   x · wᵀ ≈ s · s_w · (a · ŵᵀ + b · ŵᵀ / 16)

a is the E4M3 code of x / s and b that of 16 times its rounding error, under a scale s that is a power of two. Both are
rows of one FP8 GEMM with an FP32 result, so weights are read once and the result is rounded once, to the type of x.
The rows of b are those that `rows` gives: all, or those of decoded tokens and of the end of a prompt.
"""

import torch
from torch.nn.functional import linear

from .codes.encoding import code_values, encode_terms, two_code_values
from .codes.epilogue import Epilogue
from .codes.formats import TWO_TERMS
from .codes.gemm import ALIGNMENT, scale_sums, scaled_gemm, scaled_gemm_once
from .launching import launched
from .rows import Rows

#: Rows that are multiplied at once: their FP32 sums take 470 MB where an 8B's gate and up are multiplied in two terms.
CHUNK = 2048
#: From so many rows on, a tail is multiplied apart from the rows with one term.
APART = 2048


def terms_of(x: torch.Tensor, scale: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` terms of `x` [rows, in]: E4M3 codes [count, rows, in], or without a GPU their values."""
    if x.is_cuda:
        return encode_terms(x, scale, count, launched)
    return torch.stack(two_code_values(x, scale) if count > 1 else (code_values(x, scale),))


def code_gemm(terms: torch.Tensor, weight: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Multiply what `terms_of` gives [rows, in] by the codes `weight` [out, in], to float32 [rows, out]."""
    if not terms.is_cuda:
        return linear(terms, weight.float())  # exact but for the sum: FP32 holds every product of two codes
    return scaled_gemm(terms, weight, one=one)


def sums_of(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, one: torch.Tensor, rows: Rows | None
) -> tuple[torch.Tensor, int]:
    """The GEMM of `x` [rows, in] with `weight` [out, in] in codes, before scales, float32 [terms · rows, out], and
    its terms: two, or one where the second terms of `rows` are added already.
    """
    if rows is None:
        return code_gemm(terms_of(x, scale, 2).flatten(0, 1), weight, one), 2
    second = torch.where(rows.exact[:, None], x[rows.numbers], 0)  # of which the second term is 0 too
    total = code_gemm(torch.cat([terms_of(x, scale, 1)[0], terms_of(second, scale, 2)[1]]), weight, one)
    return total[: len(x)].index_add_(0, rows.numbers, total[len(x) :], alpha=1 / TWO_TERMS.divisor), 1


def tail_apart(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, one: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """The GEMM of `x` [rows, in] in one term, with those of `rows` in two, in x's type.

    Rows of one term are scaled in the GEMM's own epilogue, so that their FP32 sums are never in memory; the weight
    is read once more for the few others.
    """
    factor = epilogue.input_scale * epilogue.weight_scale
    y = scaled_gemm_once(terms_of(x, epilogue.input_scale, 1)[0], weight, factor, epilogue.bias, x.dtype)
    sums = code_gemm(terms_of(x[rows.numbers], epilogue.input_scale, 2).flatten(0, 1), weight, one)
    exact = scale_sums(sums, epilogue, 2, x.dtype, launched)
    return y.index_copy_(0, rows.numbers, torch.where(rows.exact[:, None], exact, y[rows.numbers]))


def can_be_apart(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> bool:
    """Tell whether `tail_apart` takes a GEMM and is the faster way: on a GPU, from `APART` rows on."""
    if not x.is_cuda or len(x) < APART or x.dtype != torch.bfloat16 or len(epilogue.weight_scale) != len(weight):
        return False
    bias = epilogue.bias
    return not any(width % ALIGNMENT for width in weight.shape) and (bias is None or bias.dtype == x.dtype)


def scaled_of(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, one: torch.Tensor, rows: Rows | None
) -> torch.Tensor:
    """The GEMM of `x` [rows, in] with second terms in `rows` (None: in all), [rows, out] in x's type.

    `weight` [out, in] are E4M3 codes, the epilogue's `input_scale` is a power of two, and `one` float32 [] is 1.
    """
    if rows is not None and can_be_apart(x, weight, epilogue):
        return tail_apart(x, weight, epilogue, one, rows)
    made = []
    for part in x.split(CHUNK) if rows is None else (x,):
        sums, terms = sums_of(part, weight, epilogue.input_scale, one, rows)
        made.append(scale_sums(sums, epilogue, terms, x.dtype, launched))
    return made[0] if len(made) == 1 else torch.cat(made)
