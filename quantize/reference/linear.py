"""The reference: a linear layer that computes as an FP8 tensor core does.

    y = cast( (Σ_k code_x[k] · code_w[n, k]) · (s_x · s_w[n]) + bias[n] )

Codes are small integers times a power of two, so products of codes are exact in BF16's eight bits of factor and FP32's
sum; the sum is accumulated in FP32, scaled once in FP32 and cast once. Simulating FP8 by rounding to the grid and
multiplying dequantized BF16 values ("fake quantization") instead rounds s_x·code_x and s_w·code_w to BF16 before the
product: another number, and not the engine's.

`exact` computes just this. `fast` multiplies BF16 matrices, which rounds the sum to BF16 once more (the CPU has no BF16
product with an FP32 result); perplexity uses it. Where the processor has no BF16 units, that product is computed in
FP32 (`calibrate.model.bf16_products`). On a GPU with FP8 units (compute capability 8.9 and up) both modes call
`torch._scaled_mm` on the codes, which one kernel makes where Triton is installed (`codes.kernels`). An `accumulator`
replaces the sum by that of `adder`. With two terms the input is s·(a + b/16), where b is the code of sixteen times the
error of a (`codes.formats.TwoTerms`); a and b are rows of one product:

    y = cast( (Σ a·code_w + (Σ b·code_w) / 16) · (s_x · s_w[n]) + bias[n] )
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from ...calibrate.model.bf16_products import widened_products
from ...options import Accumulator
from ..codes.encoding import CODE, code_tables, code_values, encode_terms, two_code_values
from ..codes.formats import TWO_TERMS
from .adder import add_products

Mode = Literal["exact", "fast"]
#: A GPU's product takes weights whose numbers of rows and columns are multiples of this.
ALIGNMENT = 16


class FP8Linear(nn.Module):
    """A linear layer on E4M3 codes: per-output-channel weight scales, one static scale for the input."""

    def __init__(
        self,
        codes: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor,
        bias: torch.Tensor | None,
        mode: Mode,
        terms: int = 1,
    ):
        """Hold `codes` float8_e4m3fn [out, in], `weight_scale` float32 [out], `input_scale` float32 [] and `bias` [out]
        or None; the input takes one code a value, or two (`terms`).
        """
        super().__init__()
        self.mode, self.terms = mode, terms
        self.accumulator: Accumulator | None = None
        on_fp8_gpu = codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= (8, 9)
        held = CODE if on_fp8_gpu else torch.float32 if mode == "exact" else torch.bfloat16
        self.register_buffer("codes", codes.to(held), persistent=False)
        self.register_buffer("weight_scale", weight_scale.float(), persistent=False)
        self.register_buffer("input_scale", input_scale.float(), persistent=False)
        self.register_buffer("tables", code_tables(input_scale.float(), terms), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)

    codes: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    tables: torch.Tensor
    bias: torch.Tensor | None

    def input_codes(self, x: torch.Tensor) -> torch.Tensor:
        """The E4M3 codes of `x` [..., in] as numbers of the type that `codes` are held in, [terms, ..., in]."""
        if x.dtype == torch.bfloat16 and self.codes.dtype != CODE:
            patterns = x.contiguous().view(torch.uint16).flatten().to(torch.int32)
            terms = [table.index_select(0, patterns).view(x.shape) for table in self.tables]
            return (torch.stack(terms) if self.terms == 2 else terms[0][None]).to(self.codes.dtype)
        if self.codes.dtype == CODE:
            return encode_terms(x, self.input_scale, self.terms)
        values = two_code_values(x, self.input_scale) if self.terms == 2 else (code_values(x, self.input_scale),)
        return torch.stack(values).to(self.codes.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out] in x's type."""
        codes = self.input_codes(x)
        if self.accumulator:
            total: torch.Tensor = add_products(codes, self.codes, self.accumulator)
        elif self.codes.dtype == CODE:
            total = scaled_product(codes.flatten(0, -2), self.codes).view(*codes.shape[:-1], -1)
        else:
            with widened_products():
                total = torch.nn.functional.linear(codes, self.codes).float()
        total = total[0] + total[1] / TWO_TERMS.divisor if self.terms == 2 else total[0]
        y = total * (self.input_scale * self.weight_scale)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype)


def scaled_product(x: torch.Tensor, weight: torch.Tensor, fast: bool = False) -> torch.Tensor:
    """Multiply codes `x` [tokens, in] by `weight` [out, in], both float8_e4m3fn, to float32 [tokens, out].

    This is `torch._scaled_mm` with unit scales: `FP8Linear` applies the scales itself, so that FP32 factors are
    multiplied in the same order on every device. A GPU takes widths that are multiples of 16, so others are padded with
    zeros, which change no sum; the weight is then copied in each call. `fast`: sum in the tensor core's adder alone
    (`adder`).
    """
    one = torch.ones((), device=x.device)
    product: torch.Tensor = torch._scaled_mm(
        _filled(x, 1), _filled(weight, ALIGNMENT).t(), scale_a=one, scale_b=one, out_dtype=torch.float32,
        use_fast_accum=fast,
    )  # fmt: skip
    return product.narrow(1, 0, len(weight))


def _filled(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad `codes` [rows, in] with zeros to a multiple of `rows` rows and of 16 columns."""
    missing = (0, -codes.shape[1] % ALIGNMENT, 0, -codes.shape[0] % rows)
    return torch.nn.functional.pad(codes.view(torch.uint8), missing).view(CODE) if any(missing) else codes


def replace_linears(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Replace modules of `model` by `layers`: module name -> its replacement."""
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
