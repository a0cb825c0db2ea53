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

from collections.abc import Sequence
from functools import cache

import torch

from ...calibrate.measure.moments import add_matmul
from .no_waiting import certainly, factor_in_place, on_host

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


def ridge_targets(weights: Sequence[torch.Tensor], learned: MomentSums, judged: MomentSums) -> list[torch.Tensor]:
    """The ridge targets w* float32 [out, in] of `weights` [out, in], which read one input.

    `learned`, `judged`: the sums of the two halves of the batches, with the weights side by side. λ is fitted on the
    first half and chosen on the second, for each weight; w* is then fitted on both. H is factored once for each λ.
    """
    exact = [weight.float() for weight in weights]
    mean = (learned.moments.diagonal().double() + judged.moments.diagonal().double()).mean()
    if certainly(~(mean.isfinite() & learned.lost.any())):  # `gptq.finite_moments` refuses moments that overflowed
        return exact
    sizes = [len(weight) for weight in weights]
    learned_lost, judged_lost = (sums.lost.split(sizes, 1) for sums in (learned, judged))
    ridges = _chosen_ridges(learned, judged, sizes)

    @cache
    def factor_on_both(ridge: float | torch.Tensor) -> torch.Tensor:
        return ridge_factor(learned.moments.double().add_(judged.moments), ridge * mean)

    targets: list[torch.Tensor] = []
    for weight, ridge, *lost in zip(exact, ridges, learned_lost, judged_lost, strict=True):
        if certainly(ridge == 0):
            targets.append(weight)
            continue
        factor = factor_on_both(float(ridge) if on_host(ridge) else ridge)
        step = torch.cholesky_solve(lost[0] + lost[1], factor)
        targets.append(torch.where(ridge > 0, weight + step.T, weight))
    return targets


def _chosen_ridges(learned: MomentSums, judged: MomentSums, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Choose λ over the mean of H's diagonal, float64 [], for each weight of so many channels; 0 where none helps."""
    mean = (learned.moments.diagonal().double() + judged.moments.diagonal().double()).mean()
    best = [torch.zeros_like(mean) for _ in sizes]
    chosen = [torch.zeros_like(mean) for _ in sizes]
    for ridge in RIDGES:
        factor = ridge_factor(learned.moments.double(), ridge * mean)
        for number, lost in enumerate(zip(learned.lost.split(sizes, 1), judged.lost.split(sizes, 1), strict=True)):
            learned_lost, others = (side[:, :: max(1, sizes[number] // CHANNELS)] for side in lost)
            step = torch.cholesky_solve(learned_lost, factor)
            loss = (step * (judged.moments @ step - 2 * others)).sum(dtype=torch.float64)
            better = loss < best[number]
            best[number] = torch.where(better, loss, best[number])
            chosen[number] = torch.where(better, ridge, chosen[number])
        del factor  # before the next is made: of a wide input it is gigabytes
    return chosen


def ridge_factor(moments: torch.Tensor, ridge: torch.Tensor) -> torch.Tensor:
    """The lower Cholesky factor of H + λ, float32 [in, in], for `moments` H float64 [in, in], which are overwritten."""
    moments.diagonal().add_(ridge)
    factor_in_place(moments)
    return moments.float()
