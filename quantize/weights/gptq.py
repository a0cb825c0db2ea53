"""Round weights by GPTQ on the E4M3 grid: input by input, each compensating the errors of those before it.

Each code is then revised once all are known (`coordinate_descent`). GPTQ minimizes the squared error of the product.
For a channel w with codes c under scale s it is

    Σ_tokens ((w - s c) · x)² = (w - s c) H (w - s c)ᵀ,    H = Σ x xᵀ.

Rounding to nearest minimizes this only for uncorrelated inputs, where H is diagonal. Frantar et al. 2022 (GPTQ,
algorithm 1) fix one input at a time: once weight j is rounded with the error e, the best update of the weights that are
not rounded yet is -e · U[j, j:] / U[j, j], with the upper Cholesky factor U of H^-1 = Uᵀ U; it raises the squared error
by e² / U[j, j]². The grid is that of `encode`: floating-point codes here, integers in the paper. Columns are rounded in
blocks, and the errors of a block reach the rest of the matrix as one product.

Inputs are quantized too, and weights can compensate that as well. Let the product get x̂ = x + e, with e uncorrelated to
x and of second moments N. The best weights ŵ minimize

    Σ (w · x - ŵ · x̂)² = (ŵ - w*) (H + N) (ŵ - w*)ᵀ + a constant,    w* = w - w N (H + N)^-1.

w* is a ridge regression, as noise on inputs always makes one (Bishop 1995, "Training with Noise is Equivalent to
Tikhonov Regularization"): where inputs nearly repeat each other, w* ignores the differences between them that
quantization made. N is diagonal: the energy of each input times the share that quantization loses by the histogram.
Activations in two terms lose next to nothing, so that w* is w.

Inputs are rounded in falling order of H's diagonal, so that the errors of the heaviest inputs have the most weights
left to compensate them. Scales stay as `mse` chose them: choosing each channel's best of five to 24 nearby scales, by
the sum of e² / U², lowers the error by 1 to 2 %, and the KL of the model not at all.

U needs no inverse of H: reverse H in both axes, factor it, invert the factor and reverse that. This halves the work and
meets only the square root of the condition number. It is computed in FP64, since one direction can hold most of the
energy of a wide input, and FP32 then rounds H to an indefinite matrix, whatever the damping. H is damped by a
thousandth of its mean diagonal, a tenth of the paper's. With exact activations, ten times or a third of that give the
same result; more of it hides N (`docs/decisions/0042`). So there is nothing to choose on held-out text. An input that
is always zero is correlated with no other, and is rounded to nearest.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ...calibrate.measure.moments import load_moments
from ...core.errors import InputError
from ..codes.encoding import CODE, nearest_values
from .coordinate_descent import descend
from .workers import workers

#: Share of H's mean diagonal that is added to its diagonal.
DAMPING = 0.001
#: Input channels rounded before their errors are passed on to the rest of the matrix.
BLOCK = 128
#: Of these, inputs whose errors are passed on one by one: their weights stay in the processor's cache.
RUN = 16
#: Values that one thread rounds together.
VALUES = 1 << 23


@dataclass(frozen=True)
class Compensation:
    """The second moments of an input and their Cholesky factor, by which GPTQ rounds.

    `order` int64 [in]: the order in which input channels are rounded; the others are in this order. `noise` float32
    [in]: the diagonal of N; `moments` float32 [in, in]: H + N, damped; `factor` float32 [in, in]: U, upper triangular.
    """

    order: torch.Tensor
    noise: torch.Tensor
    moments: torch.Tensor
    factor: torch.Tensor


def compensation(moments: torch.Tensor, lost: float = 0.0) -> Compensation:
    """Factor the second moments float32 [in, in] of an input, sums or means alike.

    `lost`: the share of the input's energy that its quantization loses.
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
    """Invert a lower triangular matrix in place, block row by block row, to save the memory of a second matrix."""
    for start in range(0, len(lower), BLOCK):
        rows = lower[start : start + BLOCK]
        diagonal = rows[:, start : start + BLOCK]
        diagonal.copy_(
            torch.linalg.solve_triangular(diagonal, torch.eye(len(diagonal), dtype=lower.dtype), upper=False)
        )
        rows[:, :start] = -(diagonal @ (rows[:, :start] @ lower[:start, :start]))


