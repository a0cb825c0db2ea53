"""Add an adapter's GEMM while the model runs, beside a GEMM y of x: y + B (s · (A x)).

x is the GEMM's own input before it is quantized, and everything is in the compute type of the model. vLLM's LoRA
computes the same beside a quantized base, but multiplies B by s, and sums A x and B (A x) in FP32. For an s that is a
power of two, as alpha / rank mostly is, the place of s makes no difference.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoint.adapter import Adapter
from .bf16_gemms import gemms_in_fp32


@dataclass(frozen=True)
class Addition:
    """A forward hook that adds an adapter's output to one GEMM's: `a` [rank, in] and `b` [out, rank] in the type of
    the output.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part to `output` [..., out] of `module`."""
        with gemms_in_fp32():
            return add_lora_output(output, inputs[0], self.a, self.b, self.scale)


def add_lora_output(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute y + B (s · (A x)), of `x` [..., in] and `y` [..., out]."""
    return y + torch.matmul(torch.matmul(x, a.t()) * scale, b.t())


def attach_adapter(model: nn.Module, adapter: Adapter, dtype: torch.dtype, device: str) -> None:
    """Add `adapter` to the GEMMs of `model`, which computes in `dtype` on `device`, permanently."""
    for module, part in adapter.parts.items():
        a, b = (tensor.to(device, dtype) for tensor in adapter.read(module))
        model.get_submodule(module).register_forward_hook(Addition(a, b, part.scale))
