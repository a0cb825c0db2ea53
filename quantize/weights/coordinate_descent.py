"""Change codes one at a time as long as the error of the product falls: what rounding in turn could not foresee.

With what is lost R = w - s c and G = H R, moving weight j by d changes the error R H Rᵀ by d² H[j, j] - 2 d G[j]: a
parabola, least at d = G[j] / H[j, j], and on the grid at the code nearest to there. Passes go over all inputs of all
channels at once; they end where no code is worth changing or a pass gains little. Inputs go in blocks: within one, G
follows each change; the rest of G learns of a block's changes as one product.

Rounding in turn (GPTQ) decides each code knowing only those before it. Here each knows all others, so that the error is
never larger than it was; the price is a product of H and the weights for each pass, twice what rounding in turn costs.
"""

import torch

from ..codes.encoding import code_values

#: Passes at most, and the share of the error that a pass must take off for another to follow.
PASSES, WORTHWHILE = 8, 0.005
#: Input channels changed before the rest of the matrix learns of it.
BLOCK = 128
#: Share of its own square by which a change must lower the error: it is no change at a tie, whatever FP32 rounds.
MARGIN = 1e-3


def descend(wanted: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor) -> None:
    """Change `values` float32 [in, out], the numbers of E4M3 codes for the weights `wanted` float32 [in, out] under
    `scale` float32 [out], in place, until the error under `moments` float32 [in, in] falls no more to speak of.

    The diagonal of `moments` is positive.
    """
    lost = wanted - values * scale
    gradient = moments @ lost
    before = float((lost * gradient).sum(dtype=torch.float64))
    for _ in range(PASSES):
        for start in range(0, len(values), BLOCK):
            end = min(start + BLOCK, len(values))
            moved = _block(values[start:end], scale, gradient[start:end], moments[start:end, start:end])
            gradient[:start].addmm_(moments[:start, start:end], moved, alpha=-1)
            gradient[end:].addmm_(moments[end:, start:end], moved, alpha=-1)
        torch.sub(wanted, values * scale, out=lost)
        after = float((lost * gradient).sum(dtype=torch.float64))
        if after >= before * (1 - WORTHWHILE):
            break
        before = after


def _block(values: torch.Tensor, scale: torch.Tensor, gradient: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Change a block's `values` and its `gradient`; returns how far each weight moved, float32 [block, out]."""
    moved = torch.empty_like(values)
    for j, own in enumerate(moments.diagonal()):
        old, slope = values[j], gradient[j]
        new = code_values(torch.addcmul(slope / own, old, scale), scale)
        moved[j] = (new - old) * scale
        gains = 2 * slope * moved[j] > (1 + MARGIN) * own * moved[j].square()
        moved[j].mul_(gains)
        values[j] = torch.where(gains, new, old)
        gradient.addr_(moments[:, j], moved[j], alpha=-1)
    return moved
