"""The weights that make up for what the layers before have lost.

With x what a product gets in the float model and x~ in the quantized one, the channel w is to become ŵ of least

    Σ_tokens (r + w · x - r~ - ŵ · x~)² + λ |ŵ - w|² = (ŵ - w*) H (ŵ - w*)ᵀ + what does not depend on ŵ,

    H = Σ x~ x~ᵀ + λ,    w* = w + M H^-1,    M = Σ (w · (x - x~) + r - r~) x~ᵀ,

so `weight_rounding` does the rest, with its own λ, given the weights w* to round to and H of the inputs as they are.
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

import torch

from ..calibrate.measure.moments import add_product

#: λ over the mean of H's diagonal, the strongest first.
RIDGES = (4.0, 1.0, 0.25, 0.06, 0.01)
#: Channels that λ is chosen on.
CHANNELS = 256


class Sums:
    """What the quantized model gets at a product, and what it has lost before it, added up over some of the batches.

    `moments` float32 [in, in]: Σ x~ x~ᵀ; `drift` float32 [in, in]: Σ x~ (x - x~)ᵀ; `residue` float32 [in, out]:
    Σ x~ (r - r~)ᵀ, None for a product that is added to nothing.
    """

    def __init__(self, width: int, out: int | None = None):
        """Nothing yet, of an input of `width` channels; `out`: of a product that is added to something."""
        self.moments, self.drift = torch.zeros(width, width), torch.zeros(width, width)
        self.residue = None if out is None else torch.zeros(width, out)

    def add(self, tokens: torch.Tensor, drift: torch.Tensor, residue: torch.Tensor) -> None:
        """Add x~, x - x~ [tokens, in] and r - r~ [tokens, out] of a batch."""
        add_product(self.moments, tokens, tokens)
        add_product(self.drift, tokens, drift)
        if self.residue is not None:
            add_product(self.residue, tokens, residue)

    def lost(self, weight: torch.Tensor, channels: slice = slice(None)) -> torch.Tensor:
        """Mᵀ float32 [in, some] of `channels` of `weight` [out, in]."""
        lost = self.drift @ weight[channels].float().T
        return lost if self.residue is None else lost + self.residue[:, channels]


def target(weight: torch.Tensor, learned: Sums, judged: Sums) -> torch.Tensor:
    """w* float32 [out, in] of `weight` [out, in], by the sums of two halves of the batches, of which the second chooses
    λ.
    """
    moments, some = learned.moments + judged.moments, slice(None, None, max(1, len(weight) // CHANNELS))
    mean, found = float(moments.diagonal().double().mean()), weight.float()
    own, others = learned.lost(weight, some), judged.lost(weight, some)
    best, chosen = 0.0, 0.0
    for ridge in RIDGES if bool(own.any()) else ():
        step = regression(learned.moments, ridge * mean, own)
        loss = float((step * (judged.moments @ step - 2 * others)).sum(dtype=torch.float64))
        if loss < best:
            best, chosen = loss, ridge
    if not chosen:
        return found
    return found + regression(moments, chosen * mean, learned.lost(weight) + judged.lost(weight)).T


def regression(moments: torch.Tensor, ridge: float, lost: torch.Tensor) -> torch.Tensor:
    """(H + λ)^-1 Mᵀ float32 [in, some]."""
    damped = moments.double()
    damped.diagonal().add_(ridge)
    torch.linalg.cholesky(damped, out=damped)
    return torch.cholesky_solve(lost, damped.float())
