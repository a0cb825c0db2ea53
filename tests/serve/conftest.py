"""A model small enough to follow by hand, in the files and with the graph interface of a real one.

The counting model: tokens t0 … t14 and `</s>` (15); the next token is the sum of all tokens so far, each times 1 + (its
position mod 3), mod 16. It keeps the tokens in its keys and their positions mod 8 in its values, so whatever goes wrong
with the cache, the mask or the positions changes its answer: a past slot whose value is not its own index adds 1001 for
each step it is off.
"""

import ctypes
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from fp8q.core.files import write_document
from fp8q.core.run import Run
from fp8q.export.engine.info import EngineInfo
from fp8q.export.engine.profiles import profiles
from fp8q.export.engine.targets import MODULES
from fp8q.serve.loop.cuda import memcpy_3d
from fp8q.serve.loop.device import ALIGNMENT, Copy
from fp8q.serve.loop.device_batch import DeviceBatch
from fp8q.serve.loop.engine_session import RUNTIMES, EngineRuntime, EngineSession
from fp8q.serve.loop.generate import Generator
from fp8q.serve.loop.host_batch import LOGITS_INDICES, last_indices
from fp8q.serve.loop.sessions import NEW, PAST, TOKEN_INPUTS, Batch, OnnxRuntimeSession
from fp8q.serve.loop.text import Vocabulary
from tests.stand_in.driver import Driver
from tests.stand_in.runtime import Machine, machine

OpenEngine = Callable[..., EngineSession]
END = 15
WEIGHTS = "model-00001-of-00001.safetensors"

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
counting (int64[batch, seq] input_ids, int64[batch, total] attention_mask, int64[batch, seq] position_ids, ASKED
          KEYS[batch, 2, capacity, 4] past_key, VALUES[batch, 2, capacity, 4] past_value)
      => (float[batch, SCORED, 16] logits, KEYS[batch, 2, seq, 4] new_key, VALUES[batch, 2, seq, 4] new_value)
{
    one = Constant<value = float {1.0}> ()
    zero = Constant<value_int = 0> ()
    step = Constant<value_int = 1> ()
    three = Constant<value_int = 3> ()
    eight = Constant<value_int = 8> ()
    sixteen = Constant<value = float {16.0}> ()
    fault = Constant<value = float {1001.0}> ()
    inner = Constant<value_ints = [1, 3]> ()
    last = Constant<value_ints = [2]> ()
    middle = Constant<value_ints = [1]> ()
    heads = Constant<value_ints = [1, 2, 1, 4]> ()

    tokens = Cast<to = 1> (input_ids)
    marks_int = Mod (position_ids, eight)
    marks = Cast<to = 1> (marks_int)
    tokens_4d = Unsqueeze (tokens, inner)
    marks_4d = Unsqueeze (marks, inner)
    key = Expand (tokens_4d, heads)
    value = Expand (marks_4d, heads)
    STORE

    past_tokens = ReduceMean<keepdims = 0> (past_key_values, inner)
    past_marks = ReduceMean<keepdims = 0> (past_value_values, inner)
    past_shape = Shape (past_tokens)
    capacity_1d = Shape<start = 1> (past_tokens)
    capacity_0d = Squeeze (capacity_1d)
    slots_1d = Range (zero, capacity_0d, step)
    slots = Expand (slots_1d, past_shape)
    key_positions = Concat<axis = 1> (slots, position_ids)
    all_tokens = Concat<axis = 1> (past_tokens, tokens)
    all_marks = Concat<axis = 1> (past_marks, marks)

    queries = Unsqueeze (position_ids, last)
    keys = Unsqueeze (key_positions, middle)
    causal = LessOrEqual (keys, queries)
    filled_2d = Cast<to = 9> (attention_mask)
    filled = Unsqueeze (filled_2d, middle)
    allowed_bool = And (causal, filled)
    allowed = Cast<to = 1> (allowed_bool)

    weight_int = Mod (key_positions, three)
    weight_0 = Cast<to = 1> (weight_int)
    weight = Add (weight_0, one)
    weighted = Mul (all_tokens, weight)
    due_int = Mod (key_positions, eight)
    due = Cast<to = 1> (due_int)
    off_signed = Sub (all_marks, due)
    off = Abs (off_signed)
    penalty = Mul (off, fault)
    terms_2d = Add (weighted, penalty)
    terms = Unsqueeze (terms_2d, last)
    total_sum = MatMul (allowed, terms)
    remainder = Mod<fmod = 1> (total_sum, sixteen)
    distance = Sub (vocabulary, remainder)
    square = Mul (distance, distance)
    LOGITS
}
"""
#: What becomes of the logits of all positions: those that are asked for, or all.
ASKED = {
    "ASKED": "int64[batch, scored] logits_indices,", "SCORED": "scored",
    "LOGITS": """negated = Neg (square)
    asked = Unsqueeze (logits_indices, last)
    logits = GatherND<batch_dims = 1> (negated, asked)""",
}  # fmt: skip
ALL = {"ASKED": "", "SCORED": "seq", "LOGITS": "logits = Neg (square)"}
#: What is done with keys and values, as numbers or as codes.
PLAIN = """
    new_PART = Identity (PART)
    past_PART_values = Identity (past_PART)
