"""The weights that make up for what the layers before have lost.

With x what a product gets in the float model and x~ in the quantized one, the channel w is to become ŵ of least

    Σ_tokens (r + w · x - r~ - ŵ · x~)² + λ |ŵ - w|² = (ŵ - w*) H (ŵ - w*)ᵀ + what does not depend on ŵ,

    H = Σ x~ x~ᵀ + λ,    w* = w + M H^-1,    M = Σ (w · (x - x~) + r - r~) x~ᵀ,

so `gptq` does the rest, with its own λ, given the weights w* to round to and H of the inputs as they are.
Lybrand and Saab stated the objective, without r; GPTAQ (Li et al. 2025, arXiv 2504.02692) and Qronos (Zhang et al.
2025, arXiv 2505.11695) minimize it one weight at a time, each with an approximation of its own; solved for w* at once
it needs none. Written with differences: where the layers before lose nothing M is 0, and w* is w to the last bit.

w* is a regression, and knows the tokens it was made of best: with λ of a hundredth of H's mean diagonal, as rounding
has it, little text made `sequential` worse than `gptq` (`docs/weights.md`). So λ is chosen for each weight, by what w*
of one half of the batches gives on the other; where nothing helps there, w* is w. λ stands beside sums, so that what is
best for a half is best for the whole.

r is what the product is added to, the residual stream of most decoders: what it has lost the product can make up for.
No list of architectures says where: `residual.bases` finds tensors of the layer that are the sum to the last bit.
"""

import math

import torch

from ...calibrate.measure.moments import add_product

#: λ over the mean of H's diagonal, the strongest first.
RIDGES = (4.0, 1.0, 0.25, 0.06, 0.01)
#: Channels that λ is chosen on.
CHANNELS = 256


class MomentSums:
    """Second moments of the quantized model's input of products, and of its difference from the float model's, added up
    over some of the batches.

    `moments` float32 [in, in]: Σ x~ x~ᵀ; `lost` float32 [in, out]: Mᵀ, of all of them side by side. M is added up
    itself, and not from Σ x~ (x - x~)ᵀ, which would be another matrix as large as H.
    """

    def __init__(self, width: int, out: int):
        """Nothing yet, of an input of `width` channels and `out` channels of products."""
        self.moments, self.lost = torch.zeros(width, width), torch.zeros(width, out)

    def add(self, tokens: torch.Tensor, lost: torch.Tensor) -> None:
        """Add x~ [tokens, in] and w · (x - x~) + r - r~ [tokens, out] of a batch."""
        add_product(self.moments, tokens, tokens)
        add_product(self.lost, tokens, lost)


def ridge_target(
    weight: torch.Tensor, learned: MomentSums, judged: MomentSums, channels: slice = slice(None)
) -> torch.Tensor:
    """w* float32 [out, in] of `weight` [out, in], by the sums of two halves of the batches, in which it has these
    `channels`; the second half chooses λ.
    """
    some, found = slice(None, None, max(1, len(weight) // CHANNELS)), weight.float()
    mean = float((learned.moments.diagonal().double() + judged.moments.diagonal().double()).mean())
    if not math.isfinite(mean):  # whoever factors H says so
        return found
    own, others = (sums.lost[:, channels][:, some] for sums in (learned, judged))
    best, chosen = 0.0, 0.0
    for ridge in RIDGES if bool(own.any()) else ():
        step = ridge_regression(learned.moments.double(), ridge * mean, own)
        loss = float((step * (judged.moments @ step - 2 * others)).sum(dtype=torch.float64))
        if loss < best:
            best, chosen = loss, ridge
    if not chosen:
        return found
    both = learned.moments.double().add_(judged.moments)
    return found + ridge_regression(both, chosen * mean, learned.lost[:, channels] + judged.lost[:, channels]).T


def ridge_regression(moments: torch.Tensor, ridge: float, lost: torch.Tensor) -> torch.Tensor:
    """(H + λ)^-1 Mᵀ float32 [in, some] of `moments` float64 [in, in], which are used up."""
    moments.diagonal().add_(ridge)
    torch.linalg.cholesky(moments, out=moments)
    return torch.cholesky_solve(lost, moments.float())
