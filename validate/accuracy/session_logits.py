"""Compute logits of windows by a graph on ONNX Runtime, or by an engine on a GPU, with NumPy and no torch.

An engine takes as many rows as its profiles allow, and a prompt in chunks over its cache, as it is served. A window is
read in the same way: `Pace.chunk` tokens a call through the profile of prompts, each call over the keys and values that
those before it left. The logits of every position come back.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...core.errors import BackendError
from ...core.files import reading
from ...core.run import Run
from ...core.run_files import graph_names
from ...export.lint.check import sound_graph
from ...options import RUNTIMES
from ...quantize.reading.run_checkpoint import checkpoint_of
from ...serve.local.generation import open_run_engine
from ...serve.loop.cuda import DeviceMemoryError
from ...serve.loop.engine_session import EngineSession
from ...serve.loop.sessions import SessionError, open_session
from .as_served import LogitsPart, PartForward, in_groups, served, session_start

#: Logits of a batch of windows: int64 [windows, context] -> float32 [windows, context, vocabulary], or their pieces.
Logits = npt.NDArray[np.float32]
SessionForward = Callable[[npt.NDArray[np.int64]], Logits | Iterator[LogitsPart]]


def session(
    run: Run, runtime: str, adapter: str | None = None, prompt: int | None = None, context: int | None = None
) -> SessionForward:
    """A graph of the run on ONNX Runtime, or its engine for this GPU on TensorRT or TensorRT-RTX (`onnxruntime-int8`:
    that of another precision); each window is a separate prompt.

    `prompt`: the tokens that are read in one call before the others are read one by one (None: all in one call).
    `context`: the tokens of the windows to come, which an engine's cache must have room for (None: not known yet).
    Raises InputError for a graph whose external data cannot be opened and an engine that is not there, BackendError
    when the runtime is missing or refuses the graph.
    """
    runs = RUNTIMES[runtime]
    if runs.library in ("tensorrt", "tensorrt-rtx"):
        return engine_logits(open_run_engine(run, runs.library, runs.precision, adapter), prompt, context)
    graph = graph_of(run, runtime, adapter)
    sound_graph(graph)
    try:
        opened = open_session(graph.parent, graph=graph.name)
    except SessionError as error:
        raise BackendError("", str(error)) from error
    if prompt is not None:
        return served(session_start(opened), prompt)

    def forward(ids: npt.NDArray[np.int64]) -> Logits:
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
        try:
            logits, _ = opened.forward(ids, np.ones_like(ids), positions)
        except Exception as error:  # its exceptions have no common class of their own
            raise BackendError("", f"{type(error).__name__}: {error}") from error
        return logits

    return forward


def session_opener(
    name: str, run: Run, adapter: str | None = None, prompt: int | None = None, context: int | None = None
) -> Callable[[], SessionForward]:
    """The function that loads the runtime `name`, as `session` does; raises where a file of a graph is missing."""
    if not RUNTIMES[name].runs_engine:
        sound_graph(graph_of(run, name, adapter))
    return partial(session, run, name, adapter, prompt, context)


def graph_of(run: Run, runtime: str, adapter: str | None = None) -> Path:
    """The graph that ONNX Runtime runs under the name `runtime`, with that adapter on."""
    return checkpoint_of(run, RUNTIMES[runtime].precision) / graph_names(adapter)[1]


def engine_logits(session: EngineSession, prompt: int | None = None, context: int | None = None) -> PartForward:
    """Return the function that computes logits by an engine; `prompt`, `context`: as `session` has them.

    It raises BackendError for windows that are longer than the engine has slots, which are whole steps of memory. As
    many windows run together as the engine takes and the GPU's memory has room for. Raises SessionError, saying what
    fits, where it has room for none of `context` tokens.
    """
    if context is not None:
        rows_that_fit(session, context)
    forward = all_positions(session) if prompt is None else served(session_start(session), prompt)

    def within(ids: npt.NDArray[np.int64]) -> Iterator[LogitsPart]:
        if session.most_positions is not None and ids.shape[1] > session.most_positions:
            raise BackendError(
                "",
                f"a window of {ids.shape[1]} tokens is longer than the engine's {session.most_positions} slots",
                f"give --context {session.most_positions}",
            )
        rows = rows_that_fit(session, ids.shape[1])
        try:  # logits and intermediate results take memory too
            yield from in_groups(forward, rows, DeviceMemoryError)(ids)
        except DeviceMemoryError as error:
            raise _no_room(error) from error

    return within


def rows_that_fit(session: EngineSession, context: int) -> int:
    """The most windows of `context` tokens, halving the engine's own number, whose cache the GPU has room for."""
    positions = min(context, session.most_positions or context)
    rows = session.most_rows or 1
    while True:
        try:
            session.open_batch(rows, positions).clear()
        except DeviceMemoryError as error:
            if rows == 1:
                raise _no_room(error) from error
            rows //= 2
        else:
            return rows


def _no_room(error: DeviceMemoryError) -> SessionError:
    """Return the error for one window without room: `validate` has a context, and no batch to make smaller."""
    return SessionError(f"{error.facts}; give a smaller --context, or end what else runs on this GPU")


def all_positions(session: EngineSession) -> PartForward:
    """Return the function that computes the logits of all positions of windows, float32, in one piece."""

    def forward(ids: npt.NDArray[np.int64]) -> Iterator[LogitsPart]:
        windows, context = ids.shape
        batch = session.open_batch(windows, context)
        filled = np.zeros(windows, np.int64)
        chunks: list[Logits] = []
        try:
            batch.reserve(context, context, windows)
            for start in range(0, context, session.pace.chunk):
                tokens = np.ascontiguousarray(ids[:, start : start + session.pace.chunk])
                chunks.append(batch.prefill_all(tokens, filled))
                filled += tokens.shape[1]
        finally:
            batch.clear()
        yield LogitsPart(np.concatenate(chunks, axis=1), slice(0, windows))

    return forward


def graph_vocabulary(run: Run) -> int:
    """Number of logits of the run's model, by its graph: config.json need not say it."""
    import onnx

    with reading(run.onnx, "an ONNX graph"):
        graph = onnx.load_model(run.onnx, load_external_data=False).graph
        logits = {output.name: output for output in graph.output}["logits"]
        return int(logits.type.tensor_type.shape.dim[-1].dim_value)
