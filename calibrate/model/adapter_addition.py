"""Add an adapter's product as the model runs, beside a product y of x: y + B (s · (A x)).

x is the product's own input as it is, before it is quantized, and all is in the type that the model computes in: what
vLLM's LoRA computes beside a quantized base, but that vLLM multiplies B by s, and adds up A x and B (A x) in FP32. For
an s that is a power of two, as alpha / rank mostly is, where s stands makes no difference.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoint.adapter import Adapter
from .bf16_products import widened_products


@dataclass(frozen=True)
class Addition:
    """A forward hook that adds what an adapter gives beside one product: `a` [rank, in] and `b` [out, rank] in the
    type of the output.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """`output` [..., out] of `module` with it."""
        with widened_products():
            return add_lora_product(output, inputs[0], self.a, self.b, self.scale)


def add_lora_product(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """y + B (s · (A x)), of `x` [..., in] and `y` [..., out]."""
    return y + torch.matmul(torch.matmul(x, a.t()) * scale, b.t())


def attach_adapter(model: nn.Module, adapter: Adapter, dtype: torch.dtype, device: str) -> None:
    """Let the products of `model`, which computes in `dtype` on `device`, add what `adapter` gives, for good."""
    for module, part in adapter.parts.items():
        a, b = (tensor.to(device, dtype) for tensor in adapter.read(module))
        model.get_submodule(module).register_forward_hook(Addition(a, b, part.scale))
