"""Judge the codes of an expert on tokens that they were not fitted to, beside each weight's nearest code.

GPTQ lowers the squared error of the GEMM on the tokens of its second moments. An expert has few of them, and on
other tokens the error may be larger than that of nearest rounding (`docs/decisions/0080`). The error of a token x is

    |(w - v) · x|² + l Σ_j |v_j|² x_j²,

with v the values of the codes and l the share of the input's energy that its own quantization loses. Each token's error
is divided by |x|², since a few tokens, such as the first ones of a text, are so large that they would decide alone, and
the residual stream that the GEMM is added to is large there too.
"""

import torch

from ..scales.decisions import HeldOutError

#: The least number of held-out tokens by which codes are judged.
LEAST = 32


def gemm_error(weight: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, lost: float = 0.0) -> float:
    """The relative squared error of the GEMM with `values` float32 [out, in] in place of `weight` [out, in], summed
    over `tokens` [tokens, in], any float type; `lost`: the share of the input's energy that its quantization loses.
    """
    x = tokens.float()
    squares = x.square()
    error = (x @ (weight.float() - values).T).square().sum(1)
    noise = squares @ values.square().sum(0)
    energy = squares.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((error + lost * noise) / energy).sum(dtype=torch.float64))


def compared_with_nearest(
    weight: torch.Tensor,
    values: torch.Tensor,
    nearest: torch.Tensor,
    tokens: torch.Tensor | None,
    lost: float = 0.0,
) -> HeldOutError:
    """Compare the error of `values` float32 [out, in] with that of the `nearest` values float32 [out, in]."""
    if tokens is None or len(tokens) < LEAST:
        return HeldOutError(tokens=0 if tokens is None else len(tokens))
    error, least = (gemm_error(weight, rounded, tokens, lost) for rounded in (values, nearest))
    return HeldOutError(tokens=len(tokens), over_nearest=error / least if least > 0 else None)
