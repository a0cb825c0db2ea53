"""Count the 32,768 patterns of BF16 magnitudes by a Triton kernel on a GPU.

Programs that add to one table in memory contend for the few patterns that occur most, zero before all. So each program
counts into a table of its own, which stays in the L2 cache (128 KB a program), and the tables are added afterwards.
The sums are exact integers, whose order does not matter. Nothing is read back, so the host does not wait.

This module imports Triton, which comes with PyTorch on NVIDIA GPUs: import it where it is used.
`benchmarks/gpu/calibration.py` measures it beside other ways.
"""

import torch
import triton
import triton.language as tl

from .histogram import PATTERNS

#: Values that a program takes at a time; programs, a little more than an H100 has processors.
BLOCK = 2048
PROGRAMS = 264
#: Blocks that are worth a program's table; values in one launch, so that neither a count nor a place exceeds 31 bits.
BLOCKS_A_TABLE = 16
LAUNCHED_AT_A_TIME = 1 << 30


@triton.jit
def _private(patterns_at, tables_at, count, bins: tl.constexpr, block: tl.constexpr):
    """Count every so many blocks of `count` patterns, int16, into the program's own table, int32."""
    table = tables_at + tl.program_id(0).to(tl.int64) * bins
    for start in range(tl.program_id(0) * block, count, tl.num_programs(0) * block):
        at = start + tl.arange(0, block)
        inside = at < count
        pattern = tl.load(patterns_at + at, mask=inside, other=0).to(tl.int32)
        tl.atomic_add(table + pattern, 1, mask=inside, sem="relaxed")


def triton_count(patterns: torch.Tensor, programs: int | None = None) -> torch.Tensor:
    """Count `patterns` int16 [values] by a number of `programs` (None: as many as the values are worth); int64 [32768].

    `patterns` are on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
    """
    counts = torch.zeros(PATTERNS, dtype=torch.int64, device=patterns.device)
    for part in patterns.contiguous().split(LAUNCHED_AT_A_TIME):
        worth = max(1, min(PROGRAMS, part.numel() // (BLOCK * BLOCKS_A_TABLE)))
        tables = torch.zeros(programs or worth, PATTERNS, dtype=torch.int32, device=patterns.device)
        _private[(len(tables),)](part, tables, part.numel(), PATTERNS, BLOCK)
        counts += tables.sum(0, dtype=torch.int64)
    return counts
