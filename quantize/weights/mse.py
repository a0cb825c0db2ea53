"""Find the scale of least squared error for each row of a weight matrix, exactly and without quantizing any value.

An E4M3 grid under scale 2s is the grid under s, but for its ends: it starts coarser by a bit and saturates an octave
later. So the best of *all* scales lies between half and twice the amax scale, and each BF16 number in there is tried.
From twice the amax scale on, half the scale has the same grid values and more, and saturates nowhere. Below half of it,
doubling the scale saves the amax an eighth of amax² or more, and costs each value the square of half a subnormal step,
(2^-10 / 448 · amax)², or less: a row would need more than 2^34 values for that to matter.

A row's BF16 magnitudes are counted by bit pattern relative to the exponent of its amax. Thus one table of errors
(pattern, candidate) serves all rows, and the errors of all candidates on all rows are counts times table. The patterns
are grouped by octave:

- the top two, where a candidate may saturate: a row of the table for each pattern;
- eleven in the middle, where every candidate is in its normal range, so that the error of an octave is a quarter of
  that of the octave above: counts are folded into one octave of 128 mantissas, exactly;
- the bottom eight, where candidates have their subnormals: few values of a trained weight lie there, and their rows of
  the table are added one by one;
- below, every candidate rounds to zero: the error is the same for all, and is left out.

Trying every candidate on every value (ModelOpt: 39 multiples of the amax, one pass each) would cost 256 passes; here
one pass counts.

The parts of a matrix run on a thread each, where torch would split each of many small operators over its threads: an
operator on a few thousand values takes less time than its threads take to meet.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from ...calibrate.measure.histogram import magnitudes
from ...options import ScaleGrid
from ..codes.encoding import scales_of
from ..codes.formats import E4M3
from ..scales.clip import scale_of
from .no_waiting import on_host


@contextmanager
def workers() -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """Yield a pool of as many threads as torch has, and their number; torch's operators use one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool, threads
    finally:
        torch.set_num_threads(threads)


OCTAVE = 1 << 7
#: Octaves of magnitudes from the amax down, and those at the top and bottom whose errors do not scale by octave.
OCTAVES = 21
TOP = 2
BOTTOM = 8
BINS = OCTAVES * OCTAVE
#: Rows counted together: their bins fit into one int16, for which `bincount` is fastest and stays in the cache.
GROUP = (1 << 15) // BINS
#: Rows in one task: its counts stay in the cache, and memory does not grow with the matrix.
BLOCK = 8 * GROUP
#: Values of a whole weight that are counted together; and those of rows on another device, each of which has an index
#: of 8 bytes.
VALUES = 1 << 20
DEVICE_VALUES = 1 << 26


@dataclass(frozen=True)
class ErrorTable:
    """Squared errors of each magnitude under each candidate scale, for rows whose amax lies in [1, 2).

    `candidates` float32 [candidates], ascending; `folded` float32 [128 + 256, candidates]: the middle octaves folded
    into [1/4, 1/2), then the top two; `bottom` float32 [8 · 128, candidates]; `octaves` float32 [11]: what the errors
    of the middle octaves are multiplied by.
    """

    candidates: torch.Tensor
    folded: torch.Tensor
    bottom: torch.Tensor
    octaves: torch.Tensor


