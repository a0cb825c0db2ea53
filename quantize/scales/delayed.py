"""Delayed scaling: the scale of a batch follows from the amax of the batches before it.

Transformer Engine quantizes batch t with a scale made from a history of past amax values, because reading a tensor
twice (once for its amax, once to cast it) costs time. Its rules (user guide, "FP8 Delayed Scaling", and
`recipe.DelayedScaling`):

1. The history is a window of the last `amax_history_len` batches, or of all batches where there are fewer.
2. After each batch its amax joins the history, and the scale for the next batch is max_fp8 / amax of the history, over
   2^margin (Transformer Engine's scale is the reciprocal of ours). The amax of the history is the largest in the window
   (`max`) or the last one (`most_recent`).
3. Where that amax is zero, the scale stays as it was.
4. With an `interval` (up to release 1.x) the scale is computed once in so many batches; the history takes every batch.

The first batches have no history: Transformer Engine runs them with scale 1, and here they are not judged. Static
inference has no next batch; the method `delayed` takes the scale that the batch after the last one would have.
"""

import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ...options import Clipping
from ..codes.formats import Grid
from .clip import scale_of

Float32s = npt.NDArray[np.float32]


def amax_in_use(amax_batches: Float32s, clipping: Clipping) -> Float32s:
    """The amax that each batch's scale follows from, and that of a next batch, float32 [batches + 1].

    NaN where there is no history yet. `amax_batches` float32 [batches] in batch order, all measured.
    """
    batches = len(amax_batches)
    length = min(clipping.amax_history_len, batches) if clipping.amax_compute_algo == "max" else 1
    if not batches:
        return np.full(1, np.nan, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([np.zeros(length - 1, np.float32), amax_batches]), length
    )
    after = np.concatenate([[np.float32(0)], windows.max(axis=1)])  # of the history after t batches
    counts = np.arange(batches + 1)
    computed = np.where((counts % clipping.interval == 0) & (after > 0), counts, 0)  # a zero amax keeps the scale
    latest = np.maximum.accumulate(computed)
    in_use: Float32s = np.where(latest > 0, after[latest], np.nan).astype(np.float32)
    return in_use


def measured(amax_batches: Float32s) -> Float32s:
    """The amax of the batches that were measured, in their order."""
    amax: Float32s = amax_batches[~np.isnan(amax_batches)]
    return amax


def clip_delayed(amax_batches: Float32s, clipping: Clipping) -> float:
    """The clip, before the margin, that the batch after the last would be quantized with.

    Raises InputError when no scale was ever computed, because `interval` is larger than the number of batches.
    """
    clip = float(amax_in_use(measured(amax_batches), clipping)[-1])
    if np.isnan(clip):
        raise no_scale(clipping, len(measured(amax_batches)))
    return clip


def no_scale(clipping: Clipping, batches: int) -> InputError:
    """Make the error for an interval of more than `batches` batches."""
    return InputError(
        f"--interval {clipping.interval}",
        f"no scale is computed in {batches} batches",
        "give a smaller one, or more --samples",
    )


def saturated_batches(amax_batches: Float32s, format: Grid, clipping: Clipping) -> npt.NDArray[np.bool_]:
    """Tell whether each batch with a history saturates under its delayed scale, bool [batches with a history]."""
    amax = measured(amax_batches)
    in_use = amax_in_use(amax, clipping)[:-1]
    judged = ~np.isnan(in_use)
    scale = np.ldexp(scale_of(in_use[judged], format, clipping.scale_grid).astype(np.float64), clipping.margin)
    saturated: npt.NDArray[np.bool_] = amax[judged] > scale * format.max
    return saturated


def largest_jump(amax_batches: Float32s) -> float:
    """The largest ratio of a batch's amax to that of the batch before; 1.0 for fewer than two batches.

    Batches whose amax is zero are left out.
    """
    amax = measured(amax_batches)
    amax = amax[amax > 0].astype(np.float64)
    return float((amax[1:] / amax[:-1]).max(initial=1.0))
