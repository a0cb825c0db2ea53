"""An engine of TensorRT or TensorRT-RTX as a session: everything but tokens and logits stays on the GPU.

An engine has a profile for prompts and one for one token a row (`export.engine.profiles`), recognized by their numbers
of tokens; their bounds are the session's. Each captured step has an execution context of its own, since changing the
context's shapes would invalidate its CUDA graph (TensorRT's documentation, "CUDA Graphs"). All contexts work in memory
that they share (`ExecutionContextAllocationStrategy.USER_MANAGED`), for they run one after the other on one stream: one
block, of the size that the longest chunk of a prompt needs behind the longest past, or the largest step, taken when a
batch is opened. A context with memory of its own takes as much as the largest call of its profile.

TensorRT-RTX captures by itself, since its kernels change while it runs (`IRuntimeConfig.cuda_graph_strategy`), so
nothing is captured around it; its kernels are compiled here, and stored for the next start, beside the plan or where
`FP8Q_KERNELS` says.

No engine whose graph has branches is captured: the condition of an `If` is read on the host (TensorRT's issue 2836), so
that a CUDA graph repeats the branch that it was captured with. The engine's record beside the plan says whether it has.

Written from NVIDIA's documentation and the signatures of tensorrt-rtx 1.7: neither runtime has run here yet, without a
GPU.

Imports only NumPy, its neighbours in this folder, and the runtime, as it is copied into Triton repositories.
"""

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from .cache import CacheLayout
from .cuda import CudaDevice, CudaError, DeviceMemoryError, memory_text
from .device import Device, cache_bytes, slot_step
from .device_batch import DeviceBatch
from .device_calls import CallShape, Phase, Shapes, input_shapes
from .device_kernels import DeviceKernels, load_kernels
from .host_batch import LOGITS_INDICES
from .sessions import NEW, PAST, TOKEN_INPUTS, Pace, SessionError, is_in_blocks

