"""Round the weights of a channel one after the other, each making up for the errors before it (GPTQ on the E4M3 grid),
then each once more (`coordinate_descent`).

What counts is the error of the product, for a channel w with codes c under scale s

    Σ_tokens ((w - s c) · x)² = (w - s c) H (w - s c)ᵀ,    H = Σ x xᵀ,

which nearest rounding takes for a sum over weights, as if inputs were not correlated. Frantar et al. 2022 (GPTQ,
algorithm 1) fix one input at a time: once weight j is rounded and off by e, the best move of those not rounded yet is
-e · U[j, j:] / U[j, j] with the upper Cholesky factor U of H^-1 = Uᵀ U, and e² / U[j, j]² is what the error grows by.
The grid is whatever `encode` rounds to: here floating-point codes, where they use integers. Columns go in blocks, and a
block's errors reach the rest of the matrix as one product.

Inputs are rounded too, which weights can make up for: a product that gets x̂ = x + e, with e uncorrelated to x and of
the second moments N, loses least for ŵ of least

    Σ (w · x - ŵ · x̂)² = (ŵ - w*) (H + N) (ŵ - w*)ᵀ + what does not depend on ŵ,    w* = w - w N (H + N)^-1,

a ridge regression, as noise on inputs makes any (Bishop 1995, "Training with Noise is Equivalent to Tikhonov
Regularization"): where inputs nearly repeat each other, w* no longer takes differences between them that rounding has
made. N is diagonal: of each input's energy the share that the histogram says is lost. Activations in two terms lose
next to nothing, and there w* is w.

Inputs go in falling order of H's diagonal, those that weigh most while most are left to make up for them. Scales stay:
each channel's best of five to 24 near that of `mse`, by the sum of e² / U², lowers the error by 1 to 2 %, and the KL of
the model not at all.

U needs no inverse of H: reversed, H has a Cholesky factor whose inverse, reversed, is U; half the work, and the square
root of its condition number. It is computed in FP64: one direction can hold most of the energy of a wide input, and
FP32 then rounds H away from positive definite, whatever the damping. H is damped by a thousandth of its mean diagonal,
a tenth of the paper's: with exact activations ten times or a third of that give the same, and more of it hides what N
knows (`docs/weights.md`), so there is nothing to choose on held-out text.
An input that was never anything but zero is correlated with no other, and is rounded to nearest.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ...calibrate.measure.moments import load_moments
from ...core.errors import InputError
from ..codes.encoding import CODE, code_values
from .coordinate_descent import descend

#: Share of H's mean diagonal that is added to its diagonal.
DAMPING = 0.001
#: Input channels rounded before their errors are passed on to the rest of the matrix.
BLOCK = 128
#: Values that are rounded together.
VALUES = 1 << 24


@dataclass(frozen=True)
class Compensation:
    """The Cholesky factor of an input's second moments, by which GPTQ rounds.

    `order` int64 [in]: in which its channels are rounded; `noise` float32 [in]: N's diagonal, in that order; `moments`
    float32 [in, in]: H + N, damped, in that order; `factor` float32 [in, in]: U, upper triangular.
    """

    order: torch.Tensor
    noise: torch.Tensor
    moments: torch.Tensor
    factor: torch.Tensor


def compensation(moments: torch.Tensor, lost: float = 0.0) -> Compensation:
    """The compensation that follows from `moments` float32 [in, in], sums or means alike, of an input of whose energy
    rounding takes the share `lost`.
    """
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    reverse, noise = order.flip(0), lost * moments.diagonal()[order]
    damped = moments[reverse[:, None], reverse].double()
    mean = float(damped.diagonal().mean())
    damped.diagonal().add_(noise.flip(0)).add_(DAMPING * mean if mean > 0 else 1.0)
    ordered = damped.float().flip(0, 1)
    torch.linalg.cholesky(damped, out=damped)
    invert(damped)
    return Compensation(order, noise, ordered, damped.float().flip(0, 1))


def invert(lower: torch.Tensor) -> None:
    """Invert a lower triangular matrix in place, block row by block row: a wide one's inverse takes as much memory as
    the matrix itself.
    """
    for start in range(0, len(lower), BLOCK):
        rows = lower[start : start + BLOCK]
        own = rows[:, start : start + BLOCK]
        own.copy_(torch.linalg.solve_triangular(own, torch.eye(len(own), dtype=lower.dtype), upper=False))
        rows[:, :start] = -(own @ (rows[:, :start] @ lower[:start, :start]))


def compensation_of(group: str, moments: torch.Tensor, lost: float = 0.0) -> Compensation:
    """The compensation for the modules that get the input of `group`; raises InputError when `moments` overflowed."""
    if not bool(torch.isfinite(moments).all()):
        raise InputError(
            f"{group}: the second moments of its input exceed FP32; use --weight-rounding nearest, or keep it in "
            f"BF16 with --skip {group}"
        )
    return compensation(moments, lost)


def gptq_codes(weight: torch.Tensor, scale: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    """E4M3 codes float8_e4m3fn [out, in] of `weight` [out, in] under `scale` float32 [out].

    Uncorrelated inputs that are exact give the codes of nearest rounding, bit for bit.
    """
    rows = max(1, VALUES // weight.shape[1])
    parts = zip(weight.split(rows), scale.split(rows), strict=True)
    return torch.cat([_rounded(some.float(), own, compensation) for some, own in parts])


def _rounded(weight: torch.Tensor, scale: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    wanted = ridge_weights(
        weight[:, compensation.order].T.contiguous(), compensation
    )  # as rows: one is rounded for all
    values, _ = gptq_round(wanted.clone(), scale, compensation.factor)
    descend(wanted, values, scale, compensation.moments)
    return values[torch.argsort(compensation.order)].T.to(CODE).contiguous()


def ridge_weights(wanted: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    """w* float32 [in, out] of the weights `wanted` float32 [in, out], both in the compensation's order."""
    if not bool(compensation.noise.any()):
        return wanted
    factor = compensation.factor
    return wanted - factor.T @ (factor @ (compensation.noise[:, None] * wanted))


