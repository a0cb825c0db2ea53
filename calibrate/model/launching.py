"""Launch a Triton kernel on the GPU that its tensors are on, or take torch's operations where kernels do not start.

Triton launches on the current GPU, whichever its tensors are on, and builds its launcher at the first launch, by the
machine's C compiler. Images and hosts without one are common, and torch's operations give the same result there, so the
first failure is a warning, after which kernels are not tried again.

A link in `integrations/vllm/fp8q_vllm` makes this module a part of the plugin, so it imports nothing of fp8q.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch

T = TypeVar("T")
LOG = logging.getLogger("fp8q")
#: Why kernels do not start in this process, once one has not.
FAILURES: list[str] = []


def launched(device: torch.device, kernel: Callable[[], T], operations: Callable[[], T]) -> T:
    """Return what `kernel` computes by Triton, with the GPU `device` as the current one; on other devices, or where
    kernels do not start, what torch's `operations` compute.

    A want of memory is the caller's, and passes through.
    """
    if device.type != "cuda" or FAILURES or not has_triton():
        return operations()
    try:
        with torch.cuda.device(device):
            return kernel()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # compilers, drivers and Triton raise whatever they will
        FAILURES.append(" ".join(f"{type(error).__name__}: {error}".split()))
    LOG.warning(
        "Triton's kernels do not start on this machine (%s), so torch's operations take their place, which is slower; "
        "Triton needs a C compiler: install gcc, or name one in CC",
        FAILURES[0],
    )
    return operations()


@cache
def has_triton() -> bool:
    """Tell whether Triton is installed; it is not imported."""
    return find_spec("triton") is not None
