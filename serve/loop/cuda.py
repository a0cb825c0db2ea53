"""A GPU as a `device.Device`: CUDA's driver interface, by ctypes, on the context that TensorRT itself uses.

Some thirty functions of `libcuda.so.1`, which every NVIDIA driver brings, are all that is needed. NVIDIA's own binding
(`cuda-bindings` 13.5: 8 MB to download, 31 MB installed) would take the place of the structure below and of the checks
of status, some 60 lines; but it is made for one major version of CUDA, so each Triton image would need the one that
fits its driver and its TensorRT, and a wrong one would be a new way to fail. Names and structures are those of NVIDIA's
"CUDA Driver API" (6.13 memory, 6.14 streams, 6.22 graphs, 6.15 memory in the order of a stream; modules, and the
launch of their functions).

Written from that documentation: it has not run on a GPU yet. Each function's exported name and the kinds of its
arguments, each constant and the structure are those of `cuda-bindings` 13.5 (`tests/serve/loop/test_cuda.py` compares
them where it is installed).

Imports only NumPy and its neighbours in this folder, as all that is copied into Triton repositories.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .device import BrokenDeviceError, CaptureError, Copy, Function
from .sessions import SessionError

#: CU_MEMORYTYPE_DEVICE, CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL.
ON_DEVICE = 2
NON_BLOCKING = 1
THREAD_LOCAL = 1
#: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR.
MAJOR = 75
MINOR = 76
#: CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, and the free memory that the pool keeps for the next allocation: without it the
#: driver unmaps whatever is free whenever the host waits, and maps it again. More than that other libraries may want.
RELEASE_THRESHOLD = 4
POOL_FREE_BYTES = 1 << 30
#: CUDA_ERROR_OUT_OF_MEMORY.
OUT_OF_MEMORY = 2
#: The errors after which the context, or the process, cannot go on: NVIDIA's descriptions of most say that "the process
#: must be terminated and relaunched" (`tests/serve/loop/test_cuda.py`). Added to these: a driver that shuts down (4),
#: memory or NVLink with errors that cannot be corrected (214, 220), a context that was destroyed (709) or that an
#: assertion of a kernel has ended (710), and a failure that the driver has no name for (999).
FAULTS = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
Handle = ctypes.c_void_p
Address = ctypes.c_uint64


class CudaError(SessionError):
    """The driver is missing, finds no GPU, or refuses a call."""


class CudaFaultError(CudaError, BrokenDeviceError):
    """A kernel failed, and with it the context: every later call of this process fails too."""


class DeviceMemoryError(CudaError):
    """The GPU has too little memory left. `facts`: the message without its remedy, for commands with another remedy."""

    def __init__(self, facts: str, remedy: str = ""):
        """Say the `facts`, and the `remedy` of commands that serve."""
        super().__init__(f"{facts}; {remedy}" if remedy else facts)
        self.facts = facts


def memory_text(size: float) -> str:
    """Format bytes in decimal units, as `core.columns.size`, which a Triton repository does not have."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcZ", ctypes.c_size_t),
        ("srcLOD", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", Address),
        ("srcArray", ctypes.c_void_p),
        ("reserved0", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("srcHeight", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstZ", ctypes.c_size_t),
        ("dstLOD", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", Address),
        ("dstArray", ctypes.c_void_p),
        ("reserved1", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("dstHeight", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    )


def memcpy_3d(copy: Copy) -> Memcpy3D:
    """A copy as the driver takes it: a block's distance in lines of its pitch."""
    assert copy.source_block % copy.source_line == 0, "a block is whole lines"
    assert copy.target_block % copy.target_line == 0, "a block is whole lines"
    return Memcpy3D(
        srcMemoryType=ON_DEVICE,
        srcDevice=copy.source,
        srcPitch=copy.source_line,
        srcHeight=copy.source_block // copy.source_line,
        dstMemoryType=ON_DEVICE,
        dstDevice=copy.target,
        dstPitch=copy.target_line,
        dstHeight=copy.target_block // copy.target_line,
        WidthInBytes=copy.width,
        Height=copy.lines,
        Depth=copy.blocks,
    )


class CudaDevice:
    """GPU `index` of those that CUDA_VISIBLE_DEVICES shows, and one stream on it; see `device.Device` for the methods.
    `target`: its compute capability, as `sm90`.
    """

    def __init__(self, index: int = 0) -> None:
        """Open the GPU.

        Raises CudaError where there is no driver or no such GPU.
        """
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"there is no NVIDIA driver here ({error})") from error
        device = ctypes.c_int()
        count = ctypes.c_int()
        self._context = Handle()
        stream = Handle()
        self._check("cuInit", ctypes.c_uint(0))
        self._check("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= index < count.value:
            raise CudaError(f"there is no GPU {index} here: CUDA shows {count.value}, numbered from 0")
        self._check("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self.target = f"sm{self._attribute(MAJOR, device)}{self._attribute(MINOR, device)}"
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        self._stream = stream
        self._keep_free_memory(device)

    def _keep_free_memory(self, device: ctypes.c_int) -> None:
        self._pool = Handle()
        threshold = ctypes.c_uint64(POOL_FREE_BYTES)
        self._call("cuDeviceGetDefaultMemPool", ctypes.byref(self._pool), device)
        self._call("cuMemPoolSetAttribute", self._pool, ctypes.c_int(RELEASE_THRESHOLD), ctypes.byref(threshold))

    def _attribute(self, which: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._check("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), device)
        return value.value

    def free_memory(self) -> int:
        """The free memory of the GPU, in bytes, with what the driver's pool keeps for the next allocation."""
        self._call("cuMemPoolTrimTo", self._pool, ctypes.c_size_t(0))
        free = ctypes.c_size_t()
        total = ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @property
    def stream(self) -> int:
        """The handle of the stream."""
        return int(self._stream.value or 0)

    def enter(self) -> None:
        """Make this GPU the calling thread's, whatever others that share the thread (a runtime, another device) have
        made of it since the last call: the driver alone knows, and setting it takes less than asking.
        """
        self._check("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function that works on the GPU."""
        self.enter()
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; raises CudaError, with the driver's words, where it fails."""
        if (function := getattr(self._cuda, name, None)) is None:
            raise CudaError(f"this NVIDIA driver is too old, and has no {name}; update it to r535 or newer")
        if code := function(*arguments):
            said = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(said))
            kind = DeviceMemoryError if code == OUT_OF_MEMORY else CudaFaultError if code in FAULTS else CudaError
            raise kind(f"{name} failed with {code} ({(said.value or b'unknown').decode()})")

    def _release_with(self, owner: Any, name: str, *arguments: Any) -> None:
        """Call a function of the driver that gives something back once `owner` is gone, and never at exit: the process
        takes all with it, and a thread that steps may use it until then.
        """
        weakref.finalize(owner, self._release, name, *arguments).atexit = False

    def _release(self, name: str, *arguments: Any) -> None:
        """Give something back, in whatever thread and between whatever calls Python collects its owner; nobody is there
        to hear of a failure, which the next call meets too.
        """
        before = Handle()
        self._cuda.cuCtxGetCurrent(ctypes.byref(before))
        self._cuda.cuCtxSetCurrent(self._context)
        getattr(self._cuda, name)(*arguments)
        self._cuda.cuCtxSetCurrent(before)

    def allocate(self, size: int) -> int:
        """Memory in the order of the stream, from the driver's pool: it waits for nothing."""
        address = Address()
        try:
            self._call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(size), self._stream)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU gives no {memory_text(size)} more of memory, and {memory_text(self.free_memory())} are free "
                f"({error})",
                "take a smaller --max-batch or --max-seq-len, or end what else runs there",
            ) from error
        return address.value

    def free(self, address: int) -> None:
        """Free memory after all work that was queued before."""
        self._call("cuMemFreeAsync", Address(address), self._stream)

    def host(self, size: int) -> NDArray[np.uint8]:
        """Page-locked host memory."""
        address = Handle()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(0))
        memory = (ctypes.c_uint8 * size).from_address(address.value or 0)
        self._release_with(memory, "cuMemFreeHost", address)
        return np.ctypeslib.as_array(memory)

    def upload(self, source: NDArray[Any], target: int) -> None:
        """Copy to the GPU, later."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            Address(target), Handle(source.ctypes.data), ctypes.c_size_t(source.nbytes), self._stream,
        )  # fmt: skip

    def download(self, source: int, target: NDArray[Any]) -> None:
        """Copy from the GPU, later."""
        self._call(
            "cuMemcpyDtoHAsync_v2",
            Handle(target.ctypes.data), Address(source), ctypes.c_size_t(target.nbytes), self._stream,
        )  # fmt: skip

    def copy(self, copy: Copy) -> None:
        """Copy on the GPU, later."""
        self._call("cuMemcpy3DAsync_v2", ctypes.byref(memcpy_3d(copy)), self._stream)

    def zero(self, address: int, width: int, lines: int = 1, line: int = 0) -> None:
        """Write zeros, later."""
        self._call(
            "cuMemsetD2D8Async",
            Address(address), ctypes.c_size_t(line or width), ctypes.c_ubyte(0), ctypes.c_size_t(width),
            ctypes.c_size_t(lines), self._stream,
        )  # fmt: skip

    def load(self, image: bytes, names: Sequence[str]) -> dict[str, Function]:
        """Have the driver compile PTX for this GPU: `device.Device`. The module stays as long as the context."""
        module = Handle()
        functions: dict[str, Function] = {}
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        for name in names:
            function = Handle()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
            functions[name] = Function(function.value or 0)
        return functions

    def launch(self, function: Function, grid: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
        """Run a kernel, later; the driver copies its arguments before it returns."""
        pointers = (Handle * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        dimensions = map(ctypes.c_uint, (*grid, 1, threads, 1, 1, 0))
        self._call("cuLaunchKernel", Handle(function), *dimensions, self._stream, pointers, Handle())

    def wait(self) -> None:
        """Wait until the stream is empty."""
        self._call("cuStreamSynchronize", self._stream)

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as a CUDA graph; whatever fails meanwhile ends the capture alone, unless the device broke."""
        launched = Handle()
        try:
            graph = self._capture(work)
            try:
                self._call("cuGraphInstantiateWithFlags", ctypes.byref(launched), graph, ctypes.c_ulonglong(0))
            finally:
                self._release("cuGraphDestroy", graph)
        except BrokenDeviceError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error)) from error

        def launch(keep: Callable[[], None] = work) -> None:  # the graph's buffers and the engine's context live on
            self._call("cuGraphLaunch", launched, self._stream)

        self._release_with(launch, "cuGraphExecDestroy", launched)
        return launch

    def _capture(self, work: Callable[[], None]) -> Handle:
        """Capture `work` as a graph, which is the caller's; where it raises, that is what is raised."""
        graph = Handle()
        self._call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(THREAD_LOCAL))
        try:
            work()
        except BaseException:
            # the capture is over whatever this returns; the failure of the work is the one to know
            self._cuda.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            if graph:
                self._release("cuGraphDestroy", graph)
            raise
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        return graph
