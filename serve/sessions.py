"""Running the graph: a `Session` takes one step of a batch, on whichever runtime it stands for.

All that is known of the cache (layers, heads, head size, FP8 or not) is read from the graph, so that a session needs no
config.json. `open_session` knows the runtimes by name. ONNX Runtime on the CPU takes `model.fp32.onnx`; its FP8 tensors
are OrtValues laid over uint8 arrays, since NumPy has no FP8.

Copied as it is into Triton repositories: imports only NumPy, its neighbours in this folder, and the runtime where it is
used.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .cache import Cache, CacheLayout, HostCache, KeyValues

#: ONNX Runtime's name of an element type -> the dtype that holds it on the host, its number in
#: onnx.TensorProto.DataType.
ELEMENTS: dict[str, tuple[type[np.generic], int]] = {
    "tensor(float)": (np.float32, 1),
    "tensor(float8e4m3fn)": (np.uint8, 17),
}
TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")
PAST, NEW = "past_key_values.", "new_key_values."


class SessionError(RuntimeError):
    """A graph cannot be run: the runtime is missing or refuses it, or it is not a graph of fp8q."""


class Session(Protocol):
    """A graph with the interface of DESIGN section 7, ready to run."""

    layout: CacheLayout

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """Make an empty cache where this session reads it fastest."""

    def forward(
        self,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64],
        position_ids: NDArray[np.int64],
        past: KeyValues | None = None,
    ) -> tuple[NDArray[np.float32], KeyValues]:
        """Run one step.

        `input_ids` and `position_ids` [batch, seq]; `attention_mask` [batch, capacity + seq] is 1 for the filled slots
        of the past and for the new tokens that are real; `past` [batch, kv_heads, capacity, head_size] each, None for
        capacity 0. Returns logits [batch, seq, vocabulary] and the new keys and values [batch, kv_heads, seq,
        head_size].
        """


class OnnxRuntimeSession:
    """ONNX Runtime on the CPU."""

    def __init__(self, path: Path, threads: int = 0):
        """Load the graph at `path` and its external data beside it; `threads` 0 leaves their number to ONNX Runtime.

        Raises SessionError when ONNX Runtime is not installed, refuses the graph, or the graph's inputs and outputs are
        others.
        """
        self._runtime = _import_onnxruntime()
        self._session = self._load(path, threads)
        self.layout = self._layout(path)
        self._elements = [ELEMENTS[self._types[PAST + name]][1] for name in self.layout.names]
        self._outputs = ["logits", *(NEW + name for name in self.layout.names)]

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
        shapes = tuple((int(inputs[name].shape[1]), int(inputs[name].shape[3])) for name in past)
        return CacheLayout(names, shapes, tuple(np.dtype(ELEMENTS[self._types[name]][0]) for name in past))

    def new_cache(self, rows: int, capacity: int) -> HostCache:
        """Make an empty cache in host memory."""
        return HostCache(self.layout, rows, capacity)

    def forward(
        self,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64],
        position_ids: NDArray[np.int64],
        past: KeyValues | None = None,
    ) -> tuple[NDArray[np.float32], KeyValues]:
        """Run one step: `Session.forward`.

        The arrays are read where they lie, and the results are ONNX Runtime's own memory.
        """
        wrap = self._runtime.OrtValue
        past = self.new_cache(len(input_ids), 0).past(0, len(input_ids)) if past is None else past
        # kept until the run is over: OrtValues do not
        arrays = [np.ascontiguousarray(array) for array in (input_ids, attention_mask, position_ids, *past)]
        feeds = {name: wrap.ortvalue_from_numpy(array) for name, array in zip(TOKEN_INPUTS, arrays, strict=False)}
        for name, array, element in zip(self.layout.names, arrays[len(TOKEN_INPUTS) :], self._elements, strict=True):
            feeds[PAST + name] = wrap.ortvalue_from_numpy_with_onnx_type(array, element)
        logits, *new = self._session.run_with_ort_values(self._outputs, feeds)
        return logits.numpy(), [value.numpy() for value in new]


def _import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise SessionError(
            f"ONNX Runtime is not installed ({error}); install it with `pip install onnxruntime`"
        ) from error
    return onnxruntime


def open_session(directory: Path, runtime: str = "onnxruntime") -> Session:
    """Open the graph in `directory` (a run's `model/`, or `weights/` in a Triton repository) on the runtime of that
    name.

    Raises SessionError for a runtime that is unknown or not served yet, and for all that its session refuses.
    """
    if runtime == "onnxruntime":
        return OnnxRuntimeSession(directory / "model.fp32.onnx")
    if runtime in ("tensorrt", "tensorrt-rtx"):
        raise SessionError(
            f"{runtime}: this version builds engines for it but does not generate text with them yet; use the runtime "
            "onnxruntime"
        )
    raise SessionError(f"{runtime}: there is no such runtime; use onnxruntime")
