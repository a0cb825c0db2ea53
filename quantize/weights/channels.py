"""Choose the scales and codes of a weight matrix, one scale for each output channel.

`amax` takes each channel's largest magnitude; `mse` takes the BF16 scale with the least squared error (`weights.mse`).
With these scales fixed, weights are rounded to nearest, or by GPTQ (`gptq`).

**One scale for a whole weight** (`--weight-scale tensor`): it is coded under it as under a scale for each channel, all
of them equal. vLLM, SGLang and TensorRT-LLM make one GEMM of q, k and v, and one of gate and up. Where such weights
have one scale each, they take the largest for all and round the codes of the others again (vLLM's
`requantize_with_max_scale`), so that what is served was never validated. Weights that read one tensor and lie in one
module therefore share a scale from the start: the codes are those that are served. Experts keep a scale for each
channel: with tensor weights vLLM takes the largest input scale of all experts of a layer for each of them, and refuses
inputs with a scale for each token.

**Experts** are judged on tokens that their codes were not fitted to, beside each weight's nearest code. GPTQ lowers the
squared error of the GEMM on the tokens of its second moments. An expert has few of them, and on other tokens the error
may be larger than that of nearest rounding (`docs/decisions/0080`). The error of a token x is

    |(w - v) · x|² + l Σ_j |v_j|² x_j²,

with v the values of the codes and l the share of the input's energy that its own quantization loses. Each token's error
is divided by |x|², since a few tokens, such as the first ones of a text, are so large that they would decide alone, and
the residual stream that the GEMM is added to is large there too.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ...options import ScaleGrid, WeightRounding
from ..codes.blocks import SIDE, block_values, spread_scales, weight_blocks
from ..codes.encoding import ENCODERS, scales_of
from ..codes.formats import E4M3, Grid
from ..scales.clip import SMALLEST_SCALE, ratio_db, scale_of
from ..scales.decisions import INHERITED, HeldOutError, Skipped, WeightScales
from .gptq import Compensation, gptq_codes
from .mse import mse_scale, mse_scales
from .no_waiting import certainly, on_host

WeightMethod = Literal["amax", "mse"]
#: The least number of held-out tokens by which codes of an expert are judged.
LEAST_HELD_OUT = 32
#: Values that are converted to FP32 at a time, on the host and on another device: two FP32 copies of a whole matrix
#: would take four times its bytes, and larger blocks fragment the heap.
BLOCK_VALUES = 1 << 20
DEVICE_VALUES = 1 << 26

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
        """Choose the scales of the `weight` [out, in] of `module`, float32 [out] or [blocks, blocks], on its device;
        None for a weight of zeros, or scales of zero on another device than the host.
        """
        if module in self.blocks:
            return block_scales(weight, self.method, self.block_grid)
        if module not in self.tensor_scales:
            return channel_scales(weight, self.method, format)
        some = weight.any()
        if certainly(~some):
            return None
        return torch.where(some, self.tensor_scales[module], 0.0).float().repeat(len(weight))


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes float8_e4m3fn (or int8) [out, in], scale float32 [out] or [blocks, blocks], and their entry."""

    codes: torch.Tensor
    scale: torch.Tensor
    summary: WeightScales

    @property
    def values(self) -> torch.Tensor:
        """Code × scale, float32 [out, in]."""
        return dequantized(self.codes, self.scale)


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Code × scale of `codes` [out, in] under `scale` float32 [out] or [blocks, blocks], float32 [out, in]."""
    if scale.dim() == 2:
        return block_values(codes, scale)
    return codes.float() * scale[:, None]


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
        return _skipped(weight)
    if compensation is None:
        codes = nearest_codes(weight, scale, format)
    else:
        codes = gptq_codes(weight if wanted is None else wanted, scale, compensation)
    rounding: WeightRounding = "nearest" if compensation is None else "gptq"
    summary = weight_summary(weight, codes, scale, method, rounding)
    return QuantizedWeight(codes, scale, summary) if summary.scale_max else _skipped(weight)


def _skipped(weight: torch.Tensor) -> Skipped:
    return Skipped(
        reason="amax of the weight is 0: every value is zero or vanishes in BF16", value=0.0, samples=weight.numel()
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
    if tokens is None or len(tokens) < LEAST_HELD_OUT:
        nearest = nearest_codes(weight, compensated.scale)
        error = HeldOutError(tokens=0 if tokens is None else len(tokens))
        return of_stored(weight, (nearest, compensated.scale, error), method, "gptq")
    codes, facts = best_on_held_out(weight, compensated, tokens.to(weight.device), shrunk, lost)
    ratio, by_shrunk = facts.tolist()
    over_nearest = None if math.isnan(ratio) else ratio
    error = HeldOutError(tokens=len(tokens), over_nearest=over_nearest, shrunk=True if by_shrunk else None)
    return of_stored(weight, (codes, compensated.scale, error), method, "gptq")


def best_on_held_out(
    weight: torch.Tensor,
    compensated: QuantizedWeight,
    tokens: torch.Tensor,
    shrunk: Compensation | None = None,
    lost: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose among the codes that `judged` describes, without a wait. Returns the codes; and as float64 [2] the error
    of the best compensated ones over the nearest's, NaN where the latter have none, and 1 where these are by `shrunk`.
    """
    scale = compensated.scale
    nearest = nearest_codes(weight, scale)
    near = dequantized(nearest, scale)
    codes = compensated.codes
    ratio = compared_with_nearest(weight, compensated.values, near, tokens, lost)
    better = torch.zeros_like(ratio, dtype=torch.bool)
    if shrunk is not None:
        others = gptq_codes(weight, scale, shrunk)
        of_others = compared_with_nearest(weight, dequantized(others, scale), near, tokens, lost)
        better = of_others < ratio
        codes = _codes_where(better, others, codes)
        ratio = torch.where(better, of_others, ratio)
    return _codes_where(ratio < 1, codes, nearest), torch.stack([ratio, better.double()])


