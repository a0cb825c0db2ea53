"""Run the graph: a `Session` is a runtime with a model, and its `Batch` the active sequences there.

The loop of `generate.py` uses a `Batch` alone: prompts are read in chunks, then one token a sequence and step, and the
results are logits. Keys and values stay inside, so that a runtime on a GPU keeps them on the device and may replay one
captured step for each number of rows. `Forward.forward` is the graph itself, with a past that the caller holds: for
whole windows, and for callers that need keys and values.

The cache's layers, heads, head size and type are read from the graph, so that a session needs no config.json.
`open_session` opens a runtime by name. ONNX Runtime on the CPU takes `model.fp32.onnx`; its FP8 tensors are OrtValues
over uint8 arrays, since NumPy has no FP8.

Copied unchanged into Triton repositories: imports only NumPy, its neighbours in this folder, and the runtime where it
is used.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .cache import BLOCK, CacheLayout, HostCache, KeyValues
from .host_batch import LOGITS_INDICES, Forward, HostBatch, last_indices
from .step_logits import Indices, Logits, StepLogits

#: onnx.TensorProto.DataType of logits and of tokens.
FLOAT = 1
INT64 = 7
#: ONNX Runtime's name of an element type -> the dtype that holds it on the host, its number in
#: onnx.TensorProto.DataType.
ELEMENTS: dict[str, tuple[type[np.generic], int]] = {
    "tensor(float)": (np.float32, FLOAT),
    "tensor(float8e4m3fn)": (np.uint8, 17),
}
TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")
PAST = "past_key_values."
NEW = "new_key_values."


class SessionError(RuntimeError):
    """A graph cannot be run: the runtime is missing or refuses it, or it is not a graph of fp8q."""


@dataclass(frozen=True)
class Pace:
    """The schedule of prompts and answers on a runtime.

    `chunk`: positions of prompts in one call, padding included. A prompt is always cut at its multiples, so that its
    answer does not depend on other requests: another cut may round a sum differently. `share`: the positions of prompts
    read between two tokens of one active request, on average; one more for each further request, since a token then
    takes longer. `saved`: the positions read ahead of that share, once, after a while without prompts, so that requests
    that arrive together are soon answered together.
    """

    chunk: int
    share: int
    saved: int = 0


class Batch(Protocol):
    """Sequences in flight in rows 0, 1, 2 …: slot j of a row holds the keys and values of position j.

    Not for several threads at once. All arrays are the host's; the logits of a call may lie in memory that the next
    call writes over. `reserve` comes before every step, with room for all that it writes.
    """

    def reserve(self, needed: int, most: int, rows: int) -> None:
        """Have slots for `needed` positions in every row, and keep the contents of the first `rows` rows.

        `most` is the largest number that the active sequences can fill: growing beyond it is of no use, and a much
        larger buffer may be released.
        """

    def prefill(self, first: int, tokens: Indices, filled: Indices, lengths: Indices) -> Logits:
        """Take in a chunk of the prompts of the rows from `first`, behind their `filled` [count] first positions.

        `tokens` [count, seq], of which the last `lengths` [count] are each row's, one or more; the rest is padding, and
        is written nowhere. Returns the logits of each row's last one [count, vocabulary].
        """

    def decode(self, tokens: Indices, filled: Indices) -> StepLogits:
        """Read one token `tokens` [count] of each of the first `count` rows, behind its `filled` [count] first
        positions; return their logits, which may still be to come.

        Some rows may have prompts that are still being read: their next chunk overwrites the slot, and their logits are
        not used.
        """

    def move(self, source: int, target: int, filled: int) -> None:
        """Let row `target` hold the `filled` first positions of row `source`."""

    def wipe(self, row: int) -> None:
        """Set a row to zeros: it may hold NaN, which a mask does not hide."""

    def idle(self) -> None:
        """Nothing is in flight: memory may be given back, or kept for the next request. All rows are forgotten."""

    def clear(self) -> None:
        """Forget all rows, whatever they hold, and give the memory back."""


class Session(Protocol):
    """A model ready to run: all that the loop knows of a runtime.

    `vocabulary`: how many logits a token has. `most_rows` and `most_positions` are the bounds of a runtime that has
    some, as an engine's profiles are.
    """

    vocabulary: int
    pace: Pace
    most_rows: int | None
    most_positions: int | None

    def open_batch(self, rows: int, positions: int) -> Batch:
        """Make room for up to `rows` sequences of up to `positions` positions, where this runtime reads it fastest."""


class GraphSession(Session, Forward, Protocol):
    """A session whose graph can also be run as it is."""


class OnnxRuntimeSession:
    """ONNX Runtime on the CPU, where eight positions of a prompt cost as much as two or three tokens of an answer, and
    larger chunks cost as much for each position.
    """

    pace = Pace(chunk=8, share=4, saved=64)
    most_rows: int | None = None
    most_positions: int | None = None

    def __init__(self, path: Path, threads: int = 0):
        """Load the graph at `path` and its external data beside it; `threads` 0 leaves their number to ONNX Runtime.

        Raises SessionError when ONNX Runtime is not installed, refuses the graph, or the graph's inputs and outputs are
        others.
        """
        self._runtime = import_onnxruntime()
        self._session = self._load(path, threads)
        self.layout = self._layout(path)
        self._elements = [ELEMENTS[self._types[PAST + name]][1] for name in self.layout.names]
        self._inputs = (*TOKEN_INPUTS, *(PAST + name for name in self.layout.names))
        self._input_elements = (INT64,) * len(TOKEN_INPUTS) + tuple(self._elements)
        self.asks = any(node.name == LOGITS_INDICES for node in self._session.get_inputs())
        self._outputs = ["logits", *(NEW + name for name in self.layout.names)]
        self.vocabulary = int(next(node.shape[-1] for node in self._session.get_outputs() if node.name == "logits"))

    def _load(self, path: Path, threads: int) -> Any:
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # a plan is kept for each shape met, and serving meets ever new ones
        # its fusion makes an FP8 node that it then rejects itself
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            return self._runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no common class of their own
            reason = " ".join(str(error).split())
            raise SessionError(f"{path}: ONNX Runtime {self._runtime.__version__} cannot load it ({reason})") from error

    def _layout(self, path: Path) -> CacheLayout:
        inputs = {node.name: node for node in self._session.get_inputs()}
        outputs = {node.name for node in self._session.get_outputs()}
        past = [name for name in inputs if name.startswith(PAST)]
        names = tuple(name.removeprefix(PAST) for name in past)
        absent = [name for name in (*TOKEN_INPUTS, PAST + "0.key") if name not in inputs]
        absent += [name for name in ("logits", *(NEW + name for name in names)) if name not in outputs]
        if absent:
            raise SessionError(
                f"{path}: has no tensor named {absent[0]}, so it is no graph that `fp8q export` wrote; export it again"
            )
        self._types = {name: str(inputs[name].type) for name in past}
        kinds = set(self._types.values())
        if not kinds <= ELEMENTS.keys():
            raise SessionError(
                f"{path}: its cache is of {', '.join(sorted(kinds))}; ONNX Runtime serves {' or '.join(ELEMENTS)}: "
                "use model.fp32.onnx"
            )
        new = {node.name: node.shape for node in self._session.get_outputs()}
        shapes = tuple((int(new[NEW + name][1]), int(new[NEW + name][3])) for name in names)
        in_blocks = is_in_blocks([inputs[name].shape for name in past], str(path))
        return CacheLayout(names, shapes, tuple(np.dtype(ELEMENTS[self._types[name]][0]) for name in past), in_blocks)

    def open_batch(self, rows: int, positions: int) -> HostBatch:
        """Make room in host memory: `Session.open_batch`."""
        return HostBatch(self, rows, positions)

    def new_cache(self, rows: int, capacity: int) -> HostCache:
        """Make an empty cache in host memory. Raises SessionError for a capacity of broken blocks."""
        check_blocks(self.layout, capacity)
        return HostCache(self.layout, rows, capacity)

    def _past(self, buffers: KeyValues) -> list[NDArray[Any]]:
        """The buffers [rows, kv_heads, capacity, head_size] as the graph takes them, over the same memory."""
        if not self.layout.in_blocks:
            return [*buffers]
        for buffer in buffers:
            check_blocks(self.layout, buffer.shape[-2])
            assert buffer.flags.c_contiguous, "rows are the first axis"
        return [buffer.reshape(-1, BLOCK, buffer.shape[-1]) for buffer in buffers]

    def bind(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> Callable[[], None]:
        """A step that reads `inputs` and writes `outputs` in place: those of the graph, in its order (`TOKEN_INPUTS`
        and the past; logits, which may be of the last positions alone, and the new keys and values), contiguous, of
        constant shapes.

        It runs once a token, so nothing should be wrapped, named and allocated again each time.
        """
        binding = self._session.io_binding()
        inputs = [*inputs[: len(TOKEN_INPUTS)], *self._past(inputs[len(TOKEN_INPUTS) :])]
        last = last_indices(inputs[0].shape, outputs[0].shape[1])
        for name, array, element in zip(self._inputs, inputs, self._input_elements, strict=True):
            binding.bind_ortvalue_input(name, self._value(array, element))
        if self.asks:
            binding.bind_ortvalue_input(LOGITS_INDICES, self._value(last, INT64))
        for name, array, element in zip(self._outputs, outputs, (FLOAT, *self._elements), strict=True):
            binding.bind_ortvalue_output(name, self._value(array, element))

        def step(keep: Sequence[NDArray[Any]] = (*inputs, last, *outputs)) -> None:  # an OrtValue keeps no array alive
            self._session.run_with_iobinding(binding)

        return step

    def _value(self, array: NDArray[Any], element: int) -> Any:
        """`array` as the runtime's value, over the same memory."""
        return self._runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)

    def forward(
        self,
        input_ids: Indices,
        attention_mask: Indices,
        position_ids: Indices,
        past: KeyValues | None = None,
        scored: int | None = None,
    ) -> tuple[Logits, KeyValues]:
        """Run the graph once: `Forward.forward`.

        The arrays are read where they lie, and the results are ONNX Runtime's own memory.
        """
        past = self.new_cache(len(input_ids), 0).past(0, len(input_ids)) if past is None else past
        scored = input_ids.shape[1] if scored is None else scored
        # kept until the run is over: OrtValues do not
        arrays = [np.ascontiguousarray(array) for array in (input_ids, attention_mask, position_ids)]
        arrays += self._past([np.ascontiguousarray(buffer) for buffer in past])
        last = last_indices(input_ids.shape, scored)
        feeds = {
            name: self._value(array, element)
            for name, array, element in zip(self._inputs, arrays, self._input_elements, strict=True)
        }
        if self.asks:
            feeds[LOGITS_INDICES] = self._value(last, INT64)
        logits, *new = self._session.run_with_ort_values(self._outputs, feeds)
        return logits.numpy()[:, -scored:], [value.numpy() for value in new]


