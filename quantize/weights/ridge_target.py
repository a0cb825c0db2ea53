"""Compute the ridge target of a weight: the weight that best compensates the errors of the layers before it.

Let x be the input of a GEMM in the float model and x~ in the quantized one, and r and r~ the residual that the
GEMM is added to. The best channel ŵ in place of w minimizes

    Σ_tokens (r + w · x - r~ - ŵ · x~)² + λ |ŵ - w|² = (ŵ - w*) H (ŵ - w*)ᵀ + a constant,

    H = Σ x~ x~ᵀ + λ,    w* = w + M H^-1,    M = Σ (w · (x - x~) + r - r~) x~ᵀ.

So `gptq` can round w* under H, with its own λ. Lybrand and Saab stated the objective, without r. GPTAQ (Li et al. 2025,
arXiv 2504.02692) and Qronos (Zhang et al. 2025, arXiv 2505.11695) minimize it one weight at a time, each with an
approximation of its own; solving for w* at once needs none. M is written with differences: where the layers before
lose nothing, M is 0, and w* is w to the last bit.

w* is a regression and can overfit the calibration tokens: with λ of a hundredth of H's mean diagonal, as in GPTQ, a
short text made `sequential` worse than `gptq` (`docs/decisions/0042`). So λ is chosen for each weight: w* is fitted on
one half of the batches and judged on the other. Where no λ lowers the error there, w* is w. λ is relative to the mean
of H's diagonal over all batches and is added to sums, so that the λ of a half suits the whole.

r is the residual stream in most decoders. The GEMM can compensate the error of r as well. `residual` finds it by
running the layer, without a list of architectures.
"""

import math

import torch

from ...calibrate.measure.moments import add_matmul

#: Candidates of λ over the mean of H's diagonal, the largest first.
RIDGES = (4.0, 1.0, 0.25, 0.06, 0.01)
#: Output channels by which λ is chosen.
CHANNELS = 256


class MomentSums:
    """Sums over one half of the batches, of GEMMs that read one input.

    `moments` float32 [in, in]: Σ x~ x~ᵀ; `lost` float32 [in, out]: Mᵀ, the GEMMs side by side. M is added up
    directly, since Σ x~ (x - x~)ᵀ would be another matrix as large as H.
    """

    def __init__(self, width: int, out: int, device: str = "cpu"):
        """Begin with zeros on `device`, for an input of `width` channels and GEMMs of `out` channels together."""
        self.moments, self.lost = (torch.zeros(width, size, device=device) for size in (width, out))

    def add(self, tokens: torch.Tensor, lost: torch.Tensor) -> None:
        """Add a batch: its inputs x~ [tokens, in], and w · (x - x~) + r - r~ [tokens, out], which its GEMMs lost."""
        add_matmul(self.moments, tokens, tokens)
        add_matmul(self.lost, tokens, lost)


def ridge_target(
    weight: torch.Tensor, learned: MomentSums, judged: MomentSums, channels: slice = slice(None)
) -> torch.Tensor:
    """The ridge target w* float32 [out, in] of `weight` [out, in].

    `learned`, `judged`: the sums of the two halves of the batches, in which the weight has these `channels`. λ is
    fitted on the first half and chosen on the second; w* is then fitted on both.
    """
    some = slice(None, None, max(1, len(weight) // CHANNELS))
    exact = weight.float()
    mean = float((learned.moments.diagonal().double() + judged.moments.diagonal().double()).mean())
    if not math.isfinite(mean):  # `gptq.compensation_of` refuses such moments
        return exact
    learned_lost, others = (sums.lost[:, channels][:, some] for sums in (learned, judged))
    best = 0.0
    chosen = 0.0
    for ridge in RIDGES if bool(learned_lost.any()) else ():
        step = ridge_regression(learned.moments.double(), ridge * mean, learned_lost)
        loss = float((step * (judged.moments @ step - 2 * others)).sum(dtype=torch.float64))
        if loss < best:
            best = loss
            chosen = ridge
    if not chosen:
        return exact
    both = learned.moments.double().add_(judged.moments)
    return exact + ridge_regression(both, chosen * mean, learned.lost[:, channels] + judged.lost[:, channels]).T


def ridge_regression(moments: torch.Tensor, ridge: float, lost: torch.Tensor) -> torch.Tensor:
    """Solve (H + λ)^-1 Mᵀ, float32 [in, some], for `moments` H float64 [in, in], which are overwritten."""
    moments.diagonal().add_(ridge)
    torch.linalg.cholesky(moments, out=moments)
    return torch.cholesky_solve(lost, moments.float())
