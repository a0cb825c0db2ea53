"""Give freed memory back to the system."""

import ctypes
import gc
import sys
from typing import Any

#: Names the limit to glibc's mallopt (malloc.h).
M_MMAP_THRESHOLD = -3


def release_memory() -> None:
    """Give back the memory of what nobody holds any more, to the system too: glibc keeps what was freed."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_free_pages()


def return_free_pages() -> None:
    """Give back the free pages that glibc keeps, without looking for objects that nobody holds any more."""
    if trim := _glibc("malloc_trim"):
        trim(0)


def return_freed_blocks() -> None:
    """Let glibc return every large block to the system when it is freed, for the rest of this process.

    It does so from 128 KiB on, but raises that limit with the blocks that are freed, up to 32 MiB. Tensors of other
    sizes then fit badly into what it holds: learning sharded weights, it held as much again as they take.
    """
    if limit := _glibc("mallopt"):
        limit(M_MMAP_THRESHOLD, 128 * 1024)
    release_memory()


def _glibc(name: str) -> Any:
    """Return a function of the C library; None where that is another than glibc and has none of the name."""
    return getattr(ctypes.CDLL(None), name, None)
