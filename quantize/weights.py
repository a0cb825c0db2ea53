"""Per-output-channel scales and codes of a weight matrix.

`amax` takes each channel's largest magnitude; `mse` takes the BF16 scale with the least squared error (`weight_mse`). With these scales fixed, weights
are rounded to nearest, or so that they make up for each other's errors (`weight_rounding`).
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from .clip import scale_of
from .formats import E4M3
from .linear import encode
from .scales import SMALLEST_SCALE, Skipped, WeightScales
from .weight_mse import mse_scales
from .weight_rounding import Compensations, compensated_codes

WeightMethod = Literal["amax", "mse"]
WEIGHT_METHODS: tuple[str, ...] = get_args(WeightMethod)


@dataclass(frozen=True)
class Rounding:
    """How weights are quantized: how their scales are chosen, and what compensates rounding errors (None: each weight goes to its nearest code)."""

    method: WeightMethod
    compensations: Compensations | None = None


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes float8_e4m3fn [out, in], scale float32 [out], and what to write of them."""

    codes: torch.Tensor
    scale: torch.Tensor
    summary: WeightScales


def quantize_weight(weight: torch.Tensor, method: WeightMethod, compensation: torch.Tensor | None = None) -> QuantizedWeight | Skipped:
    """Quantize a finite BF16 matrix [out, in] per output channel; a matrix of zeros has no scale and is skipped.

    `compensation` float32 [in, in]: of `weight_rounding`; without it weights are rounded to nearest.
    """
    scale = channel_scales(weight, method)
    if scale is None:
        return Skipped(reason="amax of the weight is 0: every value is zero or vanishes in BF16", value=0.0, samples=weight.numel())
    codes = encode(weight, scale[:, None]) if compensation is None else compensated_codes(weight, scale, compensation)
    zero = int((weight.abs().amax(1) == 0).sum())
    summary = WeightScales(
        method=method,
        rounding="nearest" if compensation is None else "gptq",
        axis=0,
        channels=len(scale),
        scale_min=float(scale.min()),
        scale_max=float(scale.max()),
        sqnr_db=_sqnr_db(weight, codes, scale),
        zero_channels=zero or None,
    )
    return QuantizedWeight(codes, scale, summary)


def channel_scales(weight: torch.Tensor, method: WeightMethod) -> torch.Tensor | None:
    """Scale of each row of a finite BF16 `weight` [out, in], float32 [out] on the BF16 grid; None where all vanish.

    A row of zeros is exact with any scale and takes the largest of the others'.
    """
    amax = weight.abs().amax(1).float().numpy()
    fit = scale_of(amax, E4M3) >= SMALLEST_SCALE
    if not fit.any():
        return None
    scale = np.where(fit, scale_of(amax, E4M3) if method == "amax" else mse_scales(weight), 0)
    return torch.from_numpy(np.where(fit, scale, scale.max()).astype(np.float32))


def _sqnr_db(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio of the whole matrix, in dB, summed in float64."""
    exact = weight.float()
    noise = (exact - codes.float() * scale[:, None]).square().sum(dtype=torch.float64)
    signal = exact.square().sum(dtype=torch.float64)
    return float(10 * torch.log10(signal / noise)) if noise > 0 else float("inf")
