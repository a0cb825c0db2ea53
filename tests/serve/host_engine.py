"""Memory and an engine of the host, with the interface of a GPU's: `device_batch` runs on them in tests."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from fp8q.serve.loop.cuda import memcpy_3d
from fp8q.serve.loop.device import ALIGNMENT, Copy, Function
from fp8q.serve.loop.host_batch import LOGITS_INDICES, last_indices
from fp8q.serve.loop.sessions import NEW, PAST, TOKEN_INPUTS, OnnxRuntimeSession
from tests.stand_in.kernels import entries, run_kernel


def at(address: int, dtype: Any, *shape: int) -> np.ndarray:
    """Memory at an address, as an array."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


class HostDevice:
    """A `device.Device` in host memory, as late as a device may be: nothing is done before somebody waits. What it
    allocates holds what is no number.
    """

    def __init__(self) -> None:
        self.memory: dict[int, tuple[np.ndarray, int]] = {}
        self.queue: list[Callable[[], object]] = []
        self.waits = self.captures = self.downloaded = self.stream = 0
        self.graphs = WeakSet[Callable[[], None]]()
        self.launched: list[str] = []

    def allocate(self, size: int) -> int:
        assert size > 0
        whole = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        address = -(-whole.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.memory[address] = whole, size
        return address

    def holds(self, address: int, size: int) -> bool:
        """Tell whether these bytes were allocated, and not freed."""
        return any(base <= address and address + size <= base + held for base, (_, held) in self.memory.items())

    def inside(self, address: int, size: int) -> None:
        """Assert that these bytes were allocated, and not freed."""
        assert self.holds(address, size)

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """Memory that was allocated."""
        self.inside(address, size)
        return at(address, np.uint8, size)

    def free(self, address: int) -> None:
        self.queue.append(lambda: self.memory.pop(address))

    def enter(self) -> None:
        """There is one."""

    def free_memory(self) -> int:
        return 1 << 40

    def host(self, size: int) -> np.ndarray:
        return np.full(size, 0xFF, np.uint8)

    def upload(self, source: np.ndarray, target: int) -> None:
        self.queue.append(lambda: np.copyto(self.bytes_at(target, source.nbytes), source))

    def download(self, source: int, target: np.ndarray) -> None:
        self.downloaded += target.nbytes
        self.queue.append(lambda: np.copyto(target, self.bytes_at(source, target.nbytes)))

    def copy(self, copy: Copy) -> None:
        self.queue.append(lambda: self._copied(copy))

    def _copied(self, copy: Copy) -> None:
        """As the driver does it: what lies outside what was allocated is an error."""

        def lines(address: int, line: int, block: int) -> np.ndarray:
            end = address + (copy.blocks - 1) * block + (copy.lines - 1) * line + copy.width
            flat = self.bytes_at(address, end - address)
            return np.lib.stride_tricks.as_strided(flat, (copy.blocks, copy.lines, copy.width), (block, line, 1))

        memcpy_3d(copy)  # asserts what the driver asks for
        target = lines(copy.target, copy.target_line, copy.target_block)
        source = lines(copy.source, copy.source_line, copy.source_block)
        assert not np.shares_memory(source, target), "what a copy reads while it writes it is not defined"
        target[:] = source

    def zero(self, address: int, width: int, lines: int = 1, line: int = 0) -> None:
        whole = self.bytes_at(address, (lines - 1) * line + width)
        written = np.lib.stride_tricks.as_strided(whole, (lines, width), (line, 1))
        self.queue.append(lambda: written.fill(0))

    def load(self, image: bytes, names: Sequence[str]) -> dict[str, Function]:
        kernels = entries(image)
        self.loaded = {Function(1 + number): (name, kernels[name]) for number, name in enumerate(names)}
        return {name: function for function, (name, _) in self.loaded.items()}

    def launch(self, function: Function, grid: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
        name, kinds = self.loaded[function]
        self.launched.append(name)
        assert [ctypes.sizeof(each) for each in arguments] == [ctypes.sizeof(kind) for kind in kinds]
        values = [each.value for each in arguments]
        self.queue.append(lambda: run_kernel(name, grid, values, self.holds))

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """As CUDA does it: what `work` asks for is kept, with its addresses, and not done."""
        self.captures += 1
        queue, self.queue = self.queue, []
        work()
        recorded, self.queue = self.queue, queue

        def launch(keep: Callable[[], None] = work) -> None:
            self.queue.extend(recorded)

        self.graphs.add(launch)
        return launch

    def wait(self) -> None:
        self.waits += 1
        while self.queue:
            self.queue.pop(0)()


class HostContext:
    """A context of a `HostProgram`."""


class HostProgram:
    """A `device_calls.DeviceProgram` that is a graph on ONNX Runtime, over memory of a `HostDevice`."""

    logits_dtype = np.dtype(np.float32)
    captures = True

    def __init__(self, session: OnnxRuntimeSession, device: HostDevice):
        self.session, self.device = session, device
        self.layout, self.vocabulary, self.asks = session.layout, session.vocabulary, session.asks
        self.bound: list[tuple[str, dict[str, tuple[int, ...]]]] = []
        self.contexts = WeakSet[HostContext]()
        self.made: list[str] = []
        self.idles = 0

    def context(self, phase: str) -> HostContext:
        context = HostContext()
        self.contexts.add(context)
        self.made.append(phase)
        return context

    def idle(self) -> None:
        self.idles += 1

    def names(self, kind: str) -> list[str]:
        return [(PAST if kind == "past" else NEW) + name for name in self.layout.names]

    def bind(
        self, context: HostContext, phase: str, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
    ) -> Callable[[], None]:
        assert all(address % ALIGNMENT == 0 for address in addresses.values())
        self.logits_at = addresses["logits"]
        self.bound.append((phase, dict(shapes)))
        count, seq = shapes["input_ids"]
        dtypes = self.layout.dtypes
        inputs = [at(addresses[name], np.int64, *shapes[name]) for name in TOKEN_INPUTS]
        inputs += [at(addresses[name], dtype, *shapes[name]) for name, dtype in zip(self.names("past"), dtypes)]
        scored = shapes[LOGITS_INDICES][1] if self.asks else seq
        asked = [at(addresses[LOGITS_INDICES], np.int64, count, scored)] if self.asks else []
        outputs = [at(addresses["logits"], np.float32, count, scored, self.vocabulary)]
        outputs += [
            at(addresses[name], dtype, count, heads, seq, size)
            for name, dtype, (heads, size) in zip(self.names("new"), dtypes, self.layout.shapes)
        ]
        step = self.session.bind(inputs, outputs)

        def work() -> None:
            for tensor in (*inputs, *asked, *outputs):
                self.device.inside(tensor.ctypes.data, tensor.nbytes)
            for indices in asked:
                np.testing.assert_array_equal(indices, last_indices((count, seq), scored))
            step()

        def run(keep: HostContext = context) -> None:
            self.device.queue.append(work)

        return run