def gemm_error(weight: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, lost: float = 0.0) -> torch.Tensor:
    """The relative squared error of the GEMM with `values` float32 [out, in] in place of `weight` [out, in], summed
    over `tokens` [tokens, in], any float type, to float64 []; `lost`: the share of the input's energy that its
    quantization loses.
    """
    x = tokens.float()
    squares = x.square()
    error = (x @ (weight.float() - values).T).square().sum(1)
    noise = squares @ values.square().sum(0)
    energy = squares.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((error + lost * noise) / energy).sum(dtype=torch.float64)


def compared_with_nearest(
    weight: torch.Tensor, values: torch.Tensor, nearest: torch.Tensor, tokens: torch.Tensor, lost: float = 0.0
) -> torch.Tensor:
    """The error of `values` float32 [out, in] over that of the `nearest` values float32 [out, in], float64 []; NaN
    where the nearest have none.
    """
    error, least = (gemm_error(weight, rounded, tokens, lost) for rounded in (values, nearest))
    return torch.where(least > 0, error / least, torch.nan)


def _codes_where(flag: torch.Tensor, codes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.where(flag, codes.view(torch.uint8), others.view(torch.uint8)).view(codes.dtype)


def of_stored(
    weight: torch.Tensor, stored: JudgedCodes, method: WeightMethod, rounding: WeightRounding | Literal["learned"]
) -> QuantizedWeight:
    """Describe codes of `weight` [out, in] by `rounding`; those that were judged no better than the nearest are the
    nearest.
    """
    codes, scale = (tensor.to(weight.device) for tensor in stored[:2])
    error = stored[2]
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
    """Describe the `codes` [out, in] of `weight` under `scale` float32 [out] or [blocks, blocks].

    Here a device is waited for. Raises RuntimeError for codes that are NaN under a scale, by moments without a factor.
    """
    scale_min, scale_max, signal, noise, zero_channels = weight_facts(weight, codes, scale).tolist()
    if scale_max and math.isnan(noise) and math.isfinite(signal):
        raise RuntimeError("the second moments of a weight's input have no Cholesky factor")
    in_blocks = scale.dim() == 2
    return WeightScales(
        method=method,
        rounding=rounding,
        axis=0,
        channels=len(weight),
        granularity="block" if in_blocks else None,
        blocks=scale.numel() if in_blocks else None,
        scale_min=scale_min,
        scale_max=scale_max,
        sqnr_db=ratio_db(signal, noise),
        zero_channels=int(zero_channels) or None,
    )


def weight_facts(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The smallest and largest scale, the sums of squares of the whole `weight` [out, in] and of its rounding error,
    and the number of channels that are all zero, float64 [5].
    """
    zero = torch.zeros((), dtype=torch.float64, device=weight.device)
    signal = zero
    noise = zero
    for rows in _blocks(weight):
        exact = weight[rows].float()
        lost = exact - codes[rows].float() * _of_rows(scale, rows, weight.shape[1])
        noise = noise + lost.square().sum(dtype=torch.float64)
        signal = signal + exact.square().sum(dtype=torch.float64)
    zero_channels = (_amax(weight) == 0).sum()
    return torch.stack([number.double() for number in (scale.min(), scale.max(), signal, noise, zero_channels)])


def inherited_summary(scale: torch.Tensor) -> WeightScales:
    """Describe inherited codes under their `scale` float32 [out]: nothing is lost."""
    return WeightScales(
        method=INHERITED, rounding=INHERITED, axis=0, channels=len(scale), scale_min=float(scale.min()),
        scale_max=float(scale.max()), sqnr_db=None,
    )  # fmt: skip


def channel_scales(weight: torch.Tensor, method: WeightMethod, format: Grid = E4M3) -> torch.Tensor | None:
    """The scale of each row of a finite BF16 `weight` [out, in], float32 [out] on the BF16 grid.

    A row of zeros is exact with any scale, and takes the largest scale of the other rows; None where all rows are zero,
    or scales of zero on another device than the host.
    """
    least = scales_of(_amax(weight).float(), format)
    fit = least >= SMALLEST_SCALE
    if certainly(~fit.any()):
        return None
    scale = torch.where(fit, least if method == "amax" else mse_scales(weight), 0)
    return torch.where(fit, scale, scale.max())


def joined_families(modules: Collection[str], groups: Iterable[Sequence[str]]) -> list[list[str]]:
    """Split `modules` into those whose weights share a scale: those of a group that lie in one module.

    `groups`: modules that receive the same tensor.
    """
    families: dict[tuple[str, str], list[str]] = {}
    first = {member: members[0] for members in groups for member in members}
    for module in modules:
        families.setdefault((first.get(module, module), module.rpartition(".")[0]), []).append(module)
    return [*families.values()]


def tensor_scales(
    families: Iterable[Sequence[str]], read: Callable[[str], torch.Tensor], method: WeightMethod
) -> Mapping[str, float]:
    """Choose one scale for the weights of each family by `method`; module -> its scale.

    `read` gives the finite BF16 weight of a module. A family of zeros has none.
    """
    scales: dict[str, float] = {}
    for family in families:
        weights = [read(module) for module in family]
        amax = max(float(weight.abs().max()) for weight in weights)
        if (largest := float(scale_of(amax, E4M3))) >= SMALLEST_SCALE:
            scale = largest if method == "amax" else float(mse_scale(weights)[0])
            scales |= dict.fromkeys(family, scale)
    return scales


def block_scales(weight: torch.Tensor, method: WeightMethod, grid: ScaleGrid) -> torch.Tensor | None:
    """The scale of each block of 128 x 128 of a finite BF16 `weight` [out, in], float32 [blocks, blocks] on `grid`;
    None where all are zero. A block of zeros has the smallest scale, as `fp8q convert` gives it.
    """
    blocks = weight_blocks(weight)
    least = scales_of(_amax(blocks).float(), E4M3, grid)
    fit = least >= SMALLEST_SCALE
    if certainly(~fit.any()):
        return None
    scale = torch.where(fit, least if method == "amax" else mse_scales(blocks, grid), SMALLEST_SCALE)
    return torch.where(fit.any(), scale, 0).view(-(-len(weight) // SIDE), -1)


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
    codes = torch.empty(weight.shape, dtype=encode(weight[:0], scale.new_ones(())).dtype, device=weight.device)
    for rows in _blocks(weight):
        codes[rows] = encode(weight[rows], _of_rows(scale, rows, weight.shape[1]))
    return codes


def _amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, in the weight's type [out], without a copy of the matrix."""
    return torch.maximum(weight.amax(1), -weight.amin(1))


def _blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Split the rows of `weight` [out, in] into slices of at most `BLOCK_VALUES` values, or of one row."""
    rows = max(1, (BLOCK_VALUES if on_host(weight) else DEVICE_VALUES) // weight.shape[1])
    return (slice(start, min(start + rows, len(weight))) for start in range(0, len(weight), rows))