def is_in_blocks(shapes: Sequence[Sequence[Any]], graph: str) -> bool:
    """Tell whether a graph takes its past, inputs of these `shapes`, in blocks of `BLOCK` slots.

    Raises SessionError for inputs of any other form.
    """
    ranks = {len(shape) for shape in shapes}
    if ranks == {3} and all(shape[1] == BLOCK for shape in shapes):
        return True
    if ranks != {4}:
        shown = ", ".join(map(str, shapes[0]))
        raise SessionError(
            f"{graph}: takes its cache as [{shown}], and this version in blocks of {BLOCK} slots; make it again with "
            "this version (`fp8q export`, then `fp8q build-engine`)"
        )
    return False


def check_blocks(layout: CacheLayout, capacity: int) -> None:
    """Raise SessionError where so many slots are no whole blocks, of a graph that takes these."""
    if capacity % layout.step:
        raise SessionError(
            f"a cache of {capacity} slots is not of whole blocks of {layout.step}; take "
            f"{-(-capacity // layout.step) * layout.step}"
        )


def import_onnxruntime() -> Any:
    """Import ONNX Runtime with its telemetry off; its wheels report to Microsoft and store an identifier in the user's
    folder from 1.29 on. The variable ORT_DISABLE_TELEMETRY, if set, is respected. Raises SessionError where it is
    missing.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise SessionError(
            f"ONNX Runtime is not installed ({error}); install it with `pip install onnxruntime`"
        ) from error
    return onnxruntime


def open_session(directory: Path, runtime: str = "onnxruntime", graph: str = "model.fp32.onnx") -> GraphSession:
    """Open the `graph` in `directory` (a run's `model/`, or `weights/` in a Triton repository) on the runtime of that
    name.

    Raises SessionError for a runtime that is unknown or runs engines (`engine_session`), and for all that its session
    refuses.
    """
    if runtime == "onnxruntime":
        return OnnxRuntimeSession(directory / graph)
    if runtime in ("tensorrt", "tensorrt-rtx"):
        raise SessionError(f"{runtime}: runs engines, and this is a graph; use the runtime onnxruntime")
    raise SessionError(f"{runtime}: there is no such runtime; use onnxruntime")