@cache
def error_table(device: torch.device = torch.device("cpu"), grid: ScaleGrid = "bf16") -> ErrorTable:
    """The table of errors, on `device`, of the scales on `grid`, which is the same for every row of every matrix."""
    if device.type != "cpu":
        return ErrorTable(**{name: tensor.to(device) for name, tensor in vars(error_table(grid=grid)).items()})
    top = (127 + 1) << 7  # the pattern of 2
    values = magnitudes(np.arange(top - BINS, top))
    lowest, highest = (
        int(scale_of(amax, E4M3).view(np.uint32) >> 16)
        for amax in (np.float32(0.5), np.nextafter(np.float32(4), np.float32(0)))
    )
    step = 1 if grid == "bf16" else OCTAVE
    candidates = magnitudes(np.arange(-(-lowest // step) * step, highest + 1, step))
    rounded = E4M3.round(values[:, None] / candidates) * candidates.astype(np.float64)
    error = torch.from_numpy(((values.astype(np.float64)[:, None] - rounded) ** 2).astype(np.float32))
    error[0] = 0  # the bin of all that rounds to zero
    middle = OCTAVES - TOP - BOTTOM
    octaves = torch.ldexp(torch.ones(middle), 2 * torch.arange(1 - middle, 1))
    folded = error[-(TOP + 1) * OCTAVE :]
    return ErrorTable(torch.from_numpy(candidates), folded, error[: BOTTOM * OCTAVE], octaves)


def mse_scales(weight: torch.Tensor, grid: ScaleGrid = "bf16") -> torch.Tensor:
    """The scale on `grid` with the least squared error for each row of a finite BF16 `weight` [out, in], float32 [out].

    It is the best of all scales there, up to the FP32 rounding of the summed errors. A row whose amax lies within
    `OCTAVES` octaves of BF16's smallest number takes its amax scale.
    """
    error_table(weight.device, grid)  # made once, by this thread
    bits = weight.detach().contiguous().view(torch.int16)
    if not on_host(weight):
        return torch.cat([_block_scales(rows, grid) for rows in bits.split(max(1, DEVICE_VALUES // weight.shape[1]))])
    with workers() as (pool, _):
        return torch.cat([*pool.map(partial(_block_scales, grid=grid), bits.split(BLOCK))])


def _block_scales(bits: torch.Tensor, grid: ScaleGrid) -> torch.Tensor:
    """The MSE scales of rows whose BF16 bit patterns are `bits` int16 [rows, in], float32 [rows]."""
    patterns = bits & 0x7FFF
    amax = patterns.amax(1)
    return _best_scales(_counts(patterns, amax >> 7), amax, grid)


def mse_scale(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The BF16 scale with the least squared error for all values of finite BF16 `weights` together, float32 [1]."""
    parts = [part for weight in weights for part in weight.detach().contiguous().view(-1).split(VALUES)]
    amax = torch.stack([torch.maximum(part.max(), -part.min()) for part in parts]).amax()[None].view(torch.int16)
    counts = sum(_counts(part.view(torch.int16)[None] & 0x7FFF, amax >> 7) for part in parts)
    assert isinstance(counts, torch.Tensor), "there are weights"
    return _best_scales(counts, amax)


def _best_scales(counts: torch.Tensor, amax: torch.Tensor, grid: ScaleGrid = "bf16") -> torch.Tensor:
    """The MSE scales on `grid` of rows with these `counts` [rows, OCTAVES, 128], float32 [rows]; `amax`: the BF16 bit
    pattern of each row's largest magnitude, int16 [rows].
    """
    table = error_table(counts.device, grid)
    best = table.candidates[(_folded(counts, table) @ table.folded + _bottom_errors(counts, table.bottom)).argmin(1)]
    exponent = (amax >> 7).int()
    powers = (exponent << 23).view(torch.float32)  # 2^(exponent - 127), exactly
    by_amax = scales_of((amax.int() << 16).view(torch.float32), E4M3, grid)
    return torch.where(exponent > OCTAVES, best * powers, by_amax)


def _counts(patterns: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Count each magnitude in each row, by octaves below 2^exponent, [rows, OCTAVES, 128].

    Bin 0 counts all smaller magnitudes too.
    """
    rows = len(patterns)
    floor = (exponent - (OCTAVES - 1)) << 7
    if not on_host(patterns):  # `bincount` would wait for the largest key
        bins = (torch.maximum(patterns, floor[:, None]) - floor[:, None]).long()
        one = torch.ones((1, 1), dtype=torch.int32, device=patterns.device)
        counts = torch.zeros((rows, BINS), dtype=torch.int32, device=patterns.device)
        return counts.scatter_add_(1, bins, one.expand_as(bins)).view(rows, OCTAVES, OCTAVE)
    first_bin = (torch.arange(rows) % GROUP * BINS).to(torch.int16)
    keys = torch.maximum(patterns, floor[:, None]).add_((first_bin - floor)[:, None])
    groups = [torch.bincount(group.flatten(), minlength=GROUP * BINS) for group in keys.split(GROUP)]
    return torch.cat(groups).view(-1, OCTAVES, OCTAVE)[:rows]


def _folded(counts: torch.Tensor, table: ErrorTable) -> torch.Tensor:
    """Fold the counts of the middle octaves into the highest of them; keep the top ones; float32 [rows, 128 + 256]."""
    middle = counts[:, BOTTOM:-TOP].float()
    return torch.cat([table.octaves @ middle, counts[:, -TOP:].float().flatten(1)], 1)


def _bottom_errors(counts: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The errors that the bottom octaves add, float32 [rows, candidates]."""
    few = counts[:, :BOTTOM].flatten(1)
    if not on_host(few):  # `nonzero` would wait for the number of them
        return few.float() @ table
    row, pattern = few.nonzero(as_tuple=True)
    first = torch.searchsorted(row, torch.arange(len(few)))
    return embedding_bag(pattern, table, first, mode="sum", per_sample_weights=few[row, pattern].float())
