"""Choose the scales and codes of a weight matrix, one scale for each output channel.

`amax` takes each channel's largest magnitude; `mse` takes the BF16 scale with the least squared error (`weights.mse`).
With these scales fixed, weights are rounded to nearest, or by GPTQ (`gptq`). A weight whose channels share one scale
(`weights.tensor_scales`) is coded under it as under a scale for each channel, all of them equal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from ...options import ScaleGrid, WeightRounding
from ..codes.blocks import SIDE, block_values, spread_scales, weight_blocks
from ..codes.encoding import ENCODERS
from ..codes.formats import E4M3, Grid
from ..scales.clip import SMALLEST_SCALE, ratio_db, scale_of
from ..scales.decisions import INHERITED, HeldOutError, Skipped, WeightScales
from .gptq import Compensation, gptq_codes
from .held_out import compared_with_nearest
from .mse import mse_scales

WeightMethod = Literal["amax", "mse"]
#: Values that are converted to FP32 at a time: two FP32 copies of a whole matrix would take four times its bytes, and
#: larger blocks fragment the heap.
BLOCK_VALUES = 1 << 20


#: Codes float8_e4m3fn [out, in] and scale float32 [out] of a module, and how an expert's were judged.
JudgedCodes = tuple[torch.Tensor, torch.Tensor, HeldOutError | None]


@dataclass(frozen=True)
class WeightScaling:
    """The choice of the scales of weights: by `method` for each output channel, but for modules whose whole weight has
    the scale that `tensor_scales` maps them to, and for `blocks`, modules with a scale on `block_grid` for each block
    of 128 x 128.
    """

    method: WeightMethod
    tensor_scales: Mapping[str, float] = field(default_factory=dict)
    blocks: frozenset[str] = frozenset()
    block_grid: ScaleGrid = "power-of-two"

    def scale(self, module: str, weight: torch.Tensor, format: Grid = E4M3) -> torch.Tensor | None:
        """Choose the scales of the `weight` [out, in] of `module`, float32 [out] or [blocks, blocks]; None for a weight
        of zeros.
        """
        if module in self.blocks:
            return block_scales(weight, self.method, self.block_grid)
        if module not in self.tensor_scales:
            return channel_scales(weight, self.method, format)
        if bool(weight.any()):
            return torch.full((len(weight),), self.tensor_scales[module])
        return None


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes float8_e4m3fn (or int8) [out, in], scale float32 [out] or [blocks, blocks], and their entry."""

    codes: torch.Tensor
    scale: torch.Tensor
    summary: WeightScales

    @property
    def values(self) -> torch.Tensor:
        """Code × scale, float32 [out, in]."""
        if self.scale.dim() == 2:
            return block_values(self.codes, self.scale)
        return self.codes.float() * self.scale[:, None]


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
    return quantize_scaled(weight, channel_scales(weight, method, format), method, compensation, format, wanted)


def quantize_scaled(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    method: WeightMethod,
    compensation: Compensation | None = None,
    format: Grid = E4M3,
    wanted: torch.Tensor | None = None,
) -> QuantizedWeight | Skipped:
    """Quantize as `quantize_weight` does under `scale` float32 [out] or [blocks, blocks], which `method` chose; None
    skips the weight.
    """
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


def judged(
    weight: torch.Tensor,
    compensated: QuantizedWeight | Skipped,
    method: WeightMethod,
    tokens: torch.Tensor | None,
    shrunk: Compensation | None = None,
    lost: float = 0.0,
) -> QuantizedWeight | Skipped:
    """Choose the codes of an expert's `weight` [out, in] that are best on the held-out `tokens` [tokens, in], any float
    type: the `compensated` ones, those by `shrunk` moments where there are any, or the nearest.

    `method` chose the scales; `lost`: the share of the input's energy that its quantization loses. Without enough
    tokens the nearest are taken.
    """
    if isinstance(compensated, Skipped):
        return compensated
    scale = compensated.scale
    nearest = nearest_codes(weight, scale)
    near = QuantizedWeight(nearest, scale, compensated.summary).values
    codes = compensated.codes
    error = compared_with_nearest(weight, compensated.values, near, tokens, lost)
    if shrunk is not None and error.over_nearest is not None:
        other = QuantizedWeight(gptq_codes(weight, scale, shrunk), scale, compensated.summary)
        by_shrunk = compared_with_nearest(weight, other.values, near, tokens, lost)
        if by_shrunk.over_nearest is not None and by_shrunk.over_nearest < error.over_nearest:
            codes = other.codes
            error = by_shrunk.model_copy(update={"shrunk": True})
    return of_stored(weight, (codes if error.beats_nearest else nearest, scale, error), method, "gptq")


