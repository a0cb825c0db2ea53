"""Add an adapter's product to a product y of x while the model runs: y + B (s · (A x)).

x is the product's input before it is quantized, and everything is in the model's compute type. vLLM's LoRA computes the
same beside a quantized base, except that vLLM multiplies B by s, and accumulates A x and B (A x) in FP32. For an s that
is a power of two, as alpha / rank mostly is, the position of s makes no difference.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoint.adapter import Adapter
from .bf16_products import widened_products


@dataclass(frozen=True)
class Addition:
    """A forward hook that adds an adapter's part to the output of one product.

    `a` [rank, in] and `b` [out, rank] are in the type of the output.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part to `output` [..., out] of `module`."""
        with widened_products():
            return add_lora_product(output, inputs[0], self.a, self.b, self.scale)


def add_lora_product(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute y + B (s · (A x)), of `x` [..., in] and `y` [..., out]."""
    return y + torch.matmul(torch.matmul(x, a.t()) * scale, b.t())


def attach_adapter(model: nn.Module, adapter: Adapter, dtype: torch.dtype, device: str) -> None:
    """Make the products of `model`, which computes in `dtype` on `device`, add the parts of `adapter`, permanently."""
    for module, part in adapter.parts.items():
        a, b = (tensor.to(device, dtype) for tensor in adapter.read(module))
        model.get_submodule(module).register_forward_hook(Addition(a, b, part.scale))
