"""Scale the sums of products of codes in a linear layer, add the bias, and cast once."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Epilogue:
    """The scales and the bias that a layer applies to the sums of its codes.

    `input_scale` float32 [], or [rows, 1]; `weight_scale` float32 [out] or [1]; `bias` [out] of any float type or None.
    """

    input_scale: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None = None

    def of_sums(self, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scale `total` float32 [rows, out], add the bias in FP32, and cast once to `dtype`."""
        total = total * (self.input_scale * self.weight_scale)
        return (total if self.bias is None else total + self.bias).to(dtype)
