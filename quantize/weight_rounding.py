"""Round the weights of a channel one after the other, each making up for the errors before it (GPTQ on the E4M3 grid).

What counts is the error of the product, for a channel w with codes c under scale s

    Σ_tokens ((w - s c) · x)² = (w - s c) H (w - s c)ᵀ,    H = Σ x xᵀ,

which nearest rounding takes for a sum over weights, as if inputs were not correlated. Frantar et al. 2022 (GPTQ,
algorithm 1) fix one input at a time: once weight j is rounded and off by e, the best move of those not rounded yet is
-e · U[j, j:] / U[j, j] with the upper Cholesky factor U of H^-1 = Uᵀ U. The grid is whatever `encode` rounds to: here
floating-point codes under scales chosen before, where they use integers. Columns go in blocks, and a block's errors
reach the rest of the matrix as one product.

U needs no inverse of H: reversed, H has a Cholesky factor whose inverse, reversed, is U; half the work, and the square
root of its condition number. It is computed in FP64: one direction can hold most of the energy of a wide input, and
FP32 then rounds H away from positive definite, whatever the damping. H is damped by a hundredth of its mean diagonal,
as in the paper; an input that was never anything but zero is correlated with no other, and is rounded to nearest.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from ..calibrate.measure.moments import load_moments
from ..errors import InputError
from .linear import CODE, encode

#: Share of H's mean diagonal that is added to its diagonal.
DAMPING = 0.01
#: Input channels rounded before their errors are passed on to the rest of the matrix.
BLOCK = 128


def compensation(moments: torch.Tensor) -> torch.Tensor:
    """The factor U, upper triangular float32 [in, in], of the inverse of damped `moments` float32 [in, in], sums or
    means alike.
    """
    damped = moments.double().flip(0, 1)
    diagonal = damped.diagonal()
    mean = float(diagonal.mean())
    diagonal += DAMPING * mean if mean > 0 else 1.0
    lower = torch.linalg.cholesky(damped)
    identity = torch.eye(len(lower), dtype=lower.dtype)
    inverse: torch.Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse.flip(0, 1).float().contiguous()


def compensated_codes(weight: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """E4M3 codes float8_e4m3fn [out, in] of `weight` [out, in] under `scale` float32 [out], rounded in the order of the
    inputs.

    `factor` float32 [in, in]: of `compensation`. A diagonal one gives the codes of nearest rounding, bit for bit.
    """
    left = weight.float().T.contiguous()  # input channels as rows: each is rounded at once for all outputs
    codes = torch.empty(left.shape, dtype=CODE)
    for start in range(0, len(left), BLOCK):
        block = left[start : start + BLOCK]
        inner = factor[start : start + BLOCK, start : start + BLOCK]
        errors = torch.empty_like(block)
        for j, row in enumerate(block):
            codes[start + j] = encode(row, scale)
            errors[j] = (row - codes[start + j].float() * scale) / inner[j, j]
            block[j + 1 :].addr_(inner[j, j + 1 :], errors[j], alpha=-1)
        left[start + BLOCK :].addmm_(factor[start : start + BLOCK, start + BLOCK :].T, errors, alpha=-1)
    return codes.T.contiguous()


class Compensations:
    """The factors of a run's modules.

    Those of the last two groups are kept: in a checkpoint's order o_proj comes between k_proj and q_proj.
    """

    def __init__(self, folder: Path, first: Mapping[str, str]):
        """Of the moments in `folder`; `first`: module -> the first of its group."""
        self.folder, self.first = folder, first
        self._of_group = lru_cache(maxsize=2)(self._load)

    def of(self, module: str) -> torch.Tensor:
        """The factor for the weight of `module`. Raises InputError when the moments overflowed."""
        return self._of_group(self.first.get(module, module))

    def _load(self, group: str) -> torch.Tensor:
        moments = load_moments(self.folder, group)
        if not bool(torch.isfinite(moments).all()):
            raise InputError(
                f"{group}: the second moments of its input exceed FP32; use --weight-rounding nearest, or keep it in "
                f"BF16 with --skip {group}"
            )
        return compensation(moments)
