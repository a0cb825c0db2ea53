"""Measure memory and energy while a model runs: of a GPU by NVML, or of this process without one.

NVML counts a GPU's energy since its driver was loaded, in millijoules (Volta and later), and its memory in use: both
for the whole GPU, so other programs on it count too. Host memory is this process's resident part (`VmRSS`), mapped and
touched files included. There is no energy counter for it that a user may read.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROCESS = Path("/proc/self/status")
PROCESSOR = Path("/proc/cpuinfo")


class Meter(Protocol):
    """The quantities measured beside time. `device` is its name; `total_bytes` is all the memory that it has."""

    device: str
    total_bytes: int

    def memory_bytes(self) -> int:
        """Memory in use now."""

    def joules(self) -> float | None:
        """A counter of energy; None where there is none."""


class HostMeter:
    """This process, on the CPU."""

    def __init__(self) -> None:
        """Find out which processor and how much memory there is."""
        self.device = f"{os.cpu_count()} cores, {_line(PROCESSOR, 'model name') or 'processor unknown'}"
        self.total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_bytes(self) -> int:
        """Resident memory of this process."""
        return int((_line(PROCESS, "VmRSS") or "0 kB").split()[0]) * 1024

    def joules(self) -> float | None:
        """None: there is no counter to read."""
        return None


class GpuMeter:
    """One GPU, by NVML."""

    def __init__(self, nvml: Any, handle: Any):
        """Ask `nvml`, which is initialized, of the GPU of `handle`."""
        self._nvml = nvml
        self._handle = handle
        name = nvml.nvmlDeviceGetName(handle)
        self.device = name.decode() if isinstance(name, bytes) else str(name)
        self.total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)

    def memory_bytes(self) -> int:
        """Memory of the GPU in use, whoever uses it."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def joules(self) -> float | None:
        """Energy since the driver was loaded; None for a GPU older than the counter."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError:
            return None


def open_meter(on_gpu: bool) -> Meter:
    """Open a meter of the GPU that runs the model, or of this process if NVML is missing or finds no GPU."""
    if not on_gpu:
        return HostMeter()
    try:
        import pynvml

        pynvml.nvmlInit()
        return GpuMeter(pynvml, _handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES", "")))
    except ImportError:
        return HostMeter()
    except pynvml.NVMLError:
        return HostMeter()


def _handle(nvml: Any, visible: str) -> Any:
    """The first GPU that CUDA sees, whose index or UUID `visible` (CUDA_VISIBLE_DEVICES) may name."""
    first = visible.partition(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdecimal() else 0)


@dataclass
class MemoryTaken:
    """The memory that one of several models in the process, or on the GPU, has taken while it worked."""

    meter: Meter
    bytes: int = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add the memory that the block takes, or subtract what it gives back."""
        before = self.meter.memory_bytes()
        yield
        self.bytes += self.meter.memory_bytes() - before


def _line(file: Path, name: str) -> str | None:
    """The value of `name` in a file of /proc or /sys; None where the file or the name is missing."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
