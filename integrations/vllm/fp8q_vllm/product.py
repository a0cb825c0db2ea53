"""The product of activations in two terms with FP8 weights, as one operator that vLLM's compiler does not look into.

    x ≈ s · (a + b / 16),   x · wᵀ ≈ s · s_w · (a · ŵᵀ + b · ŵᵀ / 16)

a is the E4M3 code of x / s and b that of 16 times its rounding error, under a scale s that is a power of two. Both are
rows of one FP8 product with an FP32 result, so weights are read once and the result is rounded once, to the type of x.
The rows of b are those that `rows` gives: all, or those of decoded tokens and tails.

Outside of a forward pass vLLM asks a layer for its weights, by an identity matrix (latent attention does, when it is
loaded). A 1 may lie beyond all codes under the input's scale, so inputs are not rounded then.
"""

import torch
from torch.nn.functional import linear
from vllm.forward_context import is_forward_context_available
from vllm.utils.torch_utils import direct_register_custom_op

from .codes.encoding import code_values, encode_terms, two_code_values
from .codes.formats import TWO_TERMS
from .codes.products import scaled_product
from .launching import launched
from .rows import rows_of_batch


def terms_of(x: torch.Tensor, scale: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` terms of `x` [rows, in]: E4M3 codes [count, rows, in], or without a GPU their values."""
    if x.is_cuda:
        return encode_terms(x, scale, count, launched)
    return torch.stack(two_code_values(x, scale) if count > 1 else (code_values(x, scale),))


def code_product(terms: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply what `terms_of` gives [rows, in] by the codes `weight` [out, in], to float32 [rows, out]."""
    if not terms.is_cuda:
        return linear(terms, weight.float())  # exact but for the sum: FP32 holds every product of two codes
    return scaled_product(terms, weight)


def total_of(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, tail: int, free_rows: int) -> torch.Tensor:
    """The product of `x` [rows, in] with `weight` [out, in] in codes, before scales, float32 [rows, out].

    `tail` 0: two terms in all rows.
    """
    rows = rows_of_batch(len(x), tail or None, free_rows)
    if rows is None:
        total = code_product(terms_of(x, scale, 2).flatten(0, 1), weight)
        return total[: len(x)].add_(total[len(x) :], alpha=1 / TWO_TERMS.divisor)
    second = torch.where(rows.exact[:, None], x[rows.numbers], 0)  # of which the second term is 0 too
    total = code_product(torch.cat([terms_of(x, scale, 1)[0], terms_of(second, scale, 2)[1]]), weight)
    return total[: len(x)].index_add_(0, rows.numbers, total[len(x) :], alpha=1 / TWO_TERMS.divisor)


def fp8q_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tail: int,
    free_rows: int,
) -> torch.Tensor:
    """`x` [..., in] times `weight` [out, in], E4M3 codes, with its scales float32 [out, 1] or [1], in x's type.

    `input_scale` float32 [], a power of two. `tail`: the last positions of a call that have second terms, 0: all.
    `free_rows`: up to so many rows all have them.
    """
    if is_forward_context_available():
        total = total_of(x.flatten(0, -2), weight, input_scale, tail, free_rows)
        total *= input_scale * weight_scale.flatten()
    else:
        total = linear(x.flatten(0, -2).float(), weight.float()) * weight_scale.flatten()
    if bias is not None:
        total += bias
    return total.to(x.dtype).view(*x.shape[:-1], -1)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tail: int,
    free_rows: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


direct_register_custom_op("fp8q_linear", fp8q_linear, fake_impl=_fake)
