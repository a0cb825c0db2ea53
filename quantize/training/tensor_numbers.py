"""The numbers of one tensor of a training step: its amax, and what it would lose in FP8, by its exact histogram.

By default a step's scale follows from the amax of steps before it, as Transformer Engine's delayed scaling has it
(`quantize.scales.clip`), so a value may saturate; the first step of all is scaled by its own amax.
"""

from dataclasses import dataclass

import numpy as np

from ...calibrate.measure.histogram import Histogram
from ...options import Clipping, WatchOptions
from ..codes.formats import E4M3, E5M2, Format
from ..scales.clip import Float32s, amax_in_use, saturation, scale_of, underflow

#: The formats of training: E4M3 for activations and weights, E5M2 for gradients (Micikevicius et al. 2022, arXiv
#: 2209.05433, section 3).
TRAINED = (E4M3, E5M2)
#: The columns of a tensor's numbers: `amax` and `rms` in the tensor's own unit, `zeros` a share of all values,
#: `not_finite` a number of values, `history` the amax that the scale is made for (0 without scaling); then shares for
#: each format.
COLUMNS = (
    "amax", "rms", "zeros", "not_finite", "history",
    *(f"{kind.name}_{share}" for kind in TRAINED for share in ("saturated", "underflow", "lost")),
)  # fmt: skip


@dataclass(frozen=True)
class FormatShares:
    """Shares of one tensor in one format: of the finite values that saturate, of the non-zero ones that become zero,
    and of the energy (sum of squares) that rounding loses.
    """

    saturated: float
    underflow: float
    lost: float


def history_of(amax_before: Float32s, length: int, amax_now: float) -> float:
    """The amax that a step's scale is made for: the largest of the last `length` of `amax_before` [steps], in their
    order, that are not zero; `amax_now`, the step's own, where there is none.
    """
    if not len(amax_before):
        return amax_now
    if (largest := float(amax_before[-length:].max())) > 0:
        return largest
    in_use = float(amax_in_use(amax_before, Clipping("delayed", amax_history_len=length))[-1])
    return amax_now if np.isnan(in_use) else in_use


def shares_in(histogram: Histogram, kind: Format, scale: float) -> FormatShares:
    """The shares of a tensor with `histogram` in the format `kind` under `scale`; all 0 for a tensor of zeros."""
    if histogram.amax == 0:
        return FormatShares(0.0, 0.0, 0.0)
    return FormatShares(
        saturation(histogram, kind, scale),
        underflow(histogram, kind, scale),
        lost_energy(histogram, kind, scale),
    )


def lost_energy(histogram: Histogram, kind: Format, scale: float) -> float:
    """The share of the sum of squares that rounding under `scale` loses, value by value: for one scale that takes a
    tenth of the time of `scales.clip.squared_error`, which sums over all patterns once for many scales.
    """
    values, counts = histogram.finite
    x = values.astype(np.float64)
    error = x - kind.round(values / np.float32(scale)) * np.float64(np.float32(scale))
    return float((error**2 * counts).sum() / (x**2 * counts).sum())


def tensor_numbers(histogram: Histogram, amax_before: Float32s, options: WatchOptions) -> list[float]:
    """The numbers of `COLUMNS` of a tensor, whose amax at the steps before was `amax_before` float32 [steps]."""
    values, counts = histogram.finite
    finite = max(int(counts.sum()), 1)
    amax, history = histogram.amax, 0.0
    if options.scaling != "none":
        history = history_of(amax_before if options.scaling == "delayed" else amax_before[:0], options.history, amax)
    numbers = [
        amax,
        float(np.sqrt((values.astype(np.float64) ** 2 * counts).sum() / finite)),
        float(counts[values == 0].sum() / max(histogram.samples, 1)),
        float(histogram.infinities + histogram.nans),
        history,
    ]
    for kind in TRAINED:
        scale = float(scale_of([history], kind)[0]) if history > 0 else 1.0
        shares = shares_in(histogram, kind, scale)
        numbers += [shares.saturated, shares.underflow, shares.lost]
    return numbers
