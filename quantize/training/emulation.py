"""Round values and gradients of a training to the FP8 grid, on any machine, with arithmetic in FP32.

Each tensor has a scale of its own that follows from the amax of the steps before (`DelayedScale`).
"""

from typing import Any

import torch
from torch import nn

from ...options import LearningGradients
from ..codes.encoding import code_values
from ..codes.formats import E4M3, E5M2, FORMATS, Format
from ..scales.clip import scale_of


def grid_values(x: torch.Tensor, scale: float, format: Format) -> torch.Tensor:
    """The values of `x` on the grid of `format` under `scale`, float32 of x's shape; saturating, ties to even."""
    if format == E4M3:
        return code_values(x, torch.tensor(scale)) * scale
    assert format == E5M2, "training has no other format"
    return (x.float() / scale).clamp(-format.max, format.max).to(torch.float8_e5m2).float() * scale


class DelayedScale(nn.Module):
    """The scale of a tensor by the largest amax of the last `history` tensors before it; the first one's by its own.

    Invariant: `amax` float32 [history] has the latest first, zeros where there was none.
    """

    amax: torch.Tensor

    def __init__(self, format: Format, history: int, fixed: float | None = None):
        """Begin without a history. `fixed`: a scale that never changes, in place of one by the history."""
        super().__init__()
        self.format = format
        self.fixed = fixed
        self.register_buffer("amax", torch.zeros(history))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The values of `x` on the grid, float32; its amax joins the history."""
        if self.fixed is not None:
            return grid_values(x, self.fixed, self.format)
        amax = x.detach().abs().amax().float()
        before = self.amax.max()
        used = before if before > 0 else amax
        if torch.isfinite(amax):
            self.amax = torch.cat([amax[None].to(self.amax.device), self.amax[:-1]])
        if not used > 0:
            return x.float()  # of zeros alone
        return grid_values(x, float(scale_of([float(used)], self.format)[0]), self.format)


class BFloat16Rounding(nn.Module):
    """The rounding of a tensor to BF16, which has no scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest BF16 values of `x`, float32."""
        return x.bfloat16().float()


def gradient_rounding(gradients: LearningGradients, history: int = 16) -> nn.Module | None:
    """The rounding of a layer's output gradient for the format `gradients`, with its scale by the amax of the last
    `history` steps; None for FP32.
    """
    if gradients == "fp32":
        return None
    if gradients == "bf16":
        return BFloat16Rounding()
    return DelayedScale(FORMATS[gradients], history)


class RoundedGradient(torch.autograd.Function):
    """Pass values on as they are, and their gradient as a module rounds it."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, rounding: nn.Module) -> torch.Tensor:
        """Return `y`."""
        ctx.rounding = rounding
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the rounded gradient of `y`, in its type."""
        (gradient,) = gradients
        return ctx.rounding(gradient).to(gradient.dtype), None


def round_gradient(y: torch.Tensor, rounding: nn.Module) -> torch.Tensor:
    """Return `y`; its gradient will be what `rounding` makes of it."""
    passed: torch.Tensor = RoundedGradient.apply(y, rounding)  # type: ignore[no-untyped-call]
    return passed