EngineRuntime = Literal["tensorrt", "tensorrt-rtx"]
RUNTIMES: tuple[EngineRuntime, ...] = get_args(EngineRuntime)
#: TensorRT's name of an element type -> what holds it on the host: uint8 FP8 codes, uint16 BF16.
DTYPES = {"FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "FP8": np.uint8}
#: Positions of prompts that a call takes in. An H200 multiplies 412 FP8 positions in the time in which it reads a
#: weight (1,979 TFLOP/s, 4.8 TB/s, two operations a weight and position), if both go at their peak. Not measured.
CHUNK = 1024
#: The file beside a plan that TensorRT-RTX's compiled kernels are stored in; and the variable that names a folder for
#: those of plans whose folder is read-only, as a mounted repository may be.
KERNELS = ".kernels"
KERNELS_FOLDER = "FP8Q_KERNELS"
LOG = logging.getLogger("fp8q")


@dataclass(frozen=True)
class Bounds:
    """The limits of an engine's profiles: the number of that for each phase, and the most rows, slots, and tokens of a
    prompt in one call.
    """

    profiles: Mapping[Phase, int]
    rows: int
    capacity: int
    chunk: int


def bounds_of(tokens: Sequence[tuple[int, int]], capacities: Sequence[int]) -> Bounds:
    """The bounds of profiles whose largest `tokens` are (rows, tokens a row) and whose most slots are `capacities`.

    A step takes the profile of the fewest tokens a row, a prompt that of the most; one profile may be both.
    """
    lengths = [length for _, length in tokens]
    decode = lengths.index(min(lengths))
    prefill = lengths.index(max(lengths))
    both = (decode, prefill)
    return Bounds(
        {"decode": decode, "prefill": prefill},
        min(tokens[index][0] for index in both),
        min(capacities[index] for index in both),
        lengths[prefill],
    )


def has_branches(plan: Path) -> bool:
    """Tell whether the record of the engine at `plan` says that its graph has branches, or is silent."""
    try:
        said = json.loads(plan.with_suffix(".json").read_text(encoding="utf-8"))["branches"]
    except (OSError, ValueError, KeyError, TypeError):
        said = None
    if said is None:
        LOG.warning(
            "%s: nothing beside it says whether it has branches, so it runs without CUDA graphs, which is slower; "
            "build it again with `fp8q build-engine`",
            plan,
        )
    return said is not False


class SharedMemory:
    """Device memory that contexts share, one after the other; it goes with this object.

    Captured steps repeat its address, so blocks stay where they are. A further one comes only where a call needs more
    than any before, and is at least twice the last.
    """

    def __init__(self, device: Device):
        """No memory yet."""
        self._device = device
        self._blocks: list[tuple[int, int]] = []
        weakref.finalize(self, _free_all, device, self._blocks).atexit = False  # the driver is gone by then

    def block(self, needed: int) -> tuple[int, int]:
        """Return address and size of a block of `needed` bytes or more."""
        if size := self.lacking(needed):
            self._blocks.append((self._device.allocate(size), size))
        return next(block for block in self._blocks if block[1] >= needed)

    def lacking(self, needed: int) -> int:
        """The bytes that a block of `needed` or more would take, 0 where there is one."""
        if any(size >= needed for _, size in self._blocks):
            return 0
        return max(needed, 1, 2 * self._blocks[-1][1] if self._blocks else 0)


def _free_all(device: Device, blocks: list[tuple[int, int]]) -> None:
    for address, _ in blocks:
        device.free(address)


class EngineSession:
    """A `sessions.Session` on the GPU, and the `device_calls.DeviceProgram` that its batches run."""

    def __init__(self, plan: Path, runtime: EngineRuntime, gpu: int = 0):
        """Load the engine at `plan` on the GPU with the index `gpu`, which TensorRT takes from the calling thread.

        Raises SessionError where the runtime is not installed, there is no such GPU, or the engine is not for it.
        """
        self._library = _import(runtime)
        try:
            self.device = CudaDevice(gpu)
        except CudaError as error:
            raise SessionError(
                f"{runtime}: runs engines on an NVIDIA GPU ({error}); use the runtime onnxruntime"
            ) from error
        self._logger = self._library.Logger(self._library.Logger.ERROR)
        try:
            self._runtime = self._library.Runtime(self._logger)
        except TypeError as error:  # "factory function returned nullptr": NVIDIA/TensorRT, issue 2913
            raise SessionError(
                f"{runtime} {self._library.__version__} does not start on this machine's driver; update it (built for "
                "CUDA 13 it needs r580 or newer, for CUDA 12 r535)"
            ) from error
        self._engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise SessionError(
                f"{plan}: {runtime} {self._library.__version__} does not load it on this GPU; build it here with `fp8q "
                "build-engine`"
            )
        self._branches = has_branches(plan)
        self.captures = runtime == "tensorrt" and not self._branches
        self._memory = SharedMemory(self.device)
        self._kernels = Kernels(kernel_files(plan), self._engine) if runtime == "tensorrt-rtx" else None
        self._read(plan)

    def _read(self, plan: Path) -> None:
        """Find out what the engine takes and gives."""
        engine = self._engine
        present = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        names = tuple(name.removeprefix(PAST) for name in present if name.startswith(PAST))
        needed = [*TOKEN_INPUTS, PAST + "0.key", "logits", *(NEW + name for name in names)]
        if absent := [name for name in needed if name not in present]:
            raise SessionError(f"{plan}: has no tensor named {absent[0]}, so it is no engine of a graph of fp8q's")
        dims = {name: tuple(engine.get_tensor_shape(PAST + name)) for name in names}
        new = {name: tuple(engine.get_tensor_shape(NEW + name)) for name in names}
        self.layout = CacheLayout(
            names,
            tuple((new[name][1], new[name][3]) for name in names),
            tuple(self._dtype(plan, PAST + name) for name in names),
            is_in_blocks([*dims.values()], str(plan)),
        )
        self.asks = LOGITS_INDICES in present
        self.vocabulary, self.logits_dtype = int(engine.get_tensor_shape("logits")[-1]), self._dtype(plan, "logits")
        most = [
            [tuple(engine.get_tensor_profile_shape(name, index)[2]) for name in ("input_ids", "attention_mask")]
            for index in range(engine.num_optimization_profiles)
        ]
        bounds = bounds_of(
            [(tokens[0], tokens[1]) for tokens, _ in most], [mask[1] - tokens[1] for tokens, mask in most]
        )
        self._profiles, step = bounds.profiles, slot_step(self.layout)
        chunk = min(CHUNK, bounds.chunk)
        self.pace = Pace(chunk=chunk, share=chunk)
        self.most_rows: int | None = bounds.rows
        self.most_positions: int | None = bounds.capacity // step * step

    def _dtype(self, plan: Path, name: str) -> np.dtype[Any]:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in DTYPES:
            raise SessionError(f"{plan}: {name} is of {kind}; this version takes {', '.join(DTYPES)}")
        return np.dtype(DTYPES[kind])

    @cached_property
    def _own_kernels(self) -> DeviceKernels | None:
        """The kernels of this GPU, loaded and tried once."""
        return load_kernels(self.device, self.layout)

    def open_batch(self, rows: int, positions: int) -> DeviceBatch:
        """Take the memory on the GPU, for `positions` rounded up to whole steps of slots: `Session.open_batch`.

        Raises DeviceMemoryError, saying what fits, where the GPU's free memory does not hold the cache that is asked
        for beside what the longest call works in: a server that found out later would lose the requests in flight.
        """
        step = slot_step(self.layout)
        chunk = self.pace.chunk
        positions = min(-(-positions // step) * step, self.most_positions or positions)
        batch = DeviceBatch(self, self.device, rows, positions, self._own_kernels)
        works = self._longest_needs(batch.context, CallShape(1, chunk, positions, 1 if self.asks else None))
        calls = batch.call_bytes(chunk) + self._memory.lacking(works)
        free = self.device.free_memory()
        if cache_bytes(self.layout, rows, positions) + calls > free:
            raise self._no_room(rows, positions, calls, free)
        self._memory.block(works)
        batch.take(chunk)
        return batch

    def _longest_needs(self, prompts: Any, longest: CallShape) -> int:
        """The bytes that contexts work in: for the `longest` chunk of a prompt in the context of `prompts`, and for the
        largest step of the engine's profile of them.
        """
        needed = self._needs(prompts, "prefill", input_shapes(self, longest))
        if self._profiles["decode"] == self._profiles["prefill"]:
            return needed
        return max(needed, int(self._engine.get_device_memory_size_for_profile_v2(self._profiles["decode"])))

    def _no_room(self, rows: int, positions: int, calls: int, free: int) -> DeviceMemoryError:
        """The error for a cache that the `free` bytes do not hold beside those of the `calls`."""
        row = cache_bytes(self.layout, 1, positions)
        room = max(free - calls, 0)
        step = slot_step(self.layout)
        fit = room // row
        longest = room // cache_bytes(self.layout, 1, step) * step
        remedy = f"build an engine with --max-seq-len {longest} or less" if longest else "end what else runs there"
        return DeviceMemoryError(
            f"a cache of {rows} sequence{'s' if rows > 1 else ''} of {positions:,} positions takes "
            f"{memory_text(rows * row)} and the engine {memory_text(calls)} to work in, and this GPU has "
            f"{memory_text(free)} free, room for "
            + (f"{fit} of them" if fit else f"{longest:,} positions of one" if longest else "no position of one"),
            f"take --max-batch {fit}" if fit else remedy,
        )

    def names(self, kind: Literal["past", "new"]) -> Sequence[str]:
        """Tensors of the cache: `Program.names`."""
        return [(PAST if kind == "past" else NEW) + name for name in self.layout.names]

    def context(self, phase: Phase) -> Any:
        """An execution context in the profile of `phase`: `DeviceProgram.context`."""
        self.device.enter()
        shared = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._kernels is None:
            context = self._engine.create_execution_context(shared)
        else:
            graphs = self._library.CudaGraphStrategy
            config = self._kernels.config()
            config.set_execution_context_allocation_strategy(shared)
            captures = phase == "decode" and not self._branches
            config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if captures else graphs.DISABLED
            context = self._engine.create_execution_context(config)
        if context is None or not context.set_optimization_profile_async(self._profiles[phase], self.device.stream):
            raise SessionError(f"the engine gives no execution context for {phase}: is the GPU's memory used up?")
        return context

    def bind(self, context: Any, phase: Phase, shapes: Shapes, addresses: Mapping[str, int]) -> Callable[[], None]:
        """Point the engine at tensors: `DeviceProgram.bind`."""
        self.device.enter()
        block = self._memory.block(self._needs(context, phase, shapes))
        if self._kernels:
            self._kernels.meet(shapes)
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise SessionError(f"{name}: the engine takes no tensor at {address:#x}")
        context.set_device_memory(*block)

        def run() -> None:
            if not context.execute_async_v3(self.device.stream):
                raise SessionError(f"the engine failed at {phase}; its log is on standard error")

        return run

    def _needs(self, context: Any, phase: Phase, shapes: Shapes) -> int:
        """Set the shapes of a context's inputs; return the bytes that it works in."""
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise SessionError(f"{name} of {shape}: is outside the engine's profile for {phase}")
        return int(context.update_device_memory_size_for_shapes())

    def idle(self) -> None:
        """Store the kernels that were compiled since the last time: `DeviceProgram.idle`."""
        if self._kernels:
            self._kernels.store()


class Kernels:
    """TensorRT-RTX's compiled kernels, which all contexts of an engine share, and the files that may hold them."""

    def __init__(self, paths: Sequence[Path], engine: Any):
        """Load the kernels of the newest of `paths` that has some of this GPU and version; others are compiled anew."""
        self._paths = paths
        self._engine = engine
        self._fresh = False
        self._met: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()
        self._cache = self._empty()
        there = [path for path in paths if path.is_file()]
        for path in sorted(there, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if self._cache.deserialize(path.read_bytes()):
                break
            LOG.info("%s: kernels of another GPU or version", path)
            self._cache = self._empty()

    def _empty(self) -> Any:
        return self._engine.create_runtime_config().create_runtime_cache()

    def config(self) -> Any:
        """Make the configuration of a context that compiles into, and takes from, what is shared."""
        config = self._engine.create_runtime_config()
        config.set_runtime_cache(self._cache)
        self._fresh = True
        return config

    def meet(self, shapes: Shapes) -> None:
        """A call of these shapes comes, for which kernels are compiled where it is the first."""
        met = tuple(sorted((name, tuple(shape)) for name, shape in shapes.items()))
        self._fresh |= met not in self._met
        self._met.add(met)

    def store(self) -> None:
        """Write the kernels where contexts or shapes came since the last time, to the first of the files that can be
        written.
        """
        if not self._fresh:
            return
        self._fresh = False
        for path in self._paths:
            partial = path.with_name(f"{path.name}.{os.getpid()}.part")
            try:
                partial.write_bytes(bytes(self._cache.serialize()))
                partial.replace(path)
            except OSError as error:
                LOG.info("%s: compiled kernels are not stored (%s)", path, error)
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
            else:
                return
        LOG.info("kernels are compiled again at the next start; %s names a folder for them", KERNELS_FOLDER)


def kernel_files(plan: Path) -> list[Path]:
    """The files that may hold the compiled kernels of `plan`: beside it, and in the folder that the environment
    names.
    """
    usual = plan.with_suffix(KERNELS)
    if not (folder := os.environ.get(KERNELS_FOLDER)):
        return [usual]
    with open(plan, "rb") as content:
        named = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    return [usual, Path(folder) / f"{plan.stem}-{named}{KERNELS}"]


def _import(runtime: str) -> Any:
    try:
        return import_module(runtime.replace("-", "_"))
    except ImportError as error:
        raise SessionError(
            f"{runtime} is not installed ({error}); install it with `pip install 'fp8q[{runtime}]'`"
        ) from error
