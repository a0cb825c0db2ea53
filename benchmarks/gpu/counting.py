"""A further kernel that counts the 32,768 patterns of BF16 magnitudes, beside the product's `counting_kernel`.

It counts a block of values in the processor's shared memory (`tl.histogram`), which needs 128 KB of it, and adds what
it found to the program's registers. The sums are exact integers too.
"""

import torch
import triton
import triton.language as tl

from fp8q.calibrate.measure.counting_kernel import BLOCK, PROGRAMS
from fp8q.calibrate.measure.histogram import PATTERNS

#: Blocks that are worth their table.
BLOCKS = 8


@triton.jit
def _shared(patterns_at, tables_at, count, bins: tl.constexpr, block: tl.constexpr):
    """Count every so many blocks in shared memory, and store the sums in the program's own table."""
    every = tl.arange(0, bins)
    total = tl.zeros([bins], tl.int32)
    for start in range(tl.program_id(0) * block, count, tl.num_programs(0) * block):
        at = start + tl.arange(0, block)
        inside = at < count
        pattern = tl.load(patterns_at + at, mask=inside, other=0).to(tl.int32)
        total += tl.histogram(pattern, bins, mask=inside)
    tl.store(tables_at + tl.program_id(0).to(tl.int64) * bins + every, total)


def shared(patterns: torch.Tensor, programs: int = PROGRAMS // 2) -> torch.Tensor:
    """Counts of `patterns` int16 [values], int64 [32768]."""
    tables = torch.zeros(programs, PATTERNS, dtype=torch.int32, device=patterns.device)
    count = patterns.numel()
    _shared[(programs,)](patterns.contiguous(), tables, count, PATTERNS, BLOCKS * BLOCK, num_warps=32)
    return tables.sum(0, dtype=torch.int64)
