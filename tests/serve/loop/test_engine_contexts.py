"""An engine as a session, on a stand-in for TensorRT whose engines remember what is asked of them, over memory of the
host: a GPU runs the real one (`tests/gpu`). The names that are called are held against the real runtime.
"""

import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8q.serve.loop import engine_session
from fp8q.serve.loop.engine_session import (
    Bounds,
    EngineRuntime,
    EngineSession,
    Kernels,
    SharedMemory,
    bounds_of,
    has_branches,
    kernel_files,
)

SHAPES = {
    "input_ids": (-1, -1),
    "attention_mask": (-1, -1),
    "position_ids": (-1, -1),
    "past_key_values.0.key": (-1, 2, -1, 64),
    "past_key_values.0.value": (-1, 2, -1, 64),
    "logits": (-1, -1, 16),
    "new_key_values.0.key": (-1, 2, -1, 64),
    "new_key_values.0.value": (-1, 2, -1, 64),
}
#: The largest tokens and mask of each profile, over 4,096 slots: prompts, and steps.
MOST = [{"input_ids": (2, 2048), "attention_mask": (2, 6144)}, {"input_ids": (8, 1), "attention_mask": (8, 4097)}]


class Context:
    """A context that needs 1,000 bytes a token."""

    def __init__(self, how: Any):
        self.how, self.profile, self.shapes, self.memory, self.runs = how, -1, {}, (0, 0), 0  # type: ignore[var-annotated]

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        return address % 256 == 0

    def update_device_memory_size_for_shapes(self) -> int:
        assert "past_key_values.0.value" in self.shapes
        return 1000 * int(np.prod(self.shapes["input_ids"]))

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = address, size

    def execute_async_v3(self, stream: int) -> bool:
        needed = self.update_device_memory_size_for_shapes()
        assert self.memory[1] >= needed
        self.runs += 1
        return True


class Cache:
    """Compiled kernels: one byte for each context that compiled into them."""

    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, blob: bytes) -> bool:
        self.kernels = blob
        return blob.startswith(b"k")

    def serialize(self) -> bytes:
        return self.kernels


class Config:
    def __init__(self) -> None:
        self.strategy = self.cache = self.cuda_graph_strategy = None

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy


class Engine:
    num_io_tensors, num_optimization_profiles = len(SHAPES), len(MOST)

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    def get_tensor_name(self, index: int) -> str:
        return [*SHAPES][index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return SHAPES[name]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="BF16" if "key" in name else "FLOAT")

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        most = MOST[profile][name]
        return [most, most, most]

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return 1000 * int(np.prod(MOST[profile]["input_ids"]))

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, how: Any) -> Context:
        if isinstance(how, Config) and how.cache is not None:
            how.cache.kernels += b"k"
        self.contexts.append(Context(how))
        return self.contexts[-1]


Opened = tuple[EngineSession, Engine, Path]


@pytest.fixture
def open_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_device: Callable[[], Any]
) -> Callable[..., Opened]:
    """`open_engine(runtime, branches)`: a session of the stand-in, its engine, its plan; None: nothing is known of
    branches.
    """

    def opened(runtime: EngineRuntime, branches: bool | None = False) -> Opened:
        engine, plan = Engine(), tmp_path / "sm90.plan"
        plan.write_bytes(b"plan")
        if branches is not None:
            plan.with_suffix(".json").write_text(json.dumps({"branches": branches}))
        library = SimpleNamespace(
            Logger=type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None}),
            Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine),
            ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="shared"),
            CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole", DISABLED="none"),
        )
        monkeypatch.setattr(engine_session, "_import", lambda runtime: library)
        monkeypatch.setattr(engine_session, "CudaDevice", lambda gpu: host_device())
        return EngineSession(plan, runtime), engine, plan

    return opened


def test_a_session_is_read_from_its_engine(open_engine: Callable[..., Opened]) -> None:
    session, _, _ = open_engine("tensorrt")
    assert (session.vocabulary, session.most_rows, session.most_positions) == (16, 2, 4096)
    assert (session.pace.chunk, session.pace.share) == (1024, 1024)
    assert session.layout.names == ("0.key", "0.value")