def of_stored(
    weight: torch.Tensor, stored: JudgedCodes, method: WeightMethod, rounding: WeightRounding | Literal["learned"]
) -> QuantizedWeight:
    """Describe codes of `weight` [out, in] by `rounding`; those that were judged no better than the nearest are the
    nearest.
    """
    codes, scale, error = stored
    by = rounding if error is None or error.beats_nearest else "nearest"
    summary = weight_summary(weight, codes, scale, method, by)
    return QuantizedWeight(codes, scale, summary.model_copy(update={"held_out": error}))


def weight_summary(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    method: WeightMethod,
    rounding: WeightRounding | Literal["learned"],
) -> WeightScales:
    """Describe the `codes` [out, in] of `weight` under `scale` float32 [out] or [blocks, blocks]."""
    in_blocks = scale.dim() == 2
    return WeightScales(
        method=method,
        rounding=rounding,
        axis=0,
        channels=len(weight),
        granularity="block" if in_blocks else None,
        blocks=scale.numel() if in_blocks else None,
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


def block_scales(weight: torch.Tensor, method: WeightMethod, grid: ScaleGrid) -> torch.Tensor | None:
    """The scale of each block of 128 x 128 of a finite BF16 `weight` [out, in], float32 [blocks, blocks] on `grid`;
    None where all are zero. A block of zeros has the smallest scale, as `fp8q convert` gives it.
    """
    blocks = weight_blocks(weight)
    least = scale_of(_amax(blocks).float().numpy(), E4M3, grid)
    if not (least >= SMALLEST_SCALE).any():
        return None
    scale = np.where(least >= SMALLEST_SCALE, least if method == "amax" else mse_scales(blocks, grid), SMALLEST_SCALE)
    return torch.from_numpy(scale.astype(np.float32)).view(-(-len(weight) // SIDE), -1)


def _of_rows(scale: torch.Tensor, rows: slice, columns: int) -> torch.Tensor:
    """The scales of some `rows` of a weight with so many `columns`, to be broadcast over them."""
    if scale.dim() == 2:
        return spread_scales(scale, rows, columns)
    return scale[rows, None]


def nearest_codes(weight: torch.Tensor, scale: torch.Tensor, format: Grid = E4M3) -> torch.Tensor:
    """Round `weight` [out, in] under `scale` float32 [out] or [blocks, blocks] to the nearest codes, float8_e4m3fn (or
    int8) [out, in].
    """
    encode = ENCODERS[format.name]
    codes = torch.empty(weight.shape, dtype=encode(weight[:0], torch.ones(1)).dtype)
    for rows in _blocks(weight):
        codes[rows] = encode(weight[rows], _of_rows(scale, rows, weight.shape[1]))
    return codes


def _amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, in the weight's type [out], without a copy of the matrix."""
    return torch.maximum(weight.amax(1), -weight.amin(1))


def _blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Split the rows of `weight` [out, in] into slices of at most `BLOCK_VALUES` values, or of one row."""
    rows = max(1, BLOCK_VALUES // weight.shape[1])
    return (slice(start, min(start + rows, len(weight))) for start in range(0, len(weight), rows))


def _sqnr_db(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float | None:
    """Signal-to-quantization-noise ratio of the whole matrix, in dB, summed in float64; None where nothing is lost."""
    noise = signal = 0.0
    for rows in _blocks(weight):
        exact = weight[rows].float()
        noise += float(
            (exact - codes[rows].float() * _of_rows(scale, rows, weight.shape[1])).square().sum(dtype=torch.float64)
        )
        signal += float(exact.square().sum(dtype=torch.float64))
    return ratio_db(signal, noise)
