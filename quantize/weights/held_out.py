"""Judge the codes of an expert on tokens that they were not fitted to, beside each weight's nearest code.

GPTQ lowers the squared error of the GEMM on the tokens of its second moments. An expert has few of them, and on
other tokens the error may be larger than that of nearest rounding (`docs/decisions/0080`). The error of a token x is

    |(w - v) · x|² + l Σ_j |v_j|² x_j²,

with v the values of the codes and l the share of the input's energy that its own quantization loses. Each token's error
is divided by |x|², since a few tokens, such as the first ones of a text, are so large that they would decide alone, and
the residual stream that the GEMM is added to is large there too.
"""

import torch

#: The least number of held-out tokens by which codes are judged.
LEAST = 32


def gemm_error(weight: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, lost: float = 0.0) -> torch.Tensor:
    """The relative squared error of the GEMM with `values` float32 [out, in] in place of `weight` [out, in], summed
    over `tokens` [tokens, in], any float type, to float64 []; `lost`: the share of the input's energy that its
    quantization loses.
    """
    x = tokens.float()
    squares = x.square()
    error = (x @ (weight.float() - values).T).square().sum(1)
    noise = squares @ values.square().sum(0)
    energy = squares.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((error + lost * noise) / energy).sum(dtype=torch.float64)


def compared_with_nearest(
    weight: torch.Tensor, values: torch.Tensor, nearest: torch.Tensor, tokens: torch.Tensor, lost: float = 0.0
) -> torch.Tensor:
    """The error of `values` float32 [out, in] over that of the `nearest` values float32 [out, in], float64 []; NaN
    where the nearest have none.
    """
    error, least = (gemm_error(weight, rounded, tokens, lost) for rounded in (values, nearest))
    return torch.where(least > 0, error / least, torch.nan)