def test_contexts_share_memory_that_their_shapes_need(open_engine: Callable[..., Opened]) -> None:
    session, engine, _ = open_engine("tensorrt")
    batch = session.open_batch(2, 4096)
    batch.reserve(128, 128, 0)
    for rows, length in ((1, 8), (2, 4), (1, 64), (1, 8)):
        batch.prefill(0, np.ones((rows, length), np.int64), np.zeros(rows, np.int64), np.full(rows, length))
    for rows in (1, 2, 1):
        batch.decode(np.ones(rows, np.int64), np.full(rows, 64))
    prompts, one, two = engine.contexts
    whole = 1024 * 1000  # of a chunk, though none was so long
    assert [context.how for context in engine.contexts] == ["shared"] * 3
    assert [context.profile for context in engine.contexts] == [0, 1, 1]
    assert prompts.memory == one.memory == two.memory
    assert prompts.memory[1] == whole
    sizes = [size for _, size in session.device.memory.values()]  # type: ignore[attr-defined]
    assert [size for size in sizes if size % 1000 == 0] == [whole]


def test_a_call_that_is_larger_than_a_chunk_gets_a_block_of_its_own(open_engine: Callable[..., Opened]) -> None:
    """Windows that are validated together: the first block stays, for captured steps repeat its address."""
    session, engine, _ = open_engine("tensorrt")
    batch = session.open_batch(2, 4096)
    batch.reserve(1024, 1024, 0)
    batch.prefill(0, np.ones((1, 8), np.int64), np.zeros(1, np.int64), np.full(1, 8))
    first = engine.contexts[0].memory
    batch.prefill(0, np.ones((2, 1024), np.int64), np.zeros(2, np.int64), np.full(2, 1024))
    assert engine.contexts[0].memory[1] == 2 * 1024 * 1000
    batch.decode(np.ones(1, np.int64), np.full(1, 8))
    assert engine.contexts[1].memory == first


def test_blocks_of_captured_steps_stay_where_they_are(host_device: Callable[[], Any]) -> None:
    device = host_device()
    memory = SharedMemory(device)
    first = memory.block(1000)
    assert memory.block(400) == memory.block(1000) == first
    second = memory.block(1001)
    assert second[1] == 2000
    assert (memory.block(1000), memory.block(2000)) == (first, second)
    device.wait()
    assert set(device.memory) == {first[0], second[0]}
    assert SharedMemory(device).block(0)[1] == 1  # an engine may need none


@pytest.mark.parametrize(("branches", "captures"), [(False, True), (True, False), (None, False)])
def test_an_engine_is_captured_unless_it_may_have_branches(
    open_engine: Callable[..., Opened], branches: bool | None, captures: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session, _, plan = open_engine("tensorrt", branches)
    assert session.captures is captures
    told = (
        f"{plan}: nothing beside it says whether it has branches, so it runs without CUDA graphs, which is slower; "
        "build it again with `fp8q build-engine`"
    )
    assert caplog.messages == ([told] if branches is None else [])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"branches": null}'])
def test_a_record_that_does_not_read_says_nothing_of_branches(tmp_path: Path, text: str) -> None:
    (tmp_path / "sm90.json").write_text(text)
    assert has_branches(tmp_path / "sm90.plan")


@pytest.mark.parametrize(("branches", "steps"), [(False, "whole"), (True, "none")])
def test_tensorrt_rtx_captures_its_steps_by_itself(
    open_engine: Callable[..., Opened], branches: bool, steps: str
) -> None:
    session, engine, _ = open_engine("tensorrt-rtx", branches)
    assert session.captures is False
    session.context("prefill")
    session.context("decode")
    assert [context.how.cuda_graph_strategy for context in engine.contexts] == ["none", steps]
    assert {context.how.strategy for context in engine.contexts} == {"shared"}


def test_compiled_kernels_are_stored_beside_the_plan(open_engine: Callable[..., Opened]) -> None:
    session, _, plan = open_engine("tensorrt-rtx")
    stored = plan.with_suffix(".kernels")
    session.idle()
    assert not stored.exists()  # nothing is compiled yet
    session.context("prefill")
    session.idle()
    assert stored.read_bytes() == b"k"
    stored.write_bytes(b"kk")
    session.idle()  # nothing new
    assert stored.read_bytes() == b"kk"
    again, _, _ = open_engine("tensorrt-rtx")
    again.context("decode")
    again.idle()
    assert stored.read_bytes() == b"kkk"  # those of the file, and one more
    assert sorted(path.name for path in plan.parent.iterdir()) == ["sm90.json", "sm90.kernels", "sm90.plan"]