"""
FP8 = """
    new_PART = QuantizeLinear<output_dtype = 17> (PART, one)
    past_PART_values = DequantizeLinear (past_PART, one)
"""
NAMES = {
    "past_key": "past_key_values.0.key", "past_value": "past_key_values.0.value",
    "new_key": "new_key_values.0.key", "new_value": "new_key_values.0.value",
}  # fmt: skip


def counting_graph(cache: str, asks: bool) -> onnx.ModelProto:
    """The graph without its initializer, `vocabulary` [0, 1, … 15]."""
    stored = {part: part[0] in {"off": "", "v": "v", "fp8": "kv"}[cache] for part in ("key", "value")}
    text = GRAPH.replace(
        "STORE", "".join((FP8 if fp8 else PLAIN).replace("PART", part) for part, fp8 in stored.items())
    )
    for word, meaning in (ASKED if asks else ALL).items():
        text = text.replace(word, meaning)
    for part, fp8 in stored.items():
        text = text.replace(f"{part.upper()}S", "float8e4m3fn" if fp8 else "float")
    model = parser.parse_model(text)
    for value in (*model.graph.input, *model.graph.output):
        value.name = NAMES.get(value.name, value.name)
        if value.name == "attention_mask":
            value.type.tensor_type.shape.dim[1].dim_param = "capacity + seq"
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [NAMES.get(name, name) for name in names]
    return model


def write_counting_model(directory: Path, cache: str, positions: int, asks: bool = True) -> None:
    """Write what a run's `model/` holds for serving; `asks`: its graph is asked for logits."""
    directory.mkdir(parents=True)
    values = np.arange(16, dtype=np.float32)
    save_file({"vocabulary": values}, directory / WEIGHTS)
    (header,) = struct.unpack("<Q", (directory / WEIGHTS).read_bytes()[:8])
    model = counting_graph(cache, asks)
    tensor = model.graph.initializer.add(
        name="vocabulary", data_type=TensorProto.FLOAT, dims=[16], data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": WEIGHTS, "offset": 8 + header, "length": 64}.items():
        tensor.external_data.add(key=key, value=str(value))
    onnx.save(model, directory / "model.fp32.onnx")
    (directory / "config.json").write_text(
        json.dumps({"max_position_embeddings": positions, "eos_token_id": 3, "model_type": "counting"})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    words = {f"t{i}": i for i in range(END)} | {"</s>": END}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))


@dataclass(frozen=True)
class CountingModel:
    """The counting model on disk, and what it must answer."""

    directory: Path
    cache: str
    positions: int

    def session(self) -> OnnxRuntimeSession:
        return OnnxRuntimeSession(self.directory / "model.fp32.onnx", threads=1)

    def generator(self, max_batch: int = 8) -> Generator:
        return Generator(self.session(), Vocabulary.read(self.directory), max_batch)

    def next_token(self, ids: list[int]) -> int:
        return sum(token * (1 + position % 3) for position, token in enumerate(ids)) % 16

    def answer(self, prompt: str, max_tokens: int) -> list[int]:
        """The tokens of the greedy answer, computed without cache, batch or graph; the last may be `</s>`."""
        ids = [int(word[1:]) for word in prompt.split()]
        produced: list[int] = []
        while len(produced) < max_tokens and len(ids) < self.positions and END not in produced:
            produced.append(self.next_token(ids))
            ids.append(produced[-1])
        return produced

    def text(self, tokens: list[int]) -> str:
        return "".join(f" t{token}" for token in tokens if token != END)


