"""Descend from GPTQ's codes on an error that sees the output side too: some output channels matter more together.

GPTQ takes the errors of all output channels as equally bad and independent. To second order the loss of the model is
not Σ |E x|² over the tokens but Σ (g · E x)², with E the rounding error of the weight [out, in], x the input and g the
gradient of the loss at the output, for labels that the model draws (`sensitivity.gradients`). Taking g and x as
independent gives

    tr(H_O E H_I Eᵀ),    H_I = Σ x xᵀ,  H_O = Σ g gᵀ,

which YAQA rounds by (Tseng et al. 2025, arXiv 2505.22988, section 3). With H_O the identity this is GPTQ's error. H_O
is estimated from few windows, and is shrunk toward its diagonal: as it is, its correlations are chance for the most
part (`docs/decisions/0125`).

With G = H_O E H_I, adding d to the weight of input j in channel i lowers the error by 2 d G[i, j] less
d² H_O[i, i] H_I[j, j]: a parabola, as in `gptq.descend`. A pass goes over the inputs. Of each input the channels that
would move if they alone did are found at once, and then move one after the other, those that win most first, each with
what those before it left of its slope. So the error never rises, and where nothing moves any more no code's neighbour
is better. It runs on the host: a move depends on every move before it. GuidedQuant's weights of tokens (arXiv
2505.07004) leave channels apart, and are another thing.
"""

import math
from bisect import bisect_left

import numpy as np
import torch

from ..codes.encoding import nearest_values
from ..codes.formats import E4M3, Float32s
from .gptq import BLOCK, MARGIN, WORTHWHILE

#: Passes over all inputs, at most.
PASSES = 4
MAGNITUDES: list[float] = E4M3.grid.tolist()
MIDPOINTS: list[float] = E4M3.midpoints.tolist()


def descend_both(
    wanted: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor
) -> None:
    """Change `values` float32 [in, out], the values of E4M3 codes, in place until a pass lowers the error too little.

    `wanted` float32 [in, out]: the weights to approximate; `scale` float32 [out]: of the codes; `inputs` float32
    [in, in]: H_I, whose diagonal is positive; `outputs` float32 [out, out]: H_O. A channel without a gradient stays.
    """
    lost = wanted / scale - values  # in units of each channel's scale, as values are
    outputs = outputs * scale[:, None] * scale
    before = None
    for _ in range(PASSES):
        gradient = inputs @ (lost @ outputs)
        error = (lost * gradient).sum(dtype=torch.float64)
        if before is not None and error >= before * (1 - WORTHWHILE):
            break
        before = error
        for start in range(0, len(values), BLOCK):
            block = slice(start, start + BLOCK)
            passed_on = _descend_block(values[block], gradient[block], inputs[block, block], outputs)
            gradient[start + BLOCK :].addmm_(inputs[start + BLOCK :, block], passed_on, alpha=-1)
        torch.sub(wanted / scale, values, out=lost)
    values.copysign_(torch.where(values == 0, wanted, values))


def _descend_block(
    values: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor
) -> torch.Tensor:
    """Change the `values` and the `gradient` of a block of inputs; return each input's moves times H_O, float32
    [block, out].
    """
    passed_on = torch.zeros_like(values)
    of_outputs = outputs.numpy()
    for j, curvature in enumerate(inputs.diagonal().tolist()):
        channels = moving_channels(values[j], gradient[j], curvature, outputs)
        if descend_input(channels, values[j].numpy(), gradient[j].numpy(), curvature, of_outputs, passed_on[j].numpy()):
            gradient[j + 1 :].addr_(inputs[j + 1 :, j], passed_on[j], alpha=-1)
    return passed_on


def moving_channels(values: torch.Tensor, slopes: torch.Tensor, curvature: float, outputs: torch.Tensor) -> list[int]:
    """The channels whose code of one input would move if it alone did, those that win most first.

    `values` and `slopes` (G) float32 [out]; `curvature`: H_I of the input with itself; `outputs` float32 [out, out].
    """
    parabola = outputs.diagonal() * curvature
    bottom = torch.where(parabola > 0, slopes * (1 - MARGIN) / parabola, 0)
    moves = nearest_values(values + bottom) - values
    gains = moves * (2 * slopes - parabola * moves)
    return torch.argsort(gains, descending=True, stable=True)[: int((gains > 0).sum())].tolist()


def descend_input(
    channels: list[int], values: Float32s, slopes: Float32s, curvature: float, outputs: Float32s, passed_on: Float32s
) -> bool:
    """Move the `values` of one input in these `channels`, one after the other, and add the moves times H_O to
    `passed_on`; tell whether any moved. All are float32 [out], and `outputs` [out, out].
    """
    moved = False
    for channel in channels:
        old = float(values[channel])
        slope = float(slopes[channel]) - curvature * float(passed_on[channel])
        parabola = curvature * float(outputs[channel, channel])
        move = nearest(old + slope * (1 - MARGIN) / parabola) - old
        if move * (2 * slope - parabola * move) > 0:
            values[channel] = old + move
            passed_on += np.float32(move) * outputs[channel]
            moved = True
    return moved


def nearest(value: float) -> float:
    """The E4M3 value nearest to `value`; of two the one nearer to zero."""
    return math.copysign(MAGNITUDES[bisect_left(MIDPOINTS, abs(value))], value)
