"""Keys and values of the active sequences, in buffers indexed by position: slot j of a row holds position j.

The graph returns only a step's new keys and values, so a step writes one slot a row and copies nothing else. A buffer
is [rows, kv_heads, capacity, head_size]; the first rows are in use, so the past of neighbouring rows is a slice of the
first axis: contiguous, shared with the runtime, never copied. Attention reads every slot, filled or not, so buffers
start small and grow by doubling, which copies each value less than once more in all. They start as zeros, not as
uninitialized memory: a masked slot weighs 0 in the softmax, and 0 × NaN is NaN.

A graph takes the past in blocks, [rows · kv_heads · blocks, `BLOCK`, head_size], so that a decode step reads it where
it lies: the same memory, where the capacity is a multiple of a block. Older graphs take the buffer as it is.

Copied unchanged into Triton repositories: imports only NumPy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Slots of a block of the cache, as `export.onnx_file.names` has it.
BLOCK = 64
#: One array for each tensor of a `CacheLayout`, [rows, kv_heads, positions, head_size].
KeyValues = Sequence[NDArray[Any]]


@dataclass(frozen=True)
class CacheLayout:
    """The keys and values that a graph keeps for each position.

    `names` as in the graph (`0.key`, `0.value`, `1.key` …), `shapes` their (kv_heads, head_size), `dtypes` those of the
    host's buffers: uint8 for FP8 codes, which NumPy lacks. Values may be codes where keys are not. `in_blocks`: the
    graph takes the past in blocks of `BLOCK` slots.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    dtypes: tuple[np.dtype[Any], ...]
    in_blocks: bool = False

    @property
    def step(self) -> int:
        """Capacities are multiples of so many slots."""
        return BLOCK if self.in_blocks else 1

    def past_shape(self, rows: int, capacity: int, number: int) -> tuple[int, ...]:
        """The shape of the graph's input for the past of tensor `number`, of `rows` with so many slots."""
        heads, size = self.shapes[number]
        if self.in_blocks:
            return rows * heads * (capacity // BLOCK), BLOCK, size
        return rows, heads, capacity, size


class HostCache:
    """The past of up to `rows` sequences, in NumPy arrays."""

    def __init__(self, layout: CacheLayout, rows: int, capacity: int):
        """Make zeroed buffers; the operating system gives memory only to the rows that are written."""
        self.layout = layout
        self.rows = rows
        self.capacity = capacity
        self._buffers = list(self._zeros(capacity))

    def _zeros(self, capacity: int) -> Iterator[NDArray[Any]]:
        for (heads, size), dtype in zip(self.layout.shapes, self.layout.dtypes, strict=True):
            yield np.zeros((self.rows, heads, capacity, size), dtype)

    def past(self, first: int, count: int) -> KeyValues:
        """The buffers of `count` rows from `first`: views, not copies."""
        return [buffer[first : first + count] for buffer in self._buffers]

    def write(self, first: int, positions: NDArray[np.int64], new: KeyValues) -> None:
        """Store `new` [count, kv_heads, seq, head_size] of the rows from `first` in slots `positions` [count, seq]."""
        rows = first + np.arange(len(positions))[:, None]
        for buffer, values in zip(self._buffers, new, strict=True):
            buffer[rows, :, positions] = values.swapaxes(1, 2)

    def move(self, source: int, target: int, filled: int) -> None:
        """Let row `target` hold the `filled` first positions of row `source`."""
        for buffer in self._buffers:
            buffer[target, :, :filled] = buffer[source, :, :filled]

    def wipe(self, row: int) -> None:
        """Let a row hold zeros again."""
        for buffer in self._buffers:
            buffer[row] = 0

    def resize(self, capacity: int, count: int) -> None:
        """Have room for `capacity` positions; what the first `count` rows store there stays."""
        stored = min(capacity, self.capacity)
        for index, after in enumerate(self._zeros(capacity)):  # tensor by tensor, or memory would have to hold both
            after[:count, :, :stored] = self._buffers[index][:count, :, :stored]
            self._buffers[index] = after
        self.capacity = capacity
