"""Ways to count the 32,768 patterns of BF16 magnitudes, exactly: kernels in Triton beside what torch has.

All blocks that add to one table in memory contend for the few patterns that occur most, zero before all. `private`
gives each program a table of its own, which stays in the L2 cache (128 KB a program), and adds the tables afterwards;
`shared` counts a block of values in the processor's shared memory (`tl.histogram`), which needs 128 KB of it, and adds
what it found to the program's registers. Both are exact integers, so the order does not matter.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fp8q.calibrate.measure.histogram import PATTERNS

#: Values taken at a time; programs, a little more than an H100 has processors.
BLOCK, PROGRAMS = 2048, 264
Counter = Callable[[torch.Tensor], torch.Tensor]


@triton.jit
def _private(patterns_at, tables_at, count, bins: tl.constexpr, block: tl.constexpr):
    """Each program counts every so many blocks into the table that is its own."""
    own = tables_at + tl.program_id(0).to(tl.int64) * bins
    for start in range(tl.program_id(0) * block, count, tl.num_programs(0) * block):
        at = start + tl.arange(0, block)
        inside = at < count
        pattern = tl.load(patterns_at + at, mask=inside, other=0).to(tl.int32)
        tl.atomic_add(own + pattern, 1, mask=inside, sem="relaxed")


@triton.jit
def _shared(patterns_at, tables_at, count, bins: tl.constexpr, block: tl.constexpr):
    """The same, each block counted in shared memory."""
    every = tl.arange(0, bins)
    total = tl.zeros([bins], tl.int32)
    for start in range(tl.program_id(0) * block, count, tl.num_programs(0) * block):
        at = start + tl.arange(0, block)
        inside = at < count
        pattern = tl.load(patterns_at + at, mask=inside, other=0).to(tl.int32)
        total += tl.histogram(pattern, bins, mask=inside)
    tl.store(tables_at + tl.program_id(0).to(tl.int64) * bins + every, total)


def private(patterns: torch.Tensor, programs: int = PROGRAMS) -> torch.Tensor:
    """Counts of `patterns` int16 [values], int64 [32768]."""
    return _counted(_private, patterns, programs, BLOCK)


def shared(patterns: torch.Tensor, programs: int = PROGRAMS // 2) -> torch.Tensor:
    """The same, by blocks that are worth their table."""
    return _counted(_shared, patterns, programs, 8 * BLOCK, num_warps=32)


def _counted(kernel, patterns: torch.Tensor, programs: int, block: int, **launch: int) -> torch.Tensor:
    tables = torch.zeros(programs, PATTERNS, dtype=torch.int32, device=patterns.device)
    kernel[(programs,)](patterns.contiguous(), tables, patterns.numel(), PATTERNS, block, **launch)
    return tables.sum(0, dtype=torch.int64)
