"""The driver's functions, constants and structure as `cuda.py` calls them by ctypes, held against NVIDIA's own binding
(`pip install cuda-bindings`, which needs no GPU), where that is installed: 13.5 was, when this was written.
"""

import ctypes
import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q.serve.loop import cuda
from fp8q.serve.loop.cuda import CudaDevice, Memcpy3D
from fp8q.serve.loop.device import BrokenDeviceError, CaptureError, Copy
from fp8q.serve.loop.device_kernels import PTX, THREADS
from tests.stand_in.driver import Driver

bindings = pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
#: ctypes -> what it is to a C function; a pointer is an address or a handle, and CUdevice and enumerations are int.
KINDS = {
    ctypes.c_int: "int", ctypes.c_uint: "unsigned int", ctypes.c_ubyte: "unsigned char",
    ctypes.c_size_t: "64 bits", ctypes.c_uint64: "64 bits", ctypes.c_ulonglong: "64 bits", ctypes.c_void_p: "pointer",
}  # fmt: skip
NUMBERS = {
    "CUdeviceptr": "64 bits", "size_t": "64 bits", "unsigned long long": "64 bits", "unsigned int": "unsigned int",
    "unsigned char": "unsigned char", "int": "int", "CUdevice": "int", "CUresult": "int",
}  # fmt: skip
HANDLES = (
    "CUcontext", "CUstream", "CUgraph", "CUgraphExec", "CUmemoryPool", "CUarray", "CUmodule", "CUfunction",
)  # fmt: skip


class Recorder:
    """A driver that records how each of its functions was called."""

    def __init__(self) -> None:
        self.driver, self.calls = Driver(), dict[str, tuple[str, ...]]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.driver, name)

        def called(*arguments: Any) -> Any:
            self.calls[name] = tuple(KINDS.get(type(each), "pointer") for each in arguments)
            return function(*arguments)

        return called


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Each function of the driver that a device calls, and the kinds of its arguments."""
    recorder = Recorder()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: recorder)
    work_on(CudaDevice())
    return recorder.calls


def work_on(device: CudaDevice) -> None:
    """Do all that a device does; what it captures, and its host memory, go when this returns."""
    device.free_memory()
    address, host = device.allocate(512), device.host(512)
    device.upload(host, address)
    device.copy(Copy(address, address + 256, 64, 2, 1, 64, 128, 64, 128))
    device.zero(address, 512)
    run = device.load(PTX.read_bytes(), ["gather_blocks"])["gather_blocks"]
    pairs = [ctypes.c_uint64(address + 256 * part) for part in (0, 0, 1)]
    scratch = [ctypes.c_uint64(0)] * 2
    device.launch(run, (1, 1), THREADS, [*pairs, ctypes.c_int32(64), ctypes.c_int32(64), *scratch])
    launch = device.captured(lambda: device.download(address, host))
    launch()
    device.wait()
    device.free(address)


def declared() -> dict[str, tuple[str, ...]]:
    """The functions that the driver exports, by the names that it exports them by, and the kinds of their arguments."""
    text = (Path(bindings.__file__).parent / "_internal" / "driver.pxd").read_text(encoding="utf-8")
    found = {}
    for name, arguments in re.findall(r"^cdef CUresult _(cu\w+)\((.*?)\) except", text, re.MULTILINE):
        found[name] = tuple(kind_of(each.rpartition(" ")[0]) for each in arguments.split(", "))
    return found


def kind_of(declaration: str) -> str:
    """Of a declared type; an enumeration's name is none of those that are known, and it is an int."""
    if "*" in declaration or declaration in HANDLES:
        return "pointer"
    return NUMBERS.get(declaration, "int")


def test_every_function_is_called_by_its_exported_name_with_arguments_of_the_declared_kinds(
    calls: dict[str, tuple[str, ...]],
) -> None:
    known = declared()
    assert len(calls) == 30
    assert {name: known.get(name) for name in calls} == calls


def test_all_functions_that_are_named_are_called_here(calls: dict[str, tuple[str, ...]]) -> None:
    source = Path(cuda.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"\"(cu[A-Z]\w+)\"|_cuda\.(cu[A-Z]\w+)", source))
    assert {one or other for one, other in named} - calls.keys() == {"cuGetErrorString"}
    assert declared()["cuGetErrorString"] == ("int", "pointer")


def test_constants_are_those_of_the_binding() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert cuda.ON_DEVICE == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert cuda.NON_BLOCKING == driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert cuda.THREAD_LOCAL == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert cuda.MAJOR == driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert cuda.MINOR == driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    assert cuda.RELEASE_THRESHOLD == driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


def test_the_structure_of_a_copy_is_laid_out_as_the_binding_reads_it() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    numbers = {name: 1000 + at for at, (name, *_) in enumerate(Memcpy3D._fields_)}
    kinds = {"srcMemoryType": 2, "dstMemoryType": 2}
    ours = Memcpy3D(**numbers | kinds)
    theirs = driver.CUDA_MEMCPY3D(_ptr=ctypes.addressof(ours))
    read = [name for name, *_ in Memcpy3D._fields_ if not name.startswith("reserved")]
    assert {name: int(getattr(theirs, name)) for name in read} == {name: (numbers | kinds)[name] for name in read}
    assert ctypes.sizeof(ours) == 200
    assert np.dtype(np.uintp).itemsize == 8