def gptq_round(left: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the codes float32 [in, out] of weights `left` float32 [in, out], which is used up, under `scale`
    float32 [out], and the error (w - s c) H (w - s c)ᵀ of each channel, float32 [out].

    `factor` float32 [in, in]: of `compensation`.
    """
    values, total = torch.empty_like(left), torch.zeros_like(scale)
    for start in range(0, len(left), BLOCK):
        block = left[start : start + BLOCK]
        inner = factor[start : start + BLOCK, start : start + BLOCK]
        errors = torch.empty_like(block)
        for j, row in enumerate(block):
            values[start + j] = code_values(row, scale)
            errors[j] = (row - values[start + j] * scale) / inner[j, j]
            block[j + 1 :].addr_(inner[j, j + 1 :], errors[j], alpha=-1)
        total += errors.square().sum(0)
        left[start + BLOCK :].addmm_(factor[start : start + BLOCK, start + BLOCK :].T, errors, alpha=-1)
    return values, total


class Compensations:
    """The compensations of a run's modules.

    Those of the last two groups are kept: in a checkpoint's order o_proj comes between k_proj and q_proj.
    """

    def __init__(
        self,
        folder: Path,
        first: Mapping[str, str],
        lost: Mapping[str, float],
        unknown: Collection[str] = frozenset(),
    ):
        """Of the moments in `folder`; `first`: module -> the first of its group; `lost`: module -> the share of its
        input's energy that rounding takes; `unknown`: modules of whose input too little was seen.
        """
        self.folder, self.first, self.lost, self.unknown = folder, first, lost, unknown
        self._of_group = lru_cache(maxsize=2)(self._load)

    def of(self, module: str) -> Compensation | None:
        """That for the weight of `module`, None where it is unknown. Raises InputError when the moments overflowed."""
        return None if module in self.unknown else self._of_group(self.first.get(module, module), self.lost[module])

    def _load(self, group: str, lost: float) -> Compensation:
        return compensation_of(group, load_moments(self.folder, group), lost)
