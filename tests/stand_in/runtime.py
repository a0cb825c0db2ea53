"""A stand-in for TensorRT and TensorRT-RTX, for a machine with TensorRT-RTX's builder and no GPU.

Engines are built by TensorRT-RTX's own builder, which needs none, and its plans are what the program says that it
compiled. What needs a GPU stands in: `Runtime` runs a plan's graph, in FP32, on ONNX Runtime over the memory of a
`Driver`, within the bounds of its profiles; and the inspector tells of TensorRT's plans what is in their program, in
the form of TensorRT's dumps.
"""

import ctypes
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8q.core.files import sha256_file
from fp8q.export.engine.info import EngineInfo
from fp8q.export.engine.plan import read_plan
from fp8q.export.engine.profiles import Profile
from fp8q.serve.loop.cache import BLOCK
from fp8q.serve.loop.host_batch import LOGITS_INDICES, last_indices
from fp8q.serve.loop.sessions import NEW, PAST, TOKEN_INPUTS, OnnxRuntimeSession

from .driver import Driver, memory

VERSION = "11.4.0.1"
#: What TensorRT-RTX's compiled kernels are stored as.
KERNELS = b"kernels"
SPELLED = {"fp8": "FP8", "bf16": "BFloat16", "fp16": "Half", "fp32": "Float"}


class Context:
    """An execution context: one profile, shapes and addresses."""

    def __init__(self, engine: "Engine") -> None:
        self.engine, self.profile = engine, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory = (0, -1)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return 0 <= profile < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = tuple(shape)
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % 256 == 0

    def update_device_memory_size_for_shapes(self) -> int:
        """A kilobyte for each token."""
        return 1024 * int(np.prod(self.shapes["input_ids"]))

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = address, size

    def execute_async_v3(self, stream: int) -> bool:
        assert stream, "work goes to the session's stream"
        assert self.engine.driver.current == self.engine.gpu, "the thread is on the engine's GPU"
        address, size = self.memory
        assert size >= self.update_device_memory_size_for_shapes(), "the context has its memory"
        assert self.engine.driver.inside(address, size), "the memory of the context was not freed"
        session, (count, seq) = self.engine.session, self.shapes["input_ids"]
        layout = session.layout

        def at(name: str, dtype: Any, *shape: int) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            found: np.ndarray = memory(self.addresses[name], size).view(dtype).reshape(shape)
            return found

        inputs = [at(name, np.int64, *self.shapes[name]) for name in TOKEN_INPUTS]
        pasts = zip(layout.names, layout.dtypes, strict=True)
        inputs += [at(PAST + name, dtype, *self.shapes[PAST + name]) for name, dtype in pasts]
        asked = [at(LOGITS_INDICES, np.int64, *self.shapes[LOGITS_INDICES])] if session.asks else []
        scored = self.shapes[LOGITS_INDICES][1] if session.asks else seq
        outputs = [at("logits", np.float32, count, scored, session.vocabulary)]
        news = zip(layout.names, layout.dtypes, layout.shapes, strict=True)
        outputs += [at(NEW + name, dtype, count, heads, seq, size) for name, dtype, (heads, size) in news]
        step = session.bind(inputs, outputs)

        def work() -> None:
            for indices in asked:
                np.testing.assert_array_equal(indices, last_indices((count, seq), scored))
            step()

        return self.engine.driver.enqueue(work) == 0


class Engine:
    """A plan whose graph is at `graph`, with the profiles that it was built with."""

    def __init__(self, driver: Driver, graph: Path, profiles: list[Profile]) -> None:
        self.driver, self.session, self.profiles = driver, OnnxRuntimeSession(graph, 1), profiles
        self.gpu = driver.current
        layout = self.session.layout
        self.dimensions: dict[str, tuple[int | str, ...]] = {
            **dict.fromkeys(TOKEN_INPUTS, ("batch", "seq")),
            "attention_mask": ("batch", "capacity + seq"),
        }
        if self.session.asks:
            self.dimensions[LOGITS_INDICES] = ("batch", "scored")
        for name, (heads, size) in zip(layout.names, layout.shapes, strict=True):
            in_blocks = (f"{heads}*batch*blocks", BLOCK, size)
            self.dimensions[PAST + name] = in_blocks if layout.in_blocks else ("batch", heads, "capacity", size)
        self.dimensions["logits"] = ("batch", "scored" if self.session.asks else "seq", self.session.vocabulary)
        for name, (heads, size) in zip(layout.names, layout.shapes, strict=True):
            self.dimensions[NEW + name] = ("batch", heads, "seq", size)
        self.num_io_tensors, self.num_optimization_profiles = len(self.dimensions), len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.dimensions)[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.dimensions[name])

    def get_tensor_dtype(self, name: str) -> Any:
        plain = name.removeprefix(PAST).removeprefix(NEW)
        kind = np.dtype(np.float32)
        if plain in self.session.layout.names:
            kind = self.session.layout.dtypes[self.session.layout.names.index(plain)]
        return SimpleNamespace(name={"float32": "FLOAT", "uint8": "FP8"}[kind.name])

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return self.profiles[index].shapes(name, self.dimensions[name])

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        """A kilobyte for each token of the largest call."""
        return 1024 * int(np.prod(self.get_tensor_profile_shape("input_ids", index)[2]))

    def create_runtime_config(self) -> Any:
        kernels = SimpleNamespace(deserialize=lambda blob: blob == KERNELS, serialize=lambda: KERNELS)
        return SimpleNamespace(
            create_runtime_cache=lambda: kernels,
            set_runtime_cache=lambda cache: cache is not None,
            set_execution_context_allocation_strategy=lambda strategy: None,
        )

    def create_execution_context(self, config: Any = None) -> Context:
        assert self.driver.current == self.gpu, "the thread is on the engine's GPU"
        return Context(self)


