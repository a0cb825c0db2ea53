"""A stand-in for NVIDIA's driver: the functions of `libcuda.so.1` that fp8q calls, on memory of the host.

It is as late as a driver may be: work is queued on the stream, and done when somebody waits for it. What it allocates
holds what is no number, memory is bounded, and what lies outside of it is an error. A captured graph is the list of
what was queued meanwhile.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fp8q.serve.loop.cuda import MAJOR, Memcpy3D
from fp8q.serve.loop.device import ALIGNMENT
from fp8q.serve.loop.device_kernels import THREADS

from .kernels import entries, run_kernel

#: CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY.
SUCCESS, INVALID, OUT_OF_MEMORY, NOT_FOUND = 0, 1, 2, 500
SAID = {
    INVALID: b"invalid argument",
    OUT_OF_MEMORY: b"out of memory",
    NOT_FOUND: b"named symbol not found",
    700: b"an illegal memory access was encountered",
}


def number(value: Any) -> int:
    """A number that was handed over by ctypes, or as Python's."""
    return int(getattr(value, "value", value) or 0)


def memory(address: int, size: int) -> np.ndarray:
    """Bytes at an address."""
    found: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return found


class Driver:
    """GPUs of compute capability `major`.`minor`, one without `gpus`, with `total` bytes together, under a driver whose
    newest CUDA is `cuda`. `peak`: the most bytes that were allocated.
    """

    def __init__(self, major: int = 8, minor: int = 9, total: int = 1 << 30, cuda: int = 13040, gpus: int = 1) -> None:
        self.capability, self.total, self.cuda, self.gpus = (major, minor), total, cuda, gpus
        self.entered, self.gpu_of, self.peak = threading.local(), dict[int, int](), 0
        self.held: dict[int, tuple[np.ndarray, int]] = {}
        self.freed = set[int]()
        self.pinned: dict[int, np.ndarray] = {}
        self.queue: list[Callable[[], object]] = []
        self.capturing: list[Callable[[], object]] | None = None
        self.graphs: dict[int, list[Callable[[], object]]] = {}
        self.launches = 0
        self.modules: list[dict[str, list[Any]]] = []
        self.functions: list[tuple[str, list[Any]]] = []

    def enqueue(self, work: Callable[[], object]) -> int:
        """Do `work` in the order of the stream, later."""
        (self.queue if self.capturing is None else self.capturing).append(work)
        return SUCCESS

    def used(self) -> int:
        """The bytes that are allocated; what is freed in the order of the stream is there for what comes after it."""
        return sum(size for address, (_, size) in self.held.items() if address not in self.freed)

    @property
    def current(self) -> int | None:
        """The GPU that the calling thread has entered."""
        return getattr(self.entered, "gpu", None)

    def inside(self, address: int, size: int) -> bool:
        """Tell whether memory of a device lies there."""
        return any(base <= address and address + size <= base + held for base, (_, held) in self.held.items())

    # The driver's functions, in the order of `serve/loop/cuda.py`.

    def cuInit(self, flags: Any) -> int:
        return SUCCESS

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = self.cuda
        return SUCCESS

    def cuDeviceGet(self, found: Any, index: Any) -> int:
        found._obj.value = number(index)
        return SUCCESS if number(index) < self.gpus else INVALID

    def cuDeviceGetCount(self, found: Any) -> int:
        found._obj.value = self.gpus
        return SUCCESS

    def cuDeviceGetAttribute(self, found: Any, which: Any, device: Any) -> int:
        found._obj.value = self.capability[number(which) - MAJOR]
        return SUCCESS

    def cuDevicePrimaryCtxRetain(self, found: Any, device: Any) -> int:
        found._obj.value = 1 + number(device)
        return SUCCESS

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.entered.gpu = number(context) - 1 if number(context) else None
        return SUCCESS if self.entered.gpu is None or 0 <= self.entered.gpu < self.gpus else INVALID

    def cuCtxGetCurrent(self, found: Any) -> int:
        found._obj.value = 0 if self.current is None else 1 + self.current
        return SUCCESS

    def cuStreamCreate(self, found: Any, flags: Any) -> int:
        found._obj.value = 7
        return SUCCESS

    def cuDeviceGetDefaultMemPool(self, found: Any, device: Any) -> int:
        found._obj.value = 3
        return SUCCESS

    def cuMemPoolSetAttribute(self, pool: Any, which: Any, value: Any) -> int:
        return SUCCESS if number(pool) == 3 else INVALID

    def cuMemPoolTrimTo(self, pool: Any, size: Any) -> int:
        return SUCCESS if number(pool) == 3 and number(size) == 0 else INVALID

    def cuGetErrorString(self, code: int, said: Any) -> int:
        said._obj.value = SAID[code]
        return SUCCESS

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = self.total - self.used(), self.total
        return SUCCESS

    def cuMemAllocAsync(self, found: Any, size: Any, stream: Any) -> int:
        asked = number(size)
        if not asked:
            return INVALID
        if self.used() + asked > self.total:
            return OUT_OF_MEMORY
        whole = np.full(asked + ALIGNMENT, 0xFF, np.uint8)
        address = -(-whole.ctypes.data // ALIGNMENT) * ALIGNMENT
        assert self.current is not None, "the thread has entered a GPU"
        self.held[address], self.gpu_of[address] = (whole, asked), self.current
        self.peak = max(self.peak, self.used())
        found._obj.value = address
        return SUCCESS

    def cuMemFreeAsync(self, address: Any, stream: Any) -> int:
        where = number(address)
        if where not in self.held or where in self.freed:
            return INVALID
        self.freed.add(where)
        return self.enqueue(lambda: self._gone(where))

    def _gone(self, address: int) -> None:
        self.freed.discard(address)
        del self.held[address]

    def cuMemHostAlloc(self, found: Any, size: Any, flags: Any) -> int:
        whole = np.full(max(number(size), 1), 0xFF, np.uint8)
        self.pinned[whole.ctypes.data] = whole
        found._obj.value = whole.ctypes.data
        return SUCCESS

    def cuMemFreeHost(self, address: Any) -> int:
        return SUCCESS if self.pinned.pop(number(address), None) is not None else INVALID

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        to, of, count = number(target), number(source), number(size)
        return self.enqueue(lambda: self._copied(to, of, count, to)) if self.inside(to, count) else INVALID

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        to, of, count = number(target), number(source), number(size)
        return self.enqueue(lambda: self._copied(to, of, count, of)) if self.inside(of, count) else INVALID

    def _copied(self, to: int, of: int, count: int, on_device: int) -> None:
        assert self.inside(on_device, count), "it was freed meanwhile"
        np.copyto(memory(to, count), memory(of, count))

    def cuMemcpy3DAsync_v2(self, copy: Any, stream: Any) -> int:
        asked = copy._obj
        assert isinstance(asked, Memcpy3D)
        told = {name: getattr(asked, name) for name, *_ in Memcpy3D._fields_}
        return self.enqueue(lambda: self._copied_3d(told))

    def _copied_3d(self, told: dict[str, int]) -> None:
        width, lines, blocks = told["WidthInBytes"], told["Height"], told["Depth"]

        def view(address: int, pitch: int, height: int) -> np.ndarray:
            assert pitch >= width, "a line is as wide as the pitch at most"
            end = address + (blocks - 1) * height * pitch + (lines - 1) * pitch + width
            assert self.inside(address, end - address), "what lies outside was not allocated"
            flat = memory(address, end - address)
            return np.lib.stride_tricks.as_strided(flat, (blocks, lines, width), (height * pitch, pitch, 1))

        source = view(told["srcDevice"], told["srcPitch"], told["srcHeight"])
        target = view(told["dstDevice"], told["dstPitch"], told["dstHeight"])
        assert not np.shares_memory(source, target), "what a copy reads while it writes it is not defined"
        target[:] = source

    def cuMemsetD2D8Async(self, address: Any, pitch: Any, value: Any, width: Any, height: Any, stream: Any) -> int:
        where, line, byte, wide, lines = (number(each) for each in (address, pitch, value, width, height))
        if line < wide or not self.inside(where, (lines - 1) * line + wide):
            return INVALID
        whole = memory(where, (lines - 1) * line + wide)
        written = np.lib.stride_tricks.as_strided(whole, (lines, wide), (line, 1))
        return self.enqueue(lambda: written.fill(byte))

    def cuModuleLoadData(self, found: Any, image: Any) -> int:
        self.modules.append(entries(image.value))
        found._obj.value = len(self.modules)
        return SUCCESS if self.modules[-1] else INVALID

    def cuModuleGetFunction(self, found: Any, module: Any, name: Any) -> int:
        function = name.value.decode()
        if function not in self.modules[number(module) - 1]:
            return NOT_FOUND
        self.functions.append((function, self.modules[number(module) - 1][function]))
        found._obj.value = len(self.functions)
        return SUCCESS

    def cuLaunchKernel(
        self, function: Any, x: Any, y: Any, z: Any, tx: Any, ty: Any, tz: Any, shared: Any, stream: Any,
        arguments: Any, extra: Any,
    ) -> int:  # fmt: skip
        (name, kinds), grid = self.functions[number(function) - 1], (number(x), number(y))
        assert [number(each) for each in (z, tx, ty, tz, shared)] == [1, THREADS, 1, 1, 0]
        values = [kind.from_address(at).value for kind, at in zip(kinds, arguments, strict=True)]  # read at once
        return self.enqueue(lambda: run_kernel(name, grid, values, self.inside))

    def cuStreamSynchronize(self, stream: Any) -> int:
        assert self.capturing is None, "a stream that is captured cannot be waited for"
        while self.queue:
            self.queue.pop(0)()
        return SUCCESS

    def cuStreamBeginCapture_v2(self, stream: Any, mode: Any) -> int:
        self.capturing = []
        return SUCCESS

    def cuStreamEndCapture(self, stream: Any, found: Any) -> int:
        assert self.capturing is not None
        key = len(self.graphs) + 1
        self.graphs[key], self.capturing = self.capturing, None
        found._obj.value = key
        return SUCCESS

    def cuGraphInstantiateWithFlags(self, found: Any, graph: Any, flags: Any) -> int:
        found._obj.value = number(graph)
        return SUCCESS

    def cuGraphDestroy(self, graph: Any) -> int:
        return SUCCESS

    def cuGraphLaunch(self, launched: Any, stream: Any) -> int:
        self.launches += 1
        for work in self.graphs[number(launched)]:
            self.enqueue(work)
        return SUCCESS

    def cuGraphExecDestroy(self, launched: Any) -> int:
        return SUCCESS
