"""Revise the codes of GPTQ by the output side of a GEMM, as far as held-out tokens show that it helps.

`two_sided` lowers tr(H_O E H_I Eᵀ), which stands for the loss only where H_O is known well and inputs and gradients are
independent. On held-out tokens the loss itself is seen, Σ (g · E x)² to second order. So the correlations of H_O are
shrunk: codes are revised with a small share of them, then with more, each time from the codes before, as long as the
loss on held-out tokens falls. Codes that it does not fall for stay as GPTQ has them (`docs/decisions/0125`).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from ...calibrate.measure.held_out import load_inputs
from ...calibrate.measure.moments import load_moments, moments_file, shrink
from ..codes.encoding import CODE
from .gptq import Compensation, ridge_weights
from .two_sided import descend_both

#: The shares of H_O's correlations that are tried, one after the other.
SHARES = (0.25, 0.5)
#: What the names of files with held-out inputs and gradients end in.
INPUTS, GRADIENTS = ".inputs.npy", ".gradients.npy"


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


def load_output_side(folder: Path, module: str) -> OutputSide | None:
    """Load from `folder` what is known of the output of `module`; None where nothing is."""
    if not moments_file(folder, module).is_file():
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
        if revised >= least:
            break
        best = values[back].T.to(CODE).contiguous().to(codes.device)
        least = revised
    return best
