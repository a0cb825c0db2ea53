"""Run the parts of a matrix on a thread each, where torch would split each of many small operators over its threads.

Many small parts are faster so: an operator on a few thousand values takes less time than its threads take to meet.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


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
