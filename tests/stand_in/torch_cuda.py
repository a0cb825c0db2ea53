"""torch.cuda on a machine without a GPU: what `benchmarks/gpu` asks of it, on the CPU.

Tensors lie in the host's memory, a graph's capture runs the work and its replay is counted, an event has the host's
clock, and the energy counter is NVML's interface over that clock. So the code for a GPU is gone through, with the sizes
of a dry run; no figure means anything.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import timing

NAME, MEMORY, WATTS = "Stand-in", 80 * 10**9, 100.0


class Graph:
    """A CUDA graph that counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class Stream:
    """A stream that is never behind."""

    def wait_stream(self, other: "Stream") -> None:
        """There is nothing to wait for."""


class Event:
    """An event of the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """The host is never behind."""

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


class Nvml(ModuleType):
    """NVML of one GPU that takes 100 W."""

    NVMLError = OSError

    def __init__(self) -> None:
        super().__init__("pynvml")
        memory = SimpleNamespace(total=MEMORY, used=10**9)
        self.__dict__.update(
            nvmlInit=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "0",
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetName=lambda handle: NAME,
            nvmlDeviceGetMemoryInfo=lambda handle: memory,
            nvmlDeviceGetTotalEnergyConsumption=lambda handle: time.monotonic() * WATTS * 1e3,
        )


@contextmanager
def cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[list[Graph]]:
    """Have this GPU in the block; the graphs that are captured."""
    graphs: list[Graph] = []

    class Listed(Graph):
        def __init__(self) -> None:
            super().__init__()
            graphs.append(self)

    properties = SimpleNamespace(
        name=NAME, major=capability[0], minor=capability[1], total_memory=MEMORY, multi_processor_count=1,
        L2_cache_size=1,
    )  # fmt: skip
    stands: dict[str, Any] = {
        "CUDAGraph": Listed, "graph": lambda graph: nullcontext(), "Event": Event,
        "Stream": Stream, "current_stream": Stream, "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None, "empty_cache": lambda: None, "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 1, "get_device_properties": lambda index: properties,
        "get_device_name": lambda index: NAME, "device_count": lambda: 1, "set_sync_debug_mode": lambda mode: None,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, stand in stands.items():
            patch.setattr(torch.cuda, name, stand)
        patch.setattr(timing.Setting, "device", "cpu")
        patch.setattr(timing.Setting, "compiled", lambda setting, function, dynamic=None: function)
        patch.setitem(sys.modules, "pynvml", Nvml())
        yield graphs
