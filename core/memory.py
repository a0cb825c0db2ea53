"""Give freed memory back to the system."""

import ctypes
import gc
import sys


def release_memory() -> None:
    """Give back the memory of what nobody holds any more, to the system too: glibc keeps what was freed."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
