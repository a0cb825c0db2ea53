"""The product of codes on a GPU with FP8 units (compute capability 8.9 and up), with its sum in FP32."""

import torch

from .encoding import CODE

#: A GPU's product takes weights whose numbers of rows and columns are multiples of this.
ALIGNMENT = 16


def scaled_product(x: torch.Tensor, weight: torch.Tensor, fast: bool = False) -> torch.Tensor:
    """Multiply codes `x` [tokens, in] by `weight` [out, in], both float8_e4m3fn, to float32 [tokens, out].

    This is `torch._scaled_mm` with unit scales: who calls it applies the scales, so that FP32 factors are multiplied in
    the same order on every device. A GPU takes widths that are multiples of 16, so others are padded with
    zeros, which change no sum; the weight is then copied in each call. `fast`: sum in the tensor core's adder alone
    (`reference.adder`).
    """
    one = torch.ones((), dtype=torch.float32, device=x.device)  # whatever torch's default type is
    product: torch.Tensor = torch._scaled_mm(
        _filled(x, 1), _filled(weight, ALIGNMENT).t(), scale_a=one, scale_b=one, out_dtype=torch.float32,
        use_fast_accum=fast,
    )  # fmt: skip
    return product.narrow(1, 0, len(weight))


def _filled(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad `codes` [rows, in] with zeros to a multiple of `rows` rows and of 16 columns."""
    missing = (0, -codes.shape[1] % ALIGNMENT, 0, -codes.shape[0] % rows)
    return torch.nn.functional.pad(codes.view(torch.uint8), missing).view(CODE) if any(missing) else codes