@pytest.fixture(scope="session", params=["off", "v", "fp8"])
def counting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CountingModel:
    """With each kind of cache, and one of them with a graph that gives the logits of all positions."""
    directory = tmp_path_factory.mktemp("counting") / "model"
    write_counting_model(directory, request.param, positions=200, asks=request.param != "v")
    return CountingModel(directory, request.param, 200)


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

    def allocate(self, size: int) -> int:
        assert size > 0
        whole = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        address = -(-whole.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.memory[address] = whole, size
        return address

    def inside(self, address: int, size: int) -> None:
        """Assert that these bytes were allocated, and not freed."""
        assert any(base <= address and address + size <= base + held for base, (_, held) in self.memory.items())

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """Memory that was allocated."""
        self.inside(address, size)
        return at(address, np.uint8, size)

    def free(self, address: int) -> None:
        self.queue.append(lambda: self.memory.pop(address))

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
        target[:] = lines(copy.source, copy.source_line, copy.source_block)

    def zero(self, address: int, size: int) -> None:
        self.queue.append(lambda: self.bytes_at(address, size).fill(0))

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


@pytest.fixture
def host_device() -> type[HostDevice]:
    """`host_device()`: a device in host memory."""
    return HostDevice


@pytest.fixture(params=["host", "device", *RUNTIMES])
def open_batch(request: pytest.FixtureRequest, open_engine: OpenEngine) -> Callable[..., Batch]:
    """`open_batch(counting, rows)`: a batch of the counting model in host memory, one on a device, and one of an engine
    on each runtime.
    """

    def opened(counting: CountingModel, rows: int = 4) -> Batch:
        if request.param in RUNTIMES:
            return open_engine(counting, request.param, rows).open_batch(rows, counting.positions)
        session = counting.session()
        if request.param == "host":
            return session.open_batch(rows, counting.positions)
        device = HostDevice()
        return DeviceBatch(HostProgram(session, device), device, rows, counting.positions)

    return opened


@pytest.fixture
def gpu() -> Iterator[Machine]:
    """A machine with a GPU and both runtimes, by stand-ins for the driver and for them."""
    with machine(Driver(), *MODULES.values()) as found:
        yield found


@pytest.fixture
def open_engine(gpu: Machine, tmp_path: Path) -> OpenEngine:
    """`open_engine(counting, "tensorrt", rows)`: an engine of the counting model for so many rows, on a runtime."""

    def opened(counting: CountingModel, runtime: EngineRuntime, rows: int = 4) -> EngineSession:
        plan = tmp_path / "counting.plan"
        plan.write_bytes(PLAN)
        plan.with_suffix(".json").write_text(json.dumps({"branches": False}))
        gpu.knows(plan, counting.directory / "model.fp32.onnx", profiles(rows, counting.positions))
        return EngineSession(plan, runtime)

    return opened


@pytest.fixture
def on_device() -> Callable[..., tuple[DeviceBatch, HostDevice, HostProgram]]:
    """`on_device(counting, rows, positions, captures)`: a batch on a device, with that and its program."""

    def opened(
        counting: CountingModel, rows: int = 4, positions: int | None = None, captures: bool = True
    ) -> tuple[DeviceBatch, HostDevice, HostProgram]:
        device = HostDevice()
        program = HostProgram(counting.session(), device)
        program.captures = captures
        return DeviceBatch(program, device, rows, positions or counting.positions), device, program

    return opened


@pytest.fixture(scope="session")
def counting_run_at() -> Callable[[Path, int], Run]:
    """`counting_run_at(root, positions)`: a run of the counting model there."""
    return make_counting_run


@pytest.fixture
def counting_run(tmp_path: Path) -> Run:
    """A run of the counting model with 40 positions."""
    return make_counting_run(tmp_path / "run", 40)


def make_counting_run(root: Path, positions: int) -> Run:
    """A run at `root` whose checkpoint is the counting model with an FP8 cache, recorded as the stages that write one
    record it.
    """
    run = Run(root)
    model = {"name": "someone/Counting Model", "fingerprint": "0"}
    with run.stage("quantize", {}, {}, model) as log:
        write_counting_model(run.model, "fp8", positions)
        log.outputs += [path for path in sorted(run.model.iterdir()) if path != run.onnx_fp32]
    with run.stage("export", {}, {}) as log:
        log.outputs.append(run.onnx_fp32)
    return run


#: The first bytes of a plan as TensorRT 10.16.1.11 writes them, and some more.
PLAN = b"ftrt" + bytes(20) + bytes([10, 16, 1, 11]) + bytes(100)


def record_engine(
    run: Run, version: str = "10.16.1.11", runtime: Literal["tensorrt", "tensorrt-rtx"] = "tensorrt"
) -> None:
    """Record an engine for sm90, of up to 4 rows of up to 32 tokens, that is no more than its first bytes."""
    graph = {"model/model.onnx": run.record().stages["export"].outputs["model/model.onnx"]}
    with run.stage("build-engine", graph, {"runtime": runtime}) as log:
        run.engines.mkdir(exist_ok=True)
        plan, described = (run.engines / f"sm90.{kind}" for kind in ("plan", "json"))
        plan.write_bytes(PLAN)
        info = EngineInfo(
            runtime=runtime, version=version, target="sm90", bytes=len(PLAN), promised_products=1, fp8_products=1,
            wide_products=[], evidence="inspector", profiles=list(profiles(4, 32)), build_seconds=1.0,
        )  # fmt: skip
        write_document(described, info)
        log.outputs += [plan, described]


def make_wide_run(root: Path) -> Run:
    """A run like `counting_run` whose cache is not in FP8, with both graphs (the same one), and no engine."""
    run = Run(root)
    with run.stage("quantize", {}, {}, {"name": "someone/counting", "fingerprint": "0"}) as log:
        write_counting_model(run.model, "off", positions=40)
        log.outputs += [path for path in sorted(run.model.iterdir()) if path != run.onnx_fp32]
    with run.stage("export", {}, {}) as log:
        run.onnx.write_bytes(run.onnx_fp32.read_bytes())
        log.outputs += [run.onnx, run.onnx_fp32]
    return run


@pytest.fixture
def wide_run(tmp_path: Path) -> Run:
    """Such a run of a test's own."""
    return make_wide_run(tmp_path / "run")


@pytest.fixture
def engine_run(wide_run: Run) -> Run:
    """`wide_run` with an engine of TensorRT."""
    record_engine(wide_run)
    return wide_run
