"""FP8 layers as PEFT knows layers: a `torch.nn.Linear` beside which it adds an adapter.

PEFT adds y + s · B(A x) around whatever layer is there, but only where the layer is of a class that it knows. It reads
of the layer its sizes, and of `weight` the device and the type for A and B. To merge it writes to `weight.data`: codes
have no room for such a sum, so that is refused, and so is a gradient that codes would not pass on.
"""

from typing import NoReturn

import torch
from torch import nn

from ...core.errors import InputError
from .linear import FP8Linear


class WeightOfCodes(torch.Tensor):
    """A weight of which there are a size, a type and a device, and no numbers: those are codes."""

    @property
    def data(self) -> NoReturn:  # type: ignore[override]
        """Raise InputError: whoever reads it is about to merge."""
        raise InputError(
            "merge",
            "an adapter has no place in FP8 codes",
            "leave it beside them, or merge it into the BF16 model and quantize that (`fp8q calibrate --adapter`)",
        )


class LinearOnCodes(nn.Linear):
    """An FP8 layer that is a `torch.nn.Linear` to other libraries; it computes as the layer that it holds."""

    def __init__(self, layer: FP8Linear, dtype: torch.dtype):
        """Hold `layer`; `dtype`: of the numbers that it is called with."""
        nn.Module.__init__(self)  # and not Linear's own, which makes a weight
        self.out_features, self.in_features = layer.codes.shape
        self.product, self.dtype = layer, dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """A tensor [out, in] without numbers, on the device of the codes."""
        empty = torch.zeros((), dtype=self.dtype, device=self.product.codes.device)
        return empty.expand(self.out_features, self.in_features).as_subclass(WeightOfCodes)

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """The bias [out] of the layer, float32, or None."""
        return self.product.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` [..., in] to [..., out], in its type.

        Raises InputError where a gradient is to pass.
        """
        if torch.is_grad_enabled() and input.requires_grad:
            raise InputError(
                "", "an FP8 layer passes no gradient on", "`fp8q distill` learns weights or an adapter of an FP8 model"
            )
        out: torch.Tensor = self.product(input)
        return out