def compensation_of(group: str, moments: torch.Tensor, lost: float = 0.0) -> Compensation:
    """Factor the second moments of the input of `group`; raises InputError when `moments` overflowed."""
    if not bool(torch.isfinite(moments).all()):
        raise InputError(
            group,
            "the second moments of its input exceed FP32",
            f"use --weight-rounding nearest, or keep it in BF16 with --skip {group}",
        )
    return compensation(moments, lost)


def gptq_codes(weight: torch.Tensor, scale: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    """E4M3 codes float8_e4m3fn [out, in] of `weight` [out, in] under `scale` float32 [out].

    Where inputs are uncorrelated and exact, these are the codes of nearest rounding, bit for bit.
    """
    with workers() as (pool, threads):
        rows = max(1, min(VALUES // weight.shape[1], -(-len(weight) // threads)))
        parts = zip(weight.split(rows), scale.split(rows), strict=True)
        return torch.cat([*pool.map(lambda part: _rounded(part[0].float(), part[1], compensation), parts)])


def _rounded(weight: torch.Tensor, scale: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    wanted = ridge_weights(
        weight[:, compensation.order].T.contiguous(), compensation
    )  # inputs are rows: each is rounded for all channels at once
    values, _ = gptq_round(wanted.clone(), scale, compensation.factor)
    descend(wanted, values, scale, compensation.moments)
    return values[torch.argsort(compensation.order)].T.to(CODE).contiguous()


def ridge_weights(wanted: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    """The weights w* float32 [in, out] of `wanted` float32 [in, out], both in the order of `compensation`."""
    if not bool(compensation.noise.any()):
        return wanted
    factor = compensation.factor
    return wanted - factor.T @ (factor @ (compensation.noise[:, None] * wanted))


def gptq_round(left: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the weights `left` float32 [in, out], which are overwritten, under `scale` float32 [out], by GPTQ.

    `factor` float32 [in, in]: U of `Compensation`. Returns the values of the codes, float32 [in, out], and the error
    (w - s c) H (w - s c)ᵀ of each channel, float32 [out].
    """
    left.div_(scale)  # from here on in units of each channel's scale
    values, total = torch.empty_like(left), torch.zeros_like(scale)
    for start in range(0, len(left), BLOCK):
        block = slice(start, start + BLOCK)
        errors = _round_block(left[block], values[block], factor[block, block])
        total += errors.square().sum(0)
        left[start + BLOCK :].addmm_(factor[block, start + BLOCK :].T, errors, alpha=-1)
    return values, total.mul_(scale.square())


def _round_block(left: torch.Tensor, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Round the inputs of a block, `left` [block, out], one after the other into `values`; return their errors over the
    diagonal of `factor` [block, block].

    The errors of every `RUN` inputs reach the rest of the block as one product.
    """
    errors = torch.empty_like(left)
    diagonal = factor.diagonal()
    inverse = diagonal.reciprocal().tolist()
    rows, codes, lost = left.unbind(), values.unbind(), errors.unbind()
    for start in range(0, len(left), RUN):
        run = slice(start, start + RUN)
        own = left[run]
        for j, passed_on in enumerate(factor[run, run].triu(1).unbind(), start):
            codes[j].copy_(nearest_values(rows[j]))
            torch.sub(rows[j], codes[j], out=lost[j])
            own.addr_(passed_on, lost[j], alpha=-inverse[j])
        errors[run].div_(diagonal[run, None])
        left[start + RUN :].addmm_(factor[run, start + RUN :].T, errors[run], alpha=-1)
    values.copysign_(left)
    return errors


class Compensations:
    """Loads and factors the second moments of a run's modules.

    The last two groups stay in memory: in a checkpoint's order o_proj comes between k_proj and q_proj.
    """

    def __init__(
        self,
        folder: Path,
        first: Mapping[str, str],
        lost: Mapping[str, float],
        unknown: Collection[str] = frozenset(),
    ):
        """Read moments from `folder`.

        `first`: module -> the first module of its group; `lost`: module -> the share of its input's energy that
        quantization loses; `unknown`: modules whose input saw too few tokens.
        """
        self.folder, self.first, self.lost, self.unknown = folder, first, lost, unknown
        self._of_group = lru_cache(maxsize=2)(self._load)

    def get(self, module: str) -> Compensation | None:
        """The compensation of `module`; None where it is unknown. Raises InputError when the moments overflowed."""
        return None if module in self.unknown else self._of_group(self.first.get(module, module), self.lost[module])

    def _load(self, group: str, lost: float) -> Compensation:
        return compensation_of(group, load_moments(self.folder, group), lost)
