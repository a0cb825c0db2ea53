"""Revise GPTQ's codes by an error that sees the output side of a GEMM too, as far as it helps held-out tokens.

GPTQ takes the errors of all output channels as equally bad and independent. To second order the loss of the model is
not Σ |E x|² over the tokens but Σ (g · E x)², with E the rounding error of the weight [out, in], x the input and g the
gradient of the loss at the output, for labels that the model draws (`sensitivity.gradients`). Taking g and x as
independent gives

    tr(H_O E H_I Eᵀ),    H_I = Σ x xᵀ,  H_O = Σ g gᵀ,

which YAQA rounds by (Tseng et al. 2025, arXiv 2505.22988, section 3). With H_O the identity this is GPTQ's error. It
stands for the loss only where inputs and gradients are independent and H_O is known well; H_O is estimated from few
windows, and its correlations are chance for the most part. On held-out tokens the loss itself is seen. So the
correlations are shrunk: codes are revised with a small share of them, then with more, each time from the codes before,
as long as the loss on held-out tokens falls. Codes that it does not fall for stay as GPTQ has them
(`docs/decisions/0125`).

With G = H_O E H_I, adding d to the weight of input j in channel i lowers the error by 2 d G[i, j] less
d² H_O[i, i] H_I[j, j]: a parabola, as in `gptq.descend`. A pass goes over the inputs. Of each input the channels that
would move if they alone did are found at once, and then move one after the other, those that win most first, each with
what those before it left of its slope. So the error never rises, and where nothing moves any more no code's neighbour
is better. It runs on the host: a move depends on every move before it. GuidedQuant's weights of tokens (arXiv
2505.07004) leave channels apart, and are another thing.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...calibrate.measure.held_out import load_inputs
from ...calibrate.measure.moments import load_moments, moments_file, shrink
from ..codes.encoding import CODE, nearest_values
from ..codes.formats import E4M3, Float32s
from .gptq import BLOCK, MARGIN, WORTHWHILE, Compensation, ridge_weights

#: The shares of H_O's correlations that are tried, one after the other.
SHARES = (0.25, 0.5)
#: Passes over all inputs, at most, with each share.
PASSES = 4
#: What the names of files with held-out inputs and gradients end in.
INPUTS, GRADIENTS = ".inputs.npy", ".gradients.npy"
MAGNITUDES: list[float] = E4M3.grid.tolist()
MIDPOINTS: list[float] = E4M3.midpoints.tolist()


@dataclass(frozen=True)
class OutputSide:
    """The output side of a GEMM: H_O, float32 [out, out], and of held-out tokens the inputs, float32
    [tokens, in], and the gradients, float32 [tokens, out].
    """

    moments: torch.Tensor
    inputs: torch.Tensor
    gradients: torch.Tensor

    def loss(self, weight: torch.Tensor, values: torch.Tensor, lost: float) -> float:
        """Σ (g · e)² over the held-out tokens for `values` in the place of `weight`, both float32 [out, in]; `lost`:
        the share of the input's energy that its quantization loses.
        """
        error = ((self.inputs @ (weight - values).T) * self.gradients).sum(1).square()
        noise = ((self.gradients @ values).square() * self.inputs.square()).sum(1)
        return float((error + lost * noise).sum(dtype=torch.float64))


def output_files(folder: Path, module: str) -> list[Path]:
    """List the files in `folder` of what is known of the output of `module`; none where nothing is."""
    moments = moments_file(folder, module)
    if not moments.is_file():
        return []
    return [moments, *(folder / f"{module}{end}" for end in (INPUTS, GRADIENTS))]


def load_output_side(folder: Path, module: str) -> OutputSide | None:
    """Load from `folder` what is known of the output of `module`; None where nothing is."""
    if not output_files(folder, module):
        return None
    inputs, gradients = (load_inputs(folder / f"{module}{end}", "held-out gradients") for end in (INPUTS, GRADIENTS))
    assert inputs is not None, "it is written before the moments"
    assert gradients is not None, "it is written before the moments"
    return OutputSide(load_moments(folder, module), inputs.float(), gradients.float())


def revised_codes(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    compensation: Compensation,
    side: OutputSide,
    lost: float,
) -> torch.Tensor:
    """The codes float8_e4m3fn [out, in] after the descent with the best share of H_O's correlations; the `codes` that
    GPTQ gave `weight` [out, in] under `scale` float32 [out] where these lose least.

    `lost`: the share of the input's energy that its quantization loses. Works on the host.
    """
    order = compensation.order.cpu()
    back = torch.argsort(order)
    of_channels = scale.cpu()
    original = weight.float().cpu()
    wanted = ridge_weights(weight.float()[:, compensation.order].T.contiguous(), compensation).cpu()
    moments = compensation.moments.cpu()
    values = codes.cpu().float()[:, order].T.contiguous()

    def loss() -> float:
        return side.loss(original, (values * of_channels)[back].T, lost)

    best = codes
    least = loss()
    for share in SHARES:
        descend_both(wanted, values, of_channels, moments, shrink(side.moments.clone(), 1 - share))
        revised = loss()
        if not revised < least:  # where it is no number either
            break
        best = values[back].T.to(CODE).contiguous().to(codes.device)
        least = revised
    return best


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
