"""Per-output-channel scales and codes of a weight matrix.

`amax` takes each channel's largest magnitude. `mse` takes the scale with the least squared error, found without quantizing
a value twice: a channel's BF16 magnitudes, counted by bit pattern relative to the exponent of its amax, are a short histogram; the error of
every candidate scale on every pattern is one table for all channels (the grid repeats with the exponent), so the
errors of all candidates on all channels are one matrix product. An E4M3 error repeats with every octave of scale but for
its ends, so candidates span the octave below the amax scale, on every BF16 number.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch

from ..calibrate.histogram import magnitudes
from .clip import scale_of
from .formats import E4M3, Float32s
from .linear import encode
from .scales import SMALLEST_SCALE, Skipped, WeightScales

WeightMethod = Literal["amax", "mse"]
WEIGHT_METHODS: tuple[str, ...] = get_args(WeightMethod)
#: Magnitudes this many octaves below a channel's amax are zero at every candidate, and err the same.
OCTAVES = 20


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes float8_e4m3fn [out, in], scale float32 [out], and what to write of them."""

    codes: torch.Tensor
    scale: torch.Tensor
    summary: WeightScales


def quantize_weight(weight: torch.Tensor, method: WeightMethod) -> QuantizedWeight | Skipped:
    """Quantize a finite BF16 matrix [out, in] per output channel; a matrix of zeros has no scale and is skipped."""
    scale = channel_scales(weight, method)
    if scale is None:
        return Skipped(reason="amax of the weight is 0: every value is zero or vanishes in BF16", value=0.0, samples=weight.numel())
    codes = encode(weight, scale[:, None])
    zero = int((weight.abs().amax(1) == 0).sum())
    summary = WeightScales(
        method=method,
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


def mse_scales(weight: torch.Tensor) -> Float32s:
    """The BF16 scale with the least squared error for each row of a finite BF16 `weight` [out, in], float32 [out]."""
    patterns = weight.abs().view(torch.int16)
    exponent = patterns.amax(1) >> 7
    offset = ((exponent - OCTAVES + 1) << 7)[:, None]
    table, candidates = error_table()
    best = torch.empty(len(weight), dtype=torch.int64)
    for start in range(0, len(weight), 1024):
        rows = slice(start, start + 1024)
        bins = (patterns[rows] - offset[rows]).clamp_(min=0)
        counts = torch.stack([torch.bincount(row, minlength=OCTAVES << 7) for row in bins])
        counts[:, 0] = 0
        best[rows] = (counts.float() @ table).argmin(1)
    scales: Float32s = np.ldexp(candidates[best.numpy()], exponent.numpy().astype(np.int32) - 127).astype(np.float32)
    return scales


@cache
def error_table() -> tuple[torch.Tensor, Float32s]:
    """Squared error of each magnitude pattern at each candidate scale, float32 [patterns, candidates], and the candidates.

    Both are relative to 2^exponent of the channel's amax, which lies in [1, 2): its scale in [1/448, 2/448).
    """
    top, octave = 127 << 7, 1 << 7
    values = magnitudes(np.arange(top - (OCTAVES - 1) * octave, top + octave)).astype(np.float64)
    lowest = int(scale_of(0.5, E4M3).view(np.uint32) >> 16)
    highest = int(scale_of(np.nextafter(np.float32(2), np.float32(0)), E4M3).view(np.uint32) >> 16)
    candidates = magnitudes(np.arange(lowest, highest + 1))
    rounded = E4M3.round(values.astype(np.float32)[:, None] / candidates) * candidates.astype(np.float64)
    return torch.from_numpy(((values[:, None] - rounded) ** 2).astype(np.float32)), candidates


def _sqnr_db(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio of the whole matrix, in dB, summed in float64."""
    exact = weight.float()
    noise = (exact - codes.float() * scale[:, None]).square().sum(dtype=torch.float64)
    signal = exact.square().sum(dtype=torch.float64)
    return float(10 * torch.log10(signal / noise)) if noise > 0 else float("inf")
