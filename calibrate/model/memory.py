"""Measure the memory that is left: whether a checkpoint fits, which decides on streaming by default, and whether a GPU
holds more beside it.
"""

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from .source import Source

if TYPE_CHECKING:
    import torch

#: The share of the available memory for weights; activations and other processes need the rest.
SHARE = 0.8
CGROUP = Path("/sys/fs/cgroup")


def weight_bytes(source: Source) -> int:
    """The bytes of the checkpoint's weights in BF16."""
    weights = source.weights()
    return sum(2 * prod(weights.shape(name)) for name in weights.names())


def available_bytes(device: str) -> int | None:
    """The available memory on `device`, in bytes; None where the system does not report it."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    sizes = [size for size in (_machine(), container_bytes()) if size is not None]
    return min(sizes, default=None)


def has_room(device: "torch.device", size: int) -> bool:
    """Tell whether `size` bytes more on a GPU leave the rest of its memory free that `SHARE` leaves for activations."""
    if device.type != "cuda":
        return True
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(free) - size >= (1 - SHARE) * total


def _machine() -> int | None:
    """MemAvailable of Linux: free memory and reclaimable caches."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None


def container_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the memory left in the control group (version 2), in bytes: its limit less what is in use and not
    reclaimable.
    """
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    except (OSError, ValueError, KeyError):  # no such group, or `max`: no limit
        return None
