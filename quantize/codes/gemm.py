"""The GEMM of codes on a GPU with FP8 units (compute capability 8.9 and up), its sum in FP32, and its scaling."""

import torch

from .encoding import CODE, Launch
from .epilogue import Epilogue
from .formats import TWO_TERMS

#: A GPU's GEMM takes weights whose numbers of rows and columns are multiples of this.
ALIGNMENT = 16


def scaled_gemm(
    x: torch.Tensor, weight: torch.Tensor, fast: bool = False, one: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply codes `x` [tokens, in] by `weight` [out, in], both float8_e4m3fn, to float32 [tokens, out].

    This is `torch._scaled_mm` with unit scales: who calls it applies the scales, so that FP32 factors are multiplied in
    the same order on every device. A GPU takes widths that are multiples of 16, so others are padded with
    zeros, which change no sum; the weight is then copied in each call. `fast`: sum in the tensor core's adder alone
    (`reference.adder`). `one`: 1 as float32 [] on the device, which costs a kernel to make in each call.
    """
    if one is None:
        one = torch.ones((), dtype=torch.float32, device=x.device)  # whatever torch's default type is
    sums: torch.Tensor = torch._scaled_mm(
        _filled(x, 1), _filled(weight, ALIGNMENT).t(), scale_a=one, scale_b=one, out_dtype=torch.float32,
        use_fast_accum=fast,
    )  # fmt: skip
    return sums.narrow(1, 0, len(weight))


def _filled(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad `codes` [rows, in] with zeros to a multiple of `rows` rows and of 16 columns."""
    missing = (0, -codes.shape[1] % ALIGNMENT, 0, -codes.shape[0] % rows)
    if any(missing):
        return torch.nn.functional.pad(codes.view(torch.uint8), missing).view(CODE)
    return codes


def scale_sums(sums: torch.Tensor, epilogue: Epilogue, terms: int, dtype: torch.dtype, launch: Launch) -> torch.Tensor:
    """Add the terms' `sums` float32 [terms · rows, out], and apply the layer's `epilogue`; returns `dtype` [rows, out].

    One kernel where `launch` starts it: 4 bytes are read for each sum and 2 written, where torch's operations move 20.
    """

    def kernel() -> torch.Tensor:
        from . import kernels

        return kernels.triton_scale(sums, epilogue, terms, dtype)

    def operations() -> torch.Tensor:
        rows = len(sums) // terms
        total = sums[:rows].add(sums[rows:], alpha=1 / TWO_TERMS.divisor) if terms == 2 else sums
        return epilogue.of_sums(total, dtype)

    return launch(sums.device, kernel, operations)
