"""Active sequences in host memory, for a runtime that works on NumPy arrays in place.

A decode step has its inputs and outputs bound once for each number of rows; the mask changes by the one slot that a
token fills, and only this step's keys and values are written, by position, into the buffers of the next step. Chunks of
prompts vary in shape, so they are bound at each call.

Copied unchanged into Triton repositories: imports only NumPy and its neighbours in this folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .cache import BLOCK, CacheLayout, HostCache, KeyValues
from .step_logits import HostLogits, Indices, Logits

#: The input of a graph that gives the logits of these positions of a call alone, int64 [batch, scored].
LOGITS_INDICES = "logits_indices"
#: Capacities are multiples of this, so that runtimes meet few shapes.
CAPACITY_STEP = 64
#: Capacities in blocks are of so many: ONNX Runtime's sum over the blocks of a row then has the same order at every
#: capacity, so that the bits of an answer do not depend on how long others are.
BLOCK_GROUP = 4
#: A cache of so many times what can be filled is given up for a smaller one: attention reads every slot.
WASTE = 4


def attention_mask(filled: Indices, capacity: int, real: NDArray[np.bool_]) -> Indices:
    """The graph's mask [batch, capacity + seq]: the `filled` [batch] first slots of each row, then which new tokens are
    `real` [batch, seq].
    """
    return np.concatenate([np.arange(capacity) < filled[:, None], real], axis=1).astype(np.int64)


def chunk_layout(seq: int, filled: Indices, lengths: Indices) -> tuple[Indices, NDArray[np.bool_]]:
    """Positions [batch, seq] of a chunk of prompts, and a mask of its real tokens, the last of each row.

    `filled` [batch]: the positions before the chunk; `lengths` [batch]: the real tokens of each row. Rows end together,
    so that a graph with a tail has it where their texts end. Padding has the position of the row's first token, and so
    sees that: a row of attention in which nothing is seen would be NaN.
    """
    behind = np.arange(seq) - (seq - lengths[:, None])
    return filled[:, None] + np.maximum(behind, 0), behind >= 0


def last_indices(tokens: tuple[int, ...], scored: int) -> Indices:
    """The last `scored` positions of each row, int64 [rows, scored], of a call whose `tokens` are of the shape (rows,
    seq): the logits that it asks for.
    """
    rows, seq = tokens
    return np.tile(np.arange(seq - scored, seq), (rows, 1))


def next_capacity(held: int, needed: int, most: int, round_up: Callable[[int], int]) -> int | None:
    """The slots of a new cache where the `held` ones are too few, or far too many; None where they will do.

    `needed` slots double what there was, up to `most`, the largest number that can be filled; `round_up` rounds to
    whole blocks.
    """
    if needed <= held <= WASTE * round_up(most):
        return None
    return round_up(min(max(needed, 2 * held), most))


class Forward(Protocol):
    """A graph with the inputs and outputs that `fp8q export` gives it (docs/engines.md), run as it is."""

    layout: CacheLayout

    def forward(
        self,
        input_ids: Indices,
        attention_mask: Indices,
        position_ids: Indices,
        past: KeyValues | None = None,
        scored: int | None = None,
    ) -> tuple[Logits, KeyValues]:
        """Run the graph once.

        `input_ids` and `position_ids` [batch, seq]; `attention_mask` [batch, capacity + seq] is 1 for the filled slots
        of the past and for the new tokens that are real; `past` [batch, kv_heads, capacity, head_size] each, None for
        capacity 0; of a graph that takes blocks the capacity is a multiple of a block. Returns the logits of the last
        `scored` positions of each row (None: of all) [batch, scored, vocabulary] and the new keys and values [batch,
        kv_heads, seq, head_size].
        """


class HostGraph(Forward, Protocol):
    """The interface that runs the graph over host memory; see `sessions.OnnxRuntimeSession`."""

    layout: CacheLayout
    vocabulary: int

    def new_cache(self, rows: int, capacity: int) -> HostCache:
        """Make an empty cache."""

    def bind(self, inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> Callable[[], None]:
        """A step that reads and writes arrays where they lie."""


@dataclass(frozen=True)
class _Step:
    """A decode step for a number of rows: its inputs, its call, its outputs. `mask` shows the `shown` [count] first
    slots of each row.
    """

    tokens: Indices
    positions: Indices
    shown: Indices
    mask: Indices
    run: Callable[[], None]
    logits: Logits
    new: KeyValues


class SlotCache(Protocol):
    """The interface of a cache of rows of slots, wherever it lies."""

    capacity: int

    def move(self, source: int, target: int, filled: int) -> None:
        """Let row `target` hold the `filled` first positions of row `source`."""

    def wipe(self, row: int) -> None:
        """Let a row hold zeros."""


Cache = TypeVar("Cache", bound=SlotCache)


class CachedBatch(Generic[Cache]):
    """The part of a `sessions.Batch` that its cache does, which is there once `reserve` was called."""

    _cache: Cache | None = None

    @property
    def capacity(self) -> int:
        """Slots of a row, none while there is no cache."""
        return self._cache.capacity if self._cache else 0

    def _held(self) -> Cache:
        assert self._cache is not None, "reserve comes first"
        return self._cache

    def move(self, source: int, target: int, filled: int) -> None:
        """Let row `target` hold the `filled` first positions of row `source`."""
        self._held().move(source, target, filled)

    def wipe(self, row: int) -> None:
        """Let a row hold zeros."""
        self._held().wipe(row)


class HostBatch(CachedBatch[HostCache]):
    """A `sessions.Batch`; see there for what each method does."""

    def __init__(self, session: HostGraph, rows: int, positions: int):
        """Room for `rows` sequences of at most `positions`; memory is taken as it is needed."""
        self._session = session
        self._rows = rows
        self._positions = positions
        self._steps: dict[int, _Step] = {}

    def reserve(self, needed: int, most: int, rows: int) -> None:
        """Have slots for `needed` positions: twice as many as before where they run out, and at most `most`."""
        if (capacity := next_capacity(self.capacity, needed, most, self._rounded_up)) is None:
            return
        if self._cache is None:
            self._cache = self._session.new_cache(self._rows, capacity)
        else:
            self._cache.resize(capacity, rows)
        self._steps.clear()

    def _rounded_up(self, positions: int) -> int:
        """`positions`, rounded up to whole steps, but not beyond what a sequence may have and whole blocks."""
        if self._session.layout.in_blocks:
            step = BLOCK_GROUP * BLOCK
            return -(-min(positions, self._positions) // step) * step
        return min(-(-positions // CAPACITY_STEP) * CAPACITY_STEP, self._positions)

    def prefill(self, first: int, tokens: Indices, filled: Indices, lengths: Indices) -> Logits:
        """Read a chunk of prompts; the outputs of padding are discarded."""
        cache = self._held()
        count = len(tokens)
        positions, real = chunk_layout(tokens.shape[1], filled, lengths)
        # nothing is filled before the first chunk: spare attention the buffer
        past = cache.past(first, count) if filled.any() else None
        mask = attention_mask(filled, cache.capacity if past else 0, real)
        logits, new = self._session.forward(tokens, mask, positions, past, scored=1)
        for row, length in enumerate(lengths.tolist()):
            values = [value[row : row + 1, :, -length:] for value in new]
            cache.write(first + row, positions[row : row + 1, -length:], values)
        return logits[:, -1]

    def decode(self, tokens: Indices, filled: Indices) -> HostLogits:
        """Read one token of each row; the next call with as many rows overwrites the returned logits."""
        count = len(tokens)
        step = self._steps.get(count) or self.bound(count)
        step.tokens[:, 0], step.positions[:, 0] = tokens, filled
        for row, (before, now) in enumerate(zip(step.shown.tolist(), filled.tolist(), strict=True)):
            step.mask[row, min(before, now) : max(before, now)] = now > before
        step.shown[:] = filled
        step.run()
        self._held().write(0, step.positions, step.new)
        return HostLogits(step.logits)

    def bound(self, count: int) -> _Step:
        """The step of `count` rows, made once for each capacity."""
        cache = self._held()
        layout = self._session.layout
        tokens = np.zeros((count, 1), np.int64)
        positions = np.zeros((count, 1), np.int64)
        mask = np.zeros((count, cache.capacity + 1), np.int64)
        mask[:, -1] = 1  # the new token
        logits = np.empty((count, 1, self._session.vocabulary), np.float32)
        new: list[NDArray[Any]] = [
            np.empty((count, heads, 1, size), dtype)
            for (heads, size), dtype in zip(layout.shapes, layout.dtypes, strict=True)
        ]
        run = self._session.bind([tokens, mask, positions, *cache.past(0, count)], [logits, *new])
        self._steps[count] = _Step(tokens, positions, np.zeros(count, np.int64), mask, run, logits[:, 0], new)
        return self._steps[count]

    def idle(self) -> None:
        """Give the memory back: another step is bound in no time."""
        self.clear()

    def clear(self) -> None:
        """Forget all rows, and give the memory back."""
        self._cache = None
        self._steps.clear()