def inspected(plan: bytes) -> str:
    """What TensorRT's inspector would say of a plan's program: a layer for each kernel, GEMMs with one input and the
    weight among the constants.
    """
    found = read_plan(plan)
    assert found is not None
    layers = []
    for profile, products in found.profiles.items():
        mark = f" [profile {profile}]" if profile else ""
        for number, product in enumerate(products):
            kinds = (*product.operands, product.result)
            x, weight, y = ({"Name": "t", "Dimensions": [8, 64], "Datatype": SPELLED[kind]} for kind in kinds)
            layers.append(
                {
                    "Name": "+".join(product.nodes).replace(".", "_") + f"_myl{profile}_{number}{mark}",
                    "LayerType": "gemm",
                    "Inputs": [x],
                    "Constants": [weight],
                    "Outputs": [y],
                    "TacticName": "__myl_Fc_0x5b1d_tensorop128x128",
                    "StreamId": 0,
                    "Metadata": "\x1f".join(f"[ONNX Layer: {node}]" for node in (*product.nodes, *product.layers)),
                }
            )
    return json.dumps({"Layers": layers, "I/O Tensors": []})


class Machine:
    """A machine with a GPU, and the runtimes that are installed there."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.known: dict[str, tuple[Path, list[Profile]]] = {}
        self.starts = True

    def knows(self, plan: Path, graph: Path, profiles: Sequence[Profile] | None = None) -> None:
        """Let the runtime run a plan by its graph in FP32, with these profiles or those of the record beside it."""
        if profiles is None:
            record = plan.with_suffix(".json").read_text(encoding="utf-8")
            profiles = EngineInfo.model_validate_json(record).profiles
        self.known[sha256_file(plan)] = (graph, list(profiles))

    def runtime(self, name: str) -> ModuleType:
        """The module of a runtime, with TensorRT-RTX's builder where that is installed."""
        found = ModuleType(name)
        found.__spec__ = ModuleSpec(name, None)
        found.__dict__.update(
            __version__=VERSION,
            CudaGraphStrategy=SimpleNamespace(DISABLED=0, WHOLE_GRAPH_CAPTURE=1),
            ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2),
        )
        if find_spec("tensorrt_rtx") is not None:
            real = import_module("tensorrt_rtx")
            found.__dict__.update({each: getattr(real, each) for each in dir(real) if not each.startswith("__")})
            if name == "tensorrt":
                found.__dict__["Builder"] = self._builder(real)
            else:
                found.__dict__["__version__"] = real.__version__
        found.__dict__.update(Runtime=partial(self._runtime, name), Logger=Logger)
        return found

    def _builder(self, real: Any) -> type:
        """TensorRT-RTX's builder, for this machine's GPU as TensorRT's is."""
        target = "SM{}{}".format(*self.driver.capability)

        class Builder:
            def __init__(self, logger: Any) -> None:
                self._builder = real.Builder(logger)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._builder, name)

            def create_builder_config(self) -> Any:
                config = self._builder.create_builder_config()
                config.num_compute_capabilities = 1
                config.set_compute_capability(real.ComputeCapability.__members__[target], 0)
                return config

        return Builder

    def _runtime(self, name: str, logger: Any) -> Any:
        if not self.starts:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return SimpleNamespace(deserialize_cuda_engine=partial(self._deserialized, name))

    def _deserialized(self, name: str, plan: Any) -> "Engine | Inspected | None":
        """The engine of a known plan; of others TensorRT's may be inspected, and TensorRT-RTX's are not of here."""
        data = bytes(plan)
        if known := self.known.get(hashlib.sha256(data).hexdigest()):
            return Engine(self.driver, *known)
        return Inspected(data) if name == "tensorrt" and read_plan(data) is not None else None


class Inspected:
    """A plan that was just built, which is inspected and not run."""

    def __init__(self, plan: bytes) -> None:
        self.said = inspected(plan)

    def create_engine_inspector(self) -> Any:
        return SimpleNamespace(get_engine_information=lambda form: self.said)


class Logger:
    """A logger of a runtime."""

    ERROR = 1

    def __init__(self, least: int) -> None:
        self.least = least


@contextmanager
def machine(driver: Driver, *runtimes: str) -> Iterator[Machine]:
    """Have this driver, and these runtimes (`tensorrt`, `tensorrt_rtx`), in the block."""
    found, real = Machine(driver), ctypes.CDLL

    def library(name: Any, *rest: Any, **more: Any) -> Any:
        return driver if name == "libcuda.so.1" else real(name, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", library)
        for name in runtimes:
            patch.setitem(sys.modules, name, found.runtime(name))
        yield found