def test_a_folder_that_takes_no_kernels_is_left_alone(open_engine: Callable[..., Opened]) -> None:
    session, _, plan = open_engine("tensorrt-rtx")
    plan.with_suffix(".kernels").mkdir()
    session.context("prefill")
    session.idle()
    assert sorted(path.name for path in plan.parent.iterdir()) == ["sm90.json", "sm90.kernels", "sm90.plan"]


def test_kernels_of_a_read_only_repository_are_stored_where_the_environment_says(
    open_engine: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _, plan = open_engine("tensorrt-rtx")
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setenv("FP8Q_KERNELS", str(volume))
    beside, elsewhere = kernel_files(plan)
    assert (beside, elsewhere.parent) == (plan.with_suffix(".kernels"), volume)
    beside.mkdir()  # nothing can be written there, also by root
    for expected in (b"k", b"kk"):
        session, _, _ = open_engine("tensorrt-rtx")
        session.context("prefill")
        session.idle()
        assert elsewhere.read_bytes() == expected  # the second start begins with what the first compiled
    assert [path.name for path in volume.iterdir()] == [elsewhere.name]


def test_kernels_are_stored_again_where_calls_of_other_shapes_came(tmp_path: Path) -> None:
    kernels, stored = Kernels([tmp_path / "sm90.kernels"], Engine()), tmp_path / "sm90.kernels"
    kernels.config()
    for length, written in ((4, True), (8, True), (4, False), (8, False), (16, True)):
        kernels.meet({"input_ids": (1, length), "attention_mask": (1, 64 + length)})
        kernels.store()
        assert stored.exists() is written
        stored.unlink(missing_ok=True)


def test_the_newest_kernels_that_fit_are_loaded(tmp_path: Path) -> None:
    beside, volume = tmp_path / "beside.kernels", tmp_path / "volume.kernels"
    for age, (path, content) in enumerate(((volume, b"kkk"), (beside, b"k"))):
        path.write_bytes(content)
        os.utime(path, (1000 + age, 1000 + age))
    kernels = Kernels([beside, volume], Engine())
    assert kernels.config().cache.kernels == b"k"
    beside.write_bytes(b"of another version")
    kernels = Kernels([beside, volume], Engine())
    assert kernels.config().cache.kernels == b"kkk"
    volume.write_bytes(b"of another GPU")
    assert Kernels([beside, volume], Engine()).config().cache.kernels == b""


def test_a_step_and_a_prompt_take_the_profiles_made_for_them() -> None:
    both = bounds_of([(4, 512), (8, 1)], [2048, 4096])
    assert both == Bounds({"decode": 1, "prefill": 0}, rows=4, capacity=2048, chunk=512)
    assert bounds_of([(2, 64)], [128]) == Bounds({"decode": 0, "prefill": 0}, rows=2, capacity=128, chunk=64)


def test_the_runtime_has_what_is_called() -> None:
    library = import_module("tensorrt_rtx")
    used = {
        "Runtime": ["deserialize_cuda_engine"],
        "ICudaEngine": [
            "create_execution_context", "create_runtime_config", "get_tensor_dtype", "get_tensor_name",
            "get_tensor_profile_shape", "get_tensor_shape", "num_io_tensors", "num_optimization_profiles",
        ],
        "IExecutionContext": [
            "execute_async_v3", "set_device_memory", "set_input_shape", "set_optimization_profile_async",
            "set_tensor_address", "update_device_memory_size_for_shapes",
        ],
        "ExecutionContextAllocationStrategy": ["USER_MANAGED"],
        "IRuntimeConfig": [
            "create_runtime_cache", "cuda_graph_strategy", "set_execution_context_allocation_strategy",
            "set_runtime_cache",
        ],
        "IRuntimeCache": ["deserialize", "serialize"],
        "CudaGraphStrategy": ["DISABLED", "WHOLE_GRAPH_CAPTURE"],
        "DataType": ["FLOAT", "HALF", "BF16", "FP8"],
    }  # fmt: skip
    absent = [
        f"{kind}.{name}" for kind, names in used.items() for name in names if not hasattr(getattr(library, kind), name)
    ]
    assert absent == []
