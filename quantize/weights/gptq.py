"""Round weights by GPTQ on the E4M3 grid: input by input, each compensating the errors of those before it.

Each code is then revised once all are known by coordinate descent. GPTQ minimizes the squared error of the GEMM.
For a channel w with codes c under scale s it is

    Σ_tokens ((w - s c) · x)² = (w - s c) H (w - s c)ᵀ,    H = Σ x xᵀ.

Rounding to nearest minimizes this only for uncorrelated inputs, where H is diagonal. Frantar et al. 2022 (GPTQ,
algorithm 1) fix one input at a time: once weight j is rounded with the error e, the best update of the weights that are
not rounded yet is -e · U[j, j:] / U[j, j], with the upper Cholesky factor U of H^-1 = Uᵀ U; it raises the squared error
by e² / U[j, j]². The grid is that of `encode`: floating-point codes here, integers in the paper. Columns are rounded in
blocks, and the errors of a block reach the rest of the matrix as one GEMM.

Inputs are quantized too, and weights can compensate that as well. Let the GEMM get x̂ = x + e, with e uncorrelated to
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

Coordinate descent after GPTQ changes one code at a time as long as the squared error of the GEMM falls.

Let R = w - s c be the rounding error and G = H R. Moving weight j by d changes the error R H Rᵀ by d² H[j, j] - 2 d
G[j]: a parabola whose minimum is at d = G[j] / H[j, j], and on the grid at the code nearest to there. A pass goes over
all inputs, for all channels at once; passes end when no change lowers the error, or a pass gains little. Inputs are
taken in blocks: within a block G is updated with each change, and the rest of G by one GEMM for the block.

GPTQ chooses each code when only those before it are known. Here each code is chosen when all others are known, so the
error never grows. The price is a GEMM of H and the weights for each pass: twice the cost of GPTQ.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from ...calibrate.measure.held_out import has_own_input, input_name, load_held_out
from ...calibrate.measure.moments import load_moments, shrink
from ...calibrate.model.launching import launched
from ...core.errors import InputError
from ..codes.blocks import SIDE
from ..codes.encoding import CODE, nearest_values
from .mse import workers
from .no_waiting import certainly, factor_in_place, on_host

#: Passes at most, and the share of the error that a pass must take off for another to follow.
PASSES = 8
WORTHWHILE = 0.005
#: Input channels that are changed, or rounded, before the rest of the matrix is updated; and before the rest of the
#: block is: the weights of a run stay in the processor's cache.
BLOCK = 128
RUN = 16
#: Share of the way to the minimum of a parabola that is left out, so that FP32 rounding decides no tie.
MARGIN = 1e-3


def descend(wanted: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor) -> None:
    """Change `values` float32 [in, out], the values of E4M3 codes, in place until a pass lowers the error too little.

    `wanted` float32 [in, out]: the weights to approximate; `scale` float32 [out]: of the codes; `moments` float32
    [in, in]: H, whose diagonal is positive. On another device than the host all passes are made, and change nothing
    once one was too little.
    """
    wanted = wanted / scale  # errors and gradients are in units of each channel's scale
    lost = wanted - values
    weights = scale.square()
    gradient = moments @ lost
    before = _total(lost, gradient, weights)
    steps = (1 - MARGIN) / moments.diagonal()
    for _ in range(PASSES):
        for start in range(0, len(values), BLOCK):
            block = slice(start, start + BLOCK)
            moved, remaining = _moved(values, gradient, moments, steps, start)
            for rows in remaining:
                gradient[rows].addmm_(moments[rows, block], moved, alpha=-1)
        torch.sub(wanted, values, out=lost)
        after = _total(lost, gradient, weights)
        ended = after >= before * (1 - WORTHWHILE)
        if certainly(ended):
            break
        steps = steps.masked_fill(ended, 0)
        before = after
    values.copysign_(torch.where(values == 0, wanted, values))  # zeros have the sign that nearest rounding gives them


def block_kernels() -> ModuleType:
    """The kernels of a block, which import Triton."""
    return import_module(".block_kernels", __package__)


#: The change of each weight of a block, float32 [block, out], and the rows of the gradient that are still to follow it.
Moved = tuple[torch.Tensor, tuple[slice, ...]]


def _moved(
    values: torch.Tensor, gradient: torch.Tensor, moments: torch.Tensor, steps: torch.Tensor, start: int
) -> Moved:
    """Change the `values` of the block from input `start` on: by a kernel where one starts."""
    block = slice(start, start + BLOCK)
    of_block = values[block], gradient[block], moments[block, block], steps[block]

    def kernel() -> Moved:
        return block_kernels().triton_descend(*of_block), (slice(None),)

    others = slice(start), slice(start + BLOCK, None)
    return launched(values.device, kernel, lambda: (descend_block(*of_block), others))


def _total(lost: torch.Tensor, gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add up the errors of all channels by their `weights` [out], float64 []."""
    return (lost * gradient).sum(0, dtype=torch.float64) @ weights.double()


