"""The weights that make up for what the layers before have lost.

With x what a product gets in the float model and x~ in the quantized one, the channel w is to become ŵ of least

    Σ_tokens (r + w · x - r~ - ŵ · x~)² + λ |ŵ - w|² = (ŵ - w*) H (ŵ - w*)ᵀ + what does not depend on ŵ,

    H = Σ x~ x~ᵀ + λ,    w* = w + M H^-1,    M = Σ (w · (x - x~) + r - r~) x~ᵀ,

so `weight_rounding` does the rest, given the weights w* to round to and H of the inputs as they are. Lybrand and Saab
stated the objective, without r; GPTAQ (Li et al. 2025, arXiv 2504.02692) and Qronos (Zhang et al. 2025, arXiv
2505.11695) minimize it one weight at a time, each with an approximation of its own; solved for w* at once it needs
none. Written with differences: where the layers before lose nothing M is 0, and w* is w to the last bit.

r is what the product is added to, the residual stream of most decoders: what it has lost the product can make up for.
No list of architectures says where: `residual.bases` finds tensors of the layer that are the sum to the last bit.
"""

from dataclasses import dataclass

import torch

from .weight_rounding import Compensation


@dataclass(frozen=True)
class Missing:
    """What the quantized model has lost before a product.

    `drift` float32 [in, in]: Σ x~ (x - x~)ᵀ; `residue` float32 [in, out]: Σ x~ (r - r~)ᵀ, None for a product that is
    added to nothing.
    """

    drift: torch.Tensor
    residue: torch.Tensor | None = None


def target(weight: torch.Tensor, missing: Missing, found: Compensation) -> torch.Tensor:
    """w* float32 [out, in] of `weight` [out, in], with H of `found`."""
    lost = missing.drift @ weight.float().T
    lost = lost if missing.residue is None else lost + missing.residue
    wanted = weight.float().clone()
    wanted[:, found.order] += (found.factor.T @ (found.factor @ lost[found.order])).T
    return wanted
