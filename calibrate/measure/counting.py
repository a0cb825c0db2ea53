"""Count how often each bit pattern of a BF16 magnitude occurs, exactly, without a wait for a GPU.

`torch.bincount` uses one thread on a CPU, and on a GPU the host waits in it for the smallest and the largest value. So
a CPU counts parts in several threads. A GPU counts by a kernel (`counting_kernel`) where Triton's start, and else by
sorting: the ends of the runs of equal values follow from a search, whose result has a known size. All are sums of
integers, which no order or split changes.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce

import torch

from ..model.launching import launched
from .histogram import INFINITY, PATTERNS

#: With fewer values for each thread than this, one thread counts faster than several.
WORTH_SHARING = 1 << 17
#: Values that are sorted at a time: each takes 20 bytes beside its own two.
SORTED_AT_A_TIME = 1 << 26


def count_patterns(patterns: torch.Tensor) -> torch.Tensor:
    """Count how often each of the 32,768 patterns occurs in `patterns` int16 [values]; int64 [32768]."""
    if patterns.device.type == "cpu":
        return count_in_threads(patterns)

    def kernel() -> torch.Tensor:
        from .counting_kernel import triton_count

        return triton_count(patterns)

    return launched(patterns.device, kernel, lambda: count_by_sorting(patterns))


def count_in_threads(patterns: torch.Tensor) -> torch.Tensor:
    """Count `patterns` on a CPU, split among as many threads as torch uses for GEMMs."""
    threads = torch.get_num_threads()
    if threads == 1 or patterns.numel() < WORTH_SHARING * threads:
        return torch.bincount(patterns, minlength=PATTERNS)
    parts = counters(threads).map(lambda part: torch.bincount(part, minlength=PATTERNS), patterns.chunk(threads))
    return reduce(torch.add, parts)


@cache
def counters(threads: int) -> ThreadPoolExecutor:
    """The thread pool that counts; its threads sleep between tensors."""
    return ThreadPoolExecutor(threads, thread_name_prefix="fp8q-count")


def count_by_sorting(patterns: torch.Tensor) -> torch.Tensor:
    """Count `patterns` on any device by sorting them: no two values meet, and nothing waits."""
    return reduce(torch.add, _sorted_counts(patterns))


def _sorted_counts(patterns: torch.Tensor) -> Iterator[torch.Tensor]:
    every = torch.arange(PATTERNS, dtype=torch.int32, device=patterns.device).to(torch.int16)
    for part in patterns.split(SORTED_AT_A_TIME):
        ends = torch.searchsorted(part.sort().values, every, right=True)
        yield ends.diff(prepend=ends.new_zeros(1))


def largest_finite(counts: torch.Tensor) -> torch.Tensor:
    """Find the largest finite pattern among `counts` int64 [32768]; int16 [], 0 where there is none."""
    finite = torch.arange(INFINITY, dtype=torch.int16, device=counts.device)
    return (finite * (counts[:INFINITY] > 0)).amax()