def descend_block(
    values: torch.Tensor, gradient: torch.Tensor, moments: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Change the `values` and the `gradient` of a block; return the change of each weight, float32 [block, out].

    `steps` float32 [block]: what the gradient is multiplied by for the way to a parabola's minimum.
    """
    moved = torch.empty_like(values)
    olds = values.unbind()
    slopes = gradient.unbind()
    moves = moved.unbind()
    step_of = steps.unbind()
    for start in range(0, len(values), RUN):
        run = slice(start, start + RUN)
        run_gradient = gradient[run]
        columns = moments[run, run].unbind(1)
        for j, column in enumerate(columns, start):
            new = nearest_values(torch.addcmul(olds[j], slopes[j], step_of[j]))
            torch.sub(new, olds[j], out=moves[j])
            run_gradient.addr_(column, moves[j], alpha=-1)
        values[run] += moved[run]  # exact: both are codes
        gradient[:start].addmm_(moments[:start, run], moved[run], alpha=-1)
        gradient[start + RUN :].addmm_(moments[start + RUN :, run], moved[run], alpha=-1)
    return moved


#: Share of H's mean diagonal that is added to its diagonal.
DAMPING = 0.001
#: Share of each correlation that is taken off where an expert's H is shrunk.
EXPERT_SHRINKAGE = 0.3
#: Values that are rounded together, at most: by one thread of the host, and on another device, where they take 20
#: bytes each. They are whole output channels, as many whatever the number of threads is, since a descent ends for all
#: of them at once.
VALUES = 1 << 23
DEVICE_VALUES = 1 << 27
#: Rows of a matrix that are put in reverse order together.
REVERSED = 1024


@dataclass(frozen=True)
class Compensation:
    """The second moments of an input and their Cholesky factor, by which GPTQ rounds.

    `order` int64 [in]: the order in which input channels are rounded; the others are in this order. `noise` float32
    [in]: the diagonal of N, None for exact inputs; `moments` float32 [in, in]: H + N, damped; `factor` float32
    [in, in]: U, upper triangular.
    """

    order: torch.Tensor
    noise: torch.Tensor | None
    moments: torch.Tensor
    factor: torch.Tensor


def compensation(moments: torch.Tensor, lost: float = 0.0) -> Compensation:
    """Factor the second moments float32 [in, in] of an input, sums or means alike.

    `lost`: the share of the input's energy that its quantization loses.
    """
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    ordered = moments[order[:, None], order]
    del moments  # of a wide input each matrix is gigabytes
    reverse = reversed_as(ordered, torch.float64)
    mean = reverse.diagonal().mean()
    noise = lost * ordered.diagonal() if lost else None
    if noise is not None:
        reverse.diagonal().add_(noise.flip(0))
    reverse.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1.0))
    ordered.diagonal().copy_(reverse.diagonal().flip(0))
    factor_in_place(reverse)
    invert(reverse)
    return Compensation(order, noise, ordered, reversed_as(reverse, torch.float32))


def reversed_as(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The square `matrix` with rows and columns in reverse order, in `dtype`, without a third matrix."""
    result = torch.empty_like(matrix, dtype=dtype)
    for rows, last in zip(matrix.split(REVERSED), range(len(matrix), 0, -REVERSED), strict=True):
        result[last - len(rows) : last] = rows.flip(0, 1)
    return result


def invert(lower: torch.Tensor) -> None:
    """Invert a lower triangular matrix in place, block row by block row, to save the memory of a second matrix."""
    unit = torch.eye(BLOCK, dtype=lower.dtype, device=lower.device)
    for start in range(0, len(lower), BLOCK):
        rows = lower[start : start + BLOCK]
        diagonal = rows[:, start : start + BLOCK]
        size = len(diagonal)
        diagonal.copy_(torch.linalg.solve_triangular(diagonal, unit[:size, :size], upper=False))
        rows[:, :start] = -(diagonal @ (rows[:, :start] @ lower[:start, :start]))


def finite_moments(group: str, moments: torch.Tensor) -> torch.Tensor:
    """Return the second moments of the input of `group`; raises InputError when they overflowed."""
    if not bool(torch.isfinite(moments).all()):
        raise InputError(
            group,
            "the second moments of its input exceed FP32",
            f"use --weight-rounding nearest, or keep it in BF16 with --skip {group}",
        )
    return moments


def gptq_codes(weight: torch.Tensor, scale: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    """E4M3 codes float8_e4m3fn [out, in] of `weight` [out, in] under `scale` float32 [out] or [blocks, blocks].

    Where inputs are uncorrelated and exact, these are the codes of nearest rounding, bit for bit.
    """
    if scale.dim() == 2:
        bands = zip(weight.split(SIDE), scale, strict=True)
        return torch.cat([_rounded_band(band.float(), of_band, compensation) for band, of_band in bands])
    at_once = VALUES if on_host(weight) else DEVICE_VALUES
    rows = max(1, at_once // weight.shape[1])
    parts = [*zip(weight.split(rows), scale.split(rows), strict=True)]
    if len(parts) == 1 or not on_host(weight):
        return torch.cat([_rounded(part.float(), of_part, compensation) for part, of_part in parts])
    with workers() as (pool, _):
        return torch.cat([*pool.map(lambda part: _rounded(part[0].float(), part[1], compensation), parts)])


def _rounded(weight: torch.Tensor, scale: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    wanted = ridge_weights(
        weight[:, compensation.order].T.contiguous(), compensation
    )  # inputs are rows: each is rounded for all channels at once
    values = gptq_round(wanted.clone(), scale, compensation.factor)
    descend(wanted, values, scale, compensation.moments)
    return values[torch.argsort(compensation.order)].T.to(CODE).contiguous()


def _rounded_band(weight: torch.Tensor, scale: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    """Round `weight` float32 [rows, in], one row of blocks under `scale` float32 [blocks].

    Each input has one scale d in all rows, so that the GEMM is that of the weights w / d and the inputs d x, whose
    second moments are d H d, and whose factor is U / d.
    """
    of_inputs = scale.repeat_interleave(SIDE)[: weight.shape[1]]
    d = of_inputs[compensation.order]
    scaled = Compensation(
        compensation.order,
        None if compensation.noise is None else compensation.noise * d.square(),
        compensation.moments * d[:, None] * d,
        compensation.factor / d,
    )
    return _rounded(weight / of_inputs, torch.ones(len(weight), device=weight.device), scaled)


def ridge_weights(wanted: torch.Tensor, compensation: Compensation) -> torch.Tensor:
    """The weights w* float32 [in, out] of `wanted` float32 [in, out], both in the order of `compensation`."""
    if compensation.noise is None:
        return wanted
    factor = compensation.factor
    return wanted - factor.T @ (factor @ (compensation.noise[:, None] * wanted))


def gptq_round(left: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Round the weights `left` float32 [in, out] under `scale` float32 [out] by GPTQ.

    `factor` float32 [in, in]: U of `Compensation`. Returns the values of the codes, float32 [in, out]. `left` is
    overwritten by e / U[j, j] of each rounding, in units of the scale: the sum of their squares is the channel's error.
    """
    left.div_(scale)  # from here on in units of each channel's scale
    values = torch.empty_like(left)
    passed_on = -factor.diagonal().reciprocal()
    for start in range(0, len(left), BLOCK):
        block = slice(start, start + BLOCK)
        _rounded_block(left[block], values[block], factor[block, block], passed_on[block])
        left[start + BLOCK :].addmm_(factor[block, start + BLOCK :].T, left[block], alpha=-1)
    return values


def _rounded_block(left: torch.Tensor, values: torch.Tensor, factor: torch.Tensor, passed_on: torch.Tensor) -> None:
    """Round a block as `round_block` does: by a kernel where one starts."""

    def kernel() -> None:
        block_kernels().triton_round(left, values, factor, passed_on)

    launched(left.device, kernel, lambda: round_block(left, values, factor, passed_on))


def round_block(left: torch.Tensor, values: torch.Tensor, factor: torch.Tensor, passed_on: torch.Tensor) -> None:
    """Round the inputs of a block, `left` [block, out], one after the other into `values`; leave their errors over the
    diagonal of `factor` [block, block] in `left`.

    `passed_on` float32 [block]: the share of an error that others take, -1 / U[j, j]. The errors of every `RUN` inputs
    reach the rest of the block as one GEMM.
    """
    errors = torch.empty_like(left)
    diagonal = factor.diagonal()
    rows = left.unbind()
    codes = values.unbind()
    lost = errors.unbind()
    for start in range(0, len(left), RUN):
        run = slice(start, start + RUN)
        run_rows = left[run]
        shares = factor[run, run].triu(1).mul_(passed_on[run, None])
        for j, of_run in enumerate(shares.unbind(), start):
            codes[j].copy_(nearest_values(rows[j]))
            torch.sub(rows[j], codes[j], out=lost[j])
            run_rows.addr_(of_run, lost[j])
        errors[run].div_(diagonal[run, None])
        left[start + RUN :].addmm_(factor[run, start + RUN :].T, errors[run], alpha=-1)
    values.copysign_(left)
    left.copy_(errors)


@dataclass(frozen=True)
class MeasuredWindows:
    """The windows that second moments are of: the `tokens` of one, by whose number the moments of those behind the
    first are shrunk (None: they are not), and module -> how often its `first` one counts, once where it has none.
    """

    tokens: int | None = None
    first: Mapping[str, float] = field(default_factory=dict)


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
        experts: Collection[str] = frozenset(),
        windows: MeasuredWindows = MeasuredWindows(),
    ):
        """Read moments from `folder`.

        `first`: module -> the first module of its group; `lost`: module -> the share of its input's energy that
        quantization loses; `unknown`: modules whose input saw too few tokens; `experts`: the names of the modules that
        hold a layer's experts; `windows`: that the moments are of.
        """
        self.folder = folder
        self.first = first
        self.lost = lost
        self.unknown = unknown
        self.windows = windows
        self.experts = experts
        self._inside = tuple(f"{layer}." for layer in experts)
        self._of_group = lru_cache(maxsize=2)(self._load)  # shrunk ones are of one module, and read once

    def get(self, module: str, device: str = "cpu") -> Compensation | None:
        """The compensation of `module` on `device`; None where it is unknown. Raises InputError when the moments
        overflowed.
        """
        if module in self.unknown:
            return None
        return self._of_group(self.first.get(module, module), self.lost[module], self.windows.first.get(module), device)

    def shrunk(self, module: str, device: str = "cpu") -> Compensation | None:
        """The compensation by shrunk moments of an expert's `module` whose moments are of the expert's tokens alone;
        None for others.
        """
        if module in self.unknown or not self.judges(module) or not has_own_input(module):
            return None
        moments = shrink(load_moments(self.folder, module), EXPERT_SHRINKAGE)
        return compensation(finite_moments(module, moments.to(device)), self.lost[module])

    def judges(self, module: str) -> bool:
        """Tell whether the codes of `module` are judged by held-out tokens: those of experts are."""
        return module.startswith(self._inside)

    def held_out(self, module: str) -> torch.Tensor | None:
        """Held-out tokens of the input of an expert's `module`, BF16 [tokens, in]; None where there are none."""
        return load_held_out(self.folder, input_name(module))

    def _load(self, group: str, lost: float, first: float | None, device: str) -> Compensation:
        """Load and factor the moments of `group`, in which the first token counts `first` times; None: as others."""
        count = 1.0 if first is None else first
        # handed on without a name here, so that `compensation` can let go of it
        return compensation(
            finite_moments(group, load_moments(self.folder, group, count, self.windows.tokens).to(device)), lost
        )
