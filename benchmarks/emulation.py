"""Linear layers that train as in FP8 on any machine: values on the grid, arithmetic in FP32.

    y = x̂ · ŵᵀ + bias        dx = ĝ · ŵ        dw = ĝᵀ · x̂

x̂ and ŵ are E4M3 values, ĝ the gradient of y in E5M2 or E4M3; each under a scale of its own that follows from the amax
of the steps before. Rounding passes gradients on as they are, also those of values that saturate, as Transformer
Engine's linear layers do.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fp8q.options import GradientFormat
from fp8q.quantize.codes.formats import E4M3, FORMATS
from fp8q.quantize.reference.linear import replace_linears
from fp8q.quantize.training.emulation import DelayedScale, round_gradient


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
