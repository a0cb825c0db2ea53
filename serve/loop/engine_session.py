"""An engine of TensorRT or TensorRT-RTX as a session: everything but tokens and logits stays on the GPU.

An engine has a profile for prompts and one for one token a row (`export.engine.profiles`), recognized by their numbers
of tokens; their bounds are the session's. Each captured step has an execution context of its own: a CUDA graph contains
the context's memory, and changing the context's shapes would invalidate it (TensorRT's documentation, "CUDA Graphs").
TensorRT-RTX captures by itself, since its kernels change while it runs (`IRuntimeConfig.cuda_graph_strategy`), so
nothing is captured around it.

Written from NVIDIA's documentation and the signatures of tensorrt-rtx 1.7: neither runtime has run here yet, without a
GPU.

Imports only NumPy, its neighbours in this folder, and the runtime, as it is copied into Triton repositories.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from .cache import CacheLayout
from .cuda import CudaDevice, CudaError
from .device import slot_step
from .device_batch import DeviceBatch, Phase, Shapes
from .sessions import NEW, PAST, TOKEN_INPUTS, Pace, SessionError

EngineRuntime = Literal["tensorrt", "tensorrt-rtx"]
RUNTIMES: tuple[EngineRuntime, ...] = get_args(EngineRuntime)
#: TensorRT's name of an element type -> what holds it on the host: uint8 FP8 codes, uint16 BF16.
DTYPES = {"FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "FP8": np.uint8}
#: Positions of prompts that a call takes in: enough that a GPU multiplies rather than reads. Not measured.
CHUNK = 256
#: The unit in which memory is told.
GB = 1e9


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
    decode, prefill = lengths.index(min(lengths)), lengths.index(max(lengths))
    both = (decode, prefill)
    return Bounds(
        {"decode": decode, "prefill": prefill},
        min(tokens[index][0] for index in both),
        min(capacities[index] for index in both),
        lengths[prefill],
    )


class EngineSession:
    """A `sessions.Session` on the GPU, and the `device_batch.DeviceProgram` that its batches run."""

    def __init__(self, plan: Path, runtime: EngineRuntime):
        """Load the engine at `plan`.

        Raises SessionError where the runtime is not installed, there is no GPU, or the engine is not for it.
        """
        self._library = _import(runtime)
        try:
            self.device = CudaDevice(captures=runtime == "tensorrt")
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
        self._captures = runtime == "tensorrt"
        self._read(plan)
        self._prefill = self._context("prefill")

    def _read(self, plan: Path) -> None:
        """Find out what the engine takes and gives."""
        engine = self._engine
        present = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        names = tuple(name.removeprefix(PAST) for name in present if name.startswith(PAST))
        needed = [*TOKEN_INPUTS, PAST + "0.key", "logits", *(NEW + name for name in names)]
        if absent := [name for name in needed if name not in present]:
            raise SessionError(f"{plan}: has no tensor named {absent[0]}, so it is no engine of a graph of fp8q's")
        dims = {name: tuple(engine.get_tensor_shape(PAST + name)) for name in names}
        self.layout = CacheLayout(
            names,
            tuple((dims[name][1], dims[name][3]) for name in names),
            tuple(self._dtype(plan, PAST + name) for name in names),
        )
        self.vocabulary, self.logits_dtype = int(engine.get_tensor_shape("logits")[-1]), self._dtype(plan, "logits")
        most = [
            [tuple(engine.get_tensor_profile_shape(name, index)[2]) for name in ("input_ids", PAST + names[0])]
            for index in range(engine.num_optimization_profiles)
        ]
        bounds = bounds_of([(tokens[0], tokens[1]) for tokens, _ in most], [past[2] for _, past in most])
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

    def _context(self, phase: Phase) -> Any:
        """An execution context in the profile of `phase`; one that captures itself, where the runtime does that."""
        if self._captures or phase == "prefill":
            context = self._engine.create_execution_context()
        else:
            config = self._engine.create_runtime_config()
            config.cuda_graph_strategy = self._library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            context = self._engine.create_execution_context(config)
        if context is None or not context.set_optimization_profile_async(self._profiles[phase], self.device.stream):
            raise SessionError(f"the engine gives no execution context for {phase}: is the GPU's memory used up?")
        return context

    def open_batch(self, rows: int, positions: int) -> DeviceBatch:
        """Make room on the GPU, for `positions` rounded up to whole steps of slots: `Session.open_batch`.

        Raises SessionError, saying what fits, where the GPU's free memory cannot hold the cache that is asked for. It
        is taken as the sequences grow, and a server that finds out then loses the requests in flight.
        """
        layout, free, step = self.layout, self.device.free_memory(), slot_step(self.layout)
        positions = min(-(-positions // step) * step, self.most_positions or positions)
        position = sum(
            heads * size * dtype.itemsize for (heads, size), dtype in zip(layout.shapes, layout.dtypes, strict=True)
        )
        if (needed := rows * positions * position) > free:
            fit, longest = free // (positions * position), free // position
            raise SessionError(
                f"a cache of {rows} sequences of {positions:,} positions takes {needed / GB:.2f} GB, and this GPU has "
                f"{free / GB:.2f} GB free: "
                + (
                    f"{fit} of them fit, with --max-batch {fit}"
                    if fit
                    else f"not one fits; build an engine with --max-seq-len {longest} or less"
                )
            )
        return DeviceBatch(self, self.device, rows, positions)

    def names(self, kind: Literal["past", "new"]) -> Sequence[str]:
        """Tensors of the cache: `Program.names`."""
        return [(PAST if kind == "past" else NEW) + name for name in self.layout.names]

    def bind(self, phase: Phase, shapes: Shapes, addresses: Mapping[str, int]) -> Callable[[], None]:
        """Point the engine at tensors: `Program.bind`. Each step has a context of its own, prompts share one."""
        context = self._prefill if phase == "prefill" else self._context(phase)
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise SessionError(f"{name} of {shape}: is outside the engine's profile for {phase}")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise SessionError(f"{name}: the engine takes no tensor at {address:#x}")

        def run() -> None:
            if not context.execute_async_v3(self.device.stream):
                raise SessionError(f"the engine failed at {phase}; its log is on standard error")

        return run


def _import(runtime: str) -> Any:
    try:
        return import_module(runtime.replace("-", "_"))
    except ImportError as error:
        raise SessionError(
            f"{runtime} is not installed ({error}); install it with `pip install 'fp8q[{runtime}]'`"
        ) from error
