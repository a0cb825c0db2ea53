"""Training whose products lose what they would lose in FP8, on any machine: values on the grid, arithmetic in FP32.

    y = x̂ · ŵᵀ + bias        dx = ĝ · ŵ        dw = ĝᵀ · x̂

x̂ and ŵ are E4M3 values, ĝ the gradient of y in E5M2 or E4M3; each under a scale of its own that follows from the amax
of the steps before (`DelayedScale`). Rounding passes gradients on as they are, also those of values that saturate, as
Transformer Engine's linear layers do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...options import GradientFormat, LearningGradients
from ..codes.encoding import code_values
from ..codes.formats import E4M3, E5M2, FORMATS, Format
from ..reference.linear import replace_linears
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
        self.format, self.fixed = format, fixed
        self.register_buffer("amax", torch.zeros(history))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The values of `x` on the grid, float32; its amax joins the history."""
        if self.fixed is not None:
            return grid_values(x, self.fixed, self.format)
        amax, before = x.detach().abs().amax().float(), self.amax.max()
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
    return BFloat16Rounding() if gradients == "bf16" else DelayedScale(FORMATS[gradients], history)


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


@dataclass(frozen=True)
class Emulation:
    """Options of a training that loses as in FP8.

    `gradients`: their format; `history`: the steps whose amax a scale follows from; `fixed_gradient_scale`: one scale
    of all gradients at all steps (None: each tensor has its own by its history).
    """

    gradients: GradientFormat = "e5m2"
    history: int = 16
    fixed_gradient_scale: float | None = None


class EmulatedLinear(nn.Module):
    """A linear layer that trains as in FP8; it shares the parameters of the layer that it stands for."""

    def __init__(self, layer: nn.Linear, how: Emulation):
        """Stand for `layer`."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.of_input, self.of_weight = DelayedScale(E4M3, how.history), DelayedScale(E4M3, how.history)
        self.of_gradient = DelayedScale(FORMATS[how.gradients], how.history, how.fixed_gradient_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out], in x's type."""
        rounded = [
            values + (on_grid(values.detach()) - values.detach())
            for values, on_grid in ((x.float(), self.of_input), (self.weight.float(), self.of_weight))
        ]
        y = nn.functional.linear(rounded[0], rounded[1], self.bias)
        return round_gradient(y, self.of_gradient).to(x.dtype)


def emulate(model: nn.Module, modules: Iterable[str], how: Emulation = Emulation()) -> None:
    """Replace the linear layers `modules` of `model` by ones that train as in FP8.

    Raises TypeError for a module that is no `torch.nn.Linear`.
    """
    layers: dict[str, nn.Module] = {}
    for name in modules:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"{name}: is no torch.nn.Linear but a {type(layer).__name__}")
        layers[name] = EmulatedLinear(layer, how)
    replace_linears(model, layers)