class Failing:
    """A stand-in driver of which some functions fail with a code, and that notes what was called."""

    def __init__(self, gpus: int = 1, **codes: int) -> None:
        self.driver, self.codes, self.called = Driver(gpus=gpus), codes, list[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.driver, name)

        def called(*arguments: Any) -> Any:
            self.called.append(name)
            code = function(*arguments)
            return self.codes.get(name, code)

        return called

    def cuGetErrorString(self, code: int, said: Any) -> int:  # noqa: N802  # the driver's name
        said._obj.value = b"a fault"
        return 0

    @property
    def graphs_left(self) -> int:
        """The graphs that were captured and not destroyed."""
        return self.called.count("cuStreamEndCapture") - self.called.count("cuGraphDestroy")


OpenDevice = Callable[..., CudaDevice]


@pytest.fixture
def device_on(monkeypatch: pytest.MonkeyPatch) -> OpenDevice:
    def open_device(driver: Failing, index: int = 0) -> CudaDevice:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        return CudaDevice(index)

    return open_device


def test_every_error_that_ends_the_process_is_a_fault() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    said = {int(code): " ".join((code.__doc__ or "").split()) for code in driver.CUresult}
    ending = {code for code, words in said.items() if "process must be terminated" in words}
    assert {226, 700, 702, 714, 715, 716, 717, 718, 719, 721, 810, 911} == ending
    named = {
        "DEINITIALIZED", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTEXT_IS_DESTROYED", "ASSERT", "UNKNOWN",
    }  # fmt: skip
    assert {int(getattr(driver.CUresult, f"CUDA_ERROR_{name}")) for name in named} | ending == cuda.FAULTS


@pytest.mark.parametrize("code", [214, 700, 719, 999])
@pytest.mark.parametrize("name", ["cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuStreamBeginCapture_v2"])
def test_a_fault_while_capturing_is_no_refusal_to_capture(device_on: OpenDevice, name: str, code: int) -> None:
    device = device_on(Failing(**{name: code}))
    with pytest.raises(BrokenDeviceError, match=f"^{name} failed with {code} \\(a fault\\)$"):
        device.captured(lambda: None)


def test_a_fault_of_the_work_that_is_captured_is_what_is_raised(device_on: OpenDevice) -> None:
    """Though the capture, which it has made invalid, fails to end with another error."""
    driver = Failing(cuMemsetD2D8Async=700, cuStreamEndCapture=901)
    device = device_on(driver)
    address = device.allocate(512)
    with pytest.raises(BrokenDeviceError, match=r"^cuMemsetD2D8Async failed with 700 \(a fault\)$"):
        device.captured(lambda: device.zero(address, 512))
    driver.codes = {}

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.captured(interrupted)
    assert driver.driver.capturing is None
    assert driver.graphs_left == 0


def test_a_capture_that_is_refused_leaves_no_graph(device_on: OpenDevice) -> None:
    driver = Failing(cuGraphInstantiateWithFlags=801)
    device = device_on(driver)
    with pytest.raises(CaptureError, match=r"^cuGraphInstantiateWithFlags failed with 801 \(a fault\)$"):
        device.captured(lambda: None)
    assert driver.graphs_left == 0
    driver.codes = {}
    launch = device.captured(lambda: None)
    assert driver.graphs_left == 0, "the executable graph needs it no more"
    assert "cuGraphExecDestroy" not in driver.called
    del launch
    gc.collect()
    assert driver.called.count("cuGraphExecDestroy") == 1


def test_what_goes_is_given_back_on_its_own_gpu_and_never_at_exit(device_on: OpenDevice) -> None:
    """Wherever Python collects it: here between two calls of another GPU's device in the same thread."""
    driver = Failing(gpus=2)
    first, second = device_on(driver, 0), device_on(driver, 1)
    host, launch = first.host(64), first.captured(lambda: None)
    finalizers = [finalize for finalize in weakref.finalize._registry if finalize.alive]  # type: ignore[attr-defined]
    ours = [finalize for finalize in finalizers if finalize.peek()[1] == first._release]
    assert [finalize.atexit for finalize in ours] == [False, False]
    second.enter()
    driver.called.clear()
    del host, launch
    gc.collect()
    assert {"cuMemFreeHost", "cuGraphExecDestroy"} <= set(driver.called)
    assert driver.called.count("cuCtxSetCurrent") == 4
    assert driver.driver.current == 1, "the thread is where it was"


def test_a_gpu_is_entered_whatever_others_have_made_of_the_thread(device_on: OpenDevice) -> None:
    driver = Failing(gpus=2)
    device = device_on(driver, 1)
    device.free_memory()
    driver.driver.cuCtxSetCurrent(1)  # as a library leaves the thread: on the first GPU
    address = device.allocate(64)
    assert driver.driver.gpu_of[address] == 1
