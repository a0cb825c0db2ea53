"""Coordinate descent after GPTQ: change one code at a time as long as the squared error of the product falls.

Let R = w - s c be the rounding error and G = H R. Moving weight j by d changes the error R H Rᵀ by d² H[j, j] - 2 d
G[j]: a parabola whose minimum is at d = G[j] / H[j, j], and on the grid at the code nearest to there. A pass goes over
all inputs, for all channels at once; passes end when no change lowers the error, or a pass gains little. Inputs are
taken in blocks: within a block G is updated with each change, and the rest of G by one product for the block.

GPTQ chooses each code when only those before it are known. Here each code is chosen when all others are known, so the
error never grows. The price is a product of H and the weights for each pass: twice the cost of GPTQ.
"""

import torch

from ..codes.encoding import nearest_values

#: Passes at most, and the share of the error that a pass must take off for another to follow.
PASSES, WORTHWHILE = 8, 0.005
#: Input channels that are changed before the rest of the gradient is updated; and before the rest of the block's is.
BLOCK, RUN = 128, 16
#: Share of the way to the minimum of a parabola that is left out, so that FP32 rounding decides no tie.
MARGIN = 1e-3


def descend(wanted: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor) -> None:
    """Change `values` float32 [in, out], the values of E4M3 codes, in place until a pass lowers the error too little.

    `wanted` float32 [in, out]: the weights to approximate; `scale` float32 [out]: of the codes; `moments` float32
    [in, in]: H, whose diagonal is positive.
    """
    wanted = wanted / scale  # errors and gradients are in units of each channel's scale
    lost, weights = wanted - values, scale.square()
    gradient = moments @ lost
    before = _total(lost, gradient, weights)
    for _ in range(PASSES):
        for start in range(0, len(values), BLOCK):
            block = slice(start, start + BLOCK)
            moved = _block(values[block], gradient[block], moments[block, block])
            gradient[:start].addmm_(moments[:start, block], moved, alpha=-1)
            gradient[start + BLOCK :].addmm_(moments[start + BLOCK :, block], moved, alpha=-1)
        torch.sub(wanted, values, out=lost)
        after = _total(lost, gradient, weights)
        if after >= before * (1 - WORTHWHILE):
            break
        before = after
    values.copysign_(torch.where(values == 0, wanted, values))  # zeros have the sign that nearest rounding gives them


def _total(lost: torch.Tensor, gradient: torch.Tensor, weights: torch.Tensor) -> float:
    """Add up the errors of all channels by their `weights` [out], in float64."""
    return float((lost * gradient).sum(0, dtype=torch.float64) @ weights.double())


def _block(values: torch.Tensor, gradient: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Change the `values` and the `gradient` of a block; return the change of each weight, float32 [block, out]."""
    moved = torch.empty_like(values)
    steps = ((1 - MARGIN) / moments.diagonal()).tolist()
    olds, slopes, moves = values.unbind(), gradient.unbind(), moved.unbind()
    for start in range(0, len(values), RUN):
        run = slice(start, start + RUN)
        own, columns = gradient[run], moments[run, run].unbind(1)
        for j, column in enumerate(columns, start):
            new = nearest_values(torch.add(olds[j], slopes[j], alpha=steps[j]))
            torch.sub(new, olds[j], out=moves[j])
            own.addr_(column, moves[j], alpha=-1)
        values[run] += moved[run]  # exact: both are codes
        gradient[:start].addmm_(moments[:start, run], moved[run], alpha=-1)
        gradient[start + RUN :].addmm_(moments[start + RUN :, run], moved[run], alpha=-1)
    return moved
