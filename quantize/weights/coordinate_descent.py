"""Coordinate descent after GPTQ: change one code at a time as long as the squared error of the product falls.

Let R = w - s c be the rounding error and G = H R. Moving weight j by d changes the error R H Rᵀ by d² H[j, j] - 2 d
G[j]: a parabola whose minimum is at d = G[j] / H[j, j], and on the grid at the code nearest to there. A pass goes over
all inputs, for all channels at once; passes end when no change lowers the error, or a pass gains little. Inputs are
taken in blocks: within a block G is updated with each change, and the rest of G by one product for the block.

GPTQ chooses each code when only those before it are known. Here each code is chosen when all others are known, so the
error never grows. The price is a product of H and the weights for each pass: twice the cost of GPTQ.
"""

import torch

from ..codes.encoding import code_values

#: Passes at most, and the share of the error that a pass must take off for another to follow.
PASSES, WORTHWHILE = 8, 0.005
#: Input channels that are changed before the rest of the gradient is updated.
BLOCK = 128
#: Share of its own square by which a change must lower the error, so that FP32 rounding decides no tie.
MARGIN = 1e-3


def descend(wanted: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor) -> None:
    """Change `values` float32 [in, out], the values of E4M3 codes, in place until a pass lowers the error too little.

    `wanted` float32 [in, out]: the weights to approximate; `scale` float32 [out]: of the codes; `moments` float32
    [in, in]: H, whose diagonal is positive.
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
    """Change the `values` and the `gradient` of a block; return the change of each weight, float32 [block, out]."""
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
