"""Choose the scales and codes of a weight matrix, one scale for each output channel.

`amax` takes each channel's largest magnitude; `mse` takes the BF16 scale with the least squared error (`weights.mse`).
With these scales fixed, weights are rounded to nearest, or by GPTQ (`gptq`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch

from ...options import WeightRounding
from ..codes.encoding import ENCODERS
from ..codes.formats import E4M3, Grid
from ..scales.clip import ratio_db, scale_of
from ..scales.decisions import INHERITED, SMALLEST_SCALE, Skipped, WeightScales
from .gptq import Compensation, Compensations, gptq_codes
from .mse import mse_scales

WeightMethod = Literal["amax", "mse"]
#: Values that are converted to FP32 at a time: two FP32 copies of a whole matrix would take four times its bytes, and
#: larger blocks fragment the heap.
BLOCK_VALUES = 1 << 20
WEIGHT_METHODS: tuple[str, ...] = get_args(WeightMethod)


class RoundedCodes(Protocol):
    """Codes and scales of modules that were rounded layer by layer, or learned."""

    def get(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes float8_e4m3fn [out, in] and scale float32 [out] of `module`; None where it was not rounded."""


class SourceCodes(Protocol):
    """Codes and scales of modules that are FP8 in the source checkpoint."""

    def get(self, module: str) -> "QuantizedWeight | None":
        """The quantized weight [out, in] of `module` as stored; None where it must be quantized here."""

    def blocks(self, module: str) -> str:
        """Return a suffix for the method of a module that was stored with a scale for each block; empty for others."""


@dataclass(frozen=True)
class Rounding:
    """The method of weight quantization, with what it reads.

    `method`: how scales are chosen. `compensations`: the Cholesky factors for GPTQ; None rounds to nearest.
    `sequential`: the codes of `--weight-rounding sequential`. `inherited`: the codes of an FP8 source checkpoint.
    `learned`: those of `fp8q distill`, which come before all others.
    """

    method: WeightMethod
    compensations: Compensations | None = None
    sequential: RoundedCodes | None = None
    inherited: SourceCodes | None = None
    learned: RoundedCodes | None = None

    def quantized(self, module: str, weight: torch.Tensor, format: Grid) -> "QuantizedWeight | Skipped":
        """Quantize the `weight` [out, in] of `module`; a weight of zeros is skipped."""
        if self.learned and (codes := self.learned.get(module)):
            return QuantizedWeight(*codes, weight_summary(weight, *codes, self.method, "learned"))
        if self.sequential and (codes := self.sequential.get(module)):
            return QuantizedWeight(*codes, weight_summary(weight, *codes, self.method, "sequential"))
        return quantize_weight(
            weight, self.method, self.compensations.get(module) if self.compensations else None, format
        )


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes float8_e4m3fn (or int8) [out, in], scale float32 [out], and their entry in scales.json."""

    codes: torch.Tensor
    scale: torch.Tensor
    summary: WeightScales


def quantize_weight(
    weight: torch.Tensor,
    method: WeightMethod,
    compensation: Compensation | None = None,
    format: Grid = E4M3,
    wanted: torch.Tensor | None = None,
) -> QuantizedWeight | Skipped:
    """Quantize a finite BF16 matrix [out, in] per output channel; a matrix of zeros has no scale and is skipped.

    `compensation`: the Cholesky factor of its input, for GPTQ; without it weights are rounded to nearest. Both `mse`
    and `compensation` are for E4M3. `wanted` float32 [out, in]: the ridge target that GPTQ rounds in place of `weight`.
    """
    scale = channel_scales(weight, method, format)
    if scale is None:
        return Skipped(
            reason="amax of the weight is 0: every value is zero or vanishes in BF16", value=0.0, samples=weight.numel()
        )
    if compensation is None:
        codes = nearest_codes(weight, scale, format)
    else:
        codes = gptq_codes(weight if wanted is None else wanted, scale, compensation)
    return QuantizedWeight(
        codes, scale, weight_summary(weight, codes, scale, method, "nearest" if compensation is None else "gptq")
    )


def weight_summary(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    method: WeightMethod,
    rounding: WeightRounding | Literal["learned"],
) -> WeightScales:
    """Describe the `codes` [out, in] of `weight` under `scale` float32 [out]."""
    return WeightScales(
        method=method,
        rounding=rounding,
        axis=0,
        channels=len(scale),
        scale_min=float(scale.min()),
        scale_max=float(scale.max()),
        sqnr_db=_sqnr_db(weight, codes, scale),
        zero_channels=int((_amax(weight) == 0).sum()) or None,
    )


def inherited_summary(scale: torch.Tensor) -> WeightScales:
    """Describe inherited codes under their `scale` float32 [out]: nothing is lost."""
    return WeightScales(
        method=INHERITED, rounding=INHERITED, axis=0, channels=len(scale), scale_min=float(scale.min()),
        scale_max=float(scale.max()), sqnr_db=None,
    )  # fmt: skip


def channel_scales(weight: torch.Tensor, method: WeightMethod, format: Grid = E4M3) -> torch.Tensor | None:
    """The scale of each row of a finite BF16 `weight` [out, in], float32 [out] on the BF16 grid.

    A row of zeros is exact with any scale, and takes the largest scale of the other rows; None where all rows are zero.
    """
    amax = _amax(weight).float().numpy()
    fit = scale_of(amax, format) >= SMALLEST_SCALE
    if not fit.any():
        return None
    scale = np.where(fit, scale_of(amax, format) if method == "amax" else mse_scales(weight), 0)
    return torch.from_numpy(np.where(fit, scale, scale.max()).astype(np.float32))


def nearest_codes(weight: torch.Tensor, scale: torch.Tensor, format: Grid = E4M3) -> torch.Tensor:
    """Round `weight` [out, in] under `scale` float32 [out] to the nearest codes, float8_e4m3fn (or int8) [out, in]."""
    encode = ENCODERS[format.name]
    codes = torch.empty(weight.shape, dtype=encode(weight[:0], scale[:0, None]).dtype)
    for rows in _blocks(weight):
        codes[rows] = encode(weight[rows], scale[rows, None])
    return codes


def _amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, in the weight's type [out], without a copy of the matrix."""
    return torch.maximum(weight.amax(1), -weight.amin(1))


def _blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Split the rows of `weight` [out, in] into slices of at most `BLOCK_VALUES` values, or of one row."""
    rows = max(1, BLOCK_VALUES // weight.shape[1])
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def _sqnr_db(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float | None:
    """Signal-to-quantization-noise ratio of the whole matrix, in dB, summed in float64; None where nothing is lost."""
    noise = signal = 0.0
    for rows in _blocks(weight):
        exact = weight[rows].float()
        noise += float((exact - codes[rows].float() * scale[rows, None]).square().sum(dtype=torch.float64))
        signal += float(exact.square().sum(dtype=torch.float64))
    return ratio_db(signal, noise)
