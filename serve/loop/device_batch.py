"""Active sequences on a device: the engine reads and writes there, and the host transfers only tokens and logits.

A decode step is captured once for each number of rows (powers of two; surplus rows are padding that attends to itself
alone) and each capacity: upload tokens, positions and mask, run the engine, download logits, in one launch. The new
keys and values are then copied to their slots, with one copy for all rows at one position; the host waits once, at the
end. The capacity grows by doubling, as in host memory (`host_batch`), since attention reads every slot.

Chunks of prompts vary in shape and are not captured.

Imports only NumPy and its neighbours in this folder, as it is copied into Triton repositories.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .cache import CacheLayout
from .device import ALIGNMENT, Device, DeviceCache, bucket_of, by_number, groups_of, new_block, runs, slot_step
from .host_batch import CAPACITY_STEP, attention_mask, chunk_layout, next_capacity

Shapes = Mapping[str, tuple[int, ...]]
Phase = Literal["prefill", "decode"]
#: Bytes of an int64.
WORD = 8


class DeviceProgram(Protocol):
    """An engine. Tensors are known by name: three of tokens, `past`, `new`, `logits`."""

    layout: CacheLayout
    vocabulary: int
    logits_dtype: np.dtype[Any]

    def names(self, kind: Literal["past", "new"]) -> Sequence[str]:
        """The tensors of the past, or the new ones, in the order of the layout."""

    def bind(self, phase: Phase, shapes: Shapes, addresses: Mapping[str, int]) -> Callable[[], None]:
        """Return the function that runs the engine on tensors at these addresses; `shapes` are those of its inputs."""


def float_logits(raw: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """Logits as they came, [rows, bytes], in FP32; uint16 holds BF16, which NumPy has not."""
    values = raw.view(dtype)
    if dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


@dataclass
class Staging:
    """Tokens, positions and mask of a call, on the host and on the device: one upload."""

    whole: NDArray[np.uint8]
    address: int
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.int64]
    offsets: tuple[int, ...]


def staging(device: Device, rows: int, seq: int, capacity: int) -> Staging:
    """Room for the inputs of a call of `rows` × `seq` tokens over so many slots."""
    shapes = ((rows, seq), (rows, seq), (rows, capacity + seq))
    sizes = [WORD * int(np.prod(shape)) for shape in shapes]
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    whole = device.host(total)
    tokens, positions, mask = (
        whole[offset : offset + size].view(np.int64).reshape(shape)
        for offset, size, shape in zip(offsets, sizes, shapes, strict=True)
    )
    return Staging(whole, device.allocate(total), tokens, positions, mask, tuple(offsets))


@dataclass
class _Step:
    """A decode step for a bucket of rows: its inputs, the captured call, its outputs. `shown`: see `host_batch`."""

    staged: Staging
    shown: NDArray[np.int64]
    new: list[int]
    logits_at: int
    logits: NDArray[np.uint8]
    run: Callable[[], None]


class DeviceBatch:
    """A `sessions.Batch`; see there for what each method does."""

    def __init__(self, program: DeviceProgram, device: Device, rows: int, positions: int):
        """Room for `rows` sequences of at most `positions`; memory is taken as it is needed."""
        self._program, self._device, self._rows = program, device, rows
        step = slot_step(program.layout)
        self._positions, self._step = positions // step * step, step
        self._cache: DeviceCache | None = None
        self._steps: dict[int, _Step] = {}

    @property
    def capacity(self) -> int:
        """Slots of a row, none while there is no cache."""
        return self._cache.capacity if self._cache else 0

    def reserve(self, needed: int, most: int, rows: int) -> None:
        """Have slots for `needed` positions: twice as many as before where they run out, and at most `most`."""
        if (capacity := next_capacity(self.capacity, needed, most, self._whole)) is None:
            return
        before, held = self._cache, self.capacity
        self._forget_steps()
        self._cache = DeviceCache(self._device, self._program.layout, self._rows, capacity)
        if before:
            self._cache.copy_rows(before, (0, 0), rows, min(held, capacity))
            before.free()

    def _whole(self, positions: int) -> int:
        unit = -(-CAPACITY_STEP // self._step) * self._step
        return min(-(-positions // unit) * unit, self._positions)

    def prefill(
        self, first: int, tokens: NDArray[np.int64], filled: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Read a chunk of prompts; the outputs of padding are discarded."""
        return self._read_chunk(first, tokens, filled, lengths, 1)[:, 0]

    def prefill_all(self, tokens: NDArray[np.int64], filled: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read a chunk `tokens` [count, seq] of the first rows as `prefill` does, without padding; return the logits of
        all its positions [count, seq, vocabulary].
        """
        count, seq = tokens.shape
        return self._read_chunk(0, tokens, filled, np.full(count, seq), seq)

    def _read_chunk(
        self, first: int, tokens: NDArray[np.int64], filled: NDArray[np.int64], lengths: NDArray[np.int64], kept: int
    ) -> NDArray[np.float32]:
        """Read a chunk of prompts; return the logits of each row's last `kept` positions [count, kept, vocabulary]."""
        cache, (count, seq) = self._held(), tokens.shape
        past = cache.capacity if filled.any() else 0
        call = self._call("prefill", first, count, seq, past)
        call.staged.tokens[:] = tokens
        call.staged.positions[:], real = chunk_layout(seq, filled, lengths)
        call.staged.mask[:] = attention_mask(filled, past, real)
        self._device.upload(call.staged.whole, call.staged.address)
        call.run()
        width = call.logits.shape[1]
        logits = call.logits if kept == 1 else self._device.host(count * kept * width).reshape(count, kept * width)
        for row, (slot, length) in enumerate(zip(filled.tolist(), lengths.tolist(), strict=True)):
            cache.write(call.new, (count, seq), (row, first + row, slot), 1, length)
            self._device.download(call.logits_at + (row * seq + seq - kept) * width, logits[row])
        self._device.wait()
        found = float_logits(logits, self._program.logits_dtype).reshape(count, kept, -1).copy()
        self._free(call)
        return found

    def decode(self, tokens: NDArray[np.int64], filled: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read one token of each row; the next call with as many rows overwrites the returned logits."""
        count, bucket = len(tokens), bucket_of(len(tokens), self._rows)
        step = self._steps.get(bucket) or self._captured(bucket)
        step.staged.tokens[:] = step.staged.positions[:] = 0
        step.staged.tokens[:count, 0], step.staged.positions[:count, 0] = tokens, filled
        now = np.zeros(bucket, np.int64)
        now[:count] = filled
        for row, (before, after) in enumerate(zip(step.shown.tolist(), now.tolist(), strict=True)):
            step.staged.mask[row, min(before, after) : max(before, after)] = after > before
        step.shown[:] = now
        step.run()
        for first, rows, slot in runs(filled.tolist()):
            self._held().write(step.new, (bucket, 1), (first, first, slot), rows, 1)
        self._device.wait()
        return float_logits(step.logits[:count], self._program.logits_dtype)

    def _captured(self, bucket: int) -> _Step:
        """The step of a bucket of rows, made once for each capacity."""
        step = self._call("decode", 0, bucket, 1, self._held().capacity)
        step.staged.mask[:] = 0
        step.staged.mask[:, -1] = 1  # the new token
        launch = step.run

        def whole() -> None:
            self._device.upload(step.staged.whole, step.staged.address)
            launch()
            self._device.download(step.logits_at, step.logits.reshape(-1))

        step.run = self._device.captured(whole)
        self._steps[bucket] = step
        return step

    def _call(self, phase: Phase, first: int, count: int, seq: int, past: int) -> _Step:
        """Memory for a call of `count` × `seq` tokens of the rows from `first`, and the engine bound to it."""
        program, device, cache = self._program, self._device, self._held()
        groups, layout = groups_of(program.layout), program.layout
        staged = staging(device, count, seq, past)
        new = [device.allocate(len(group.tensors) * new_block(group, count, seq)) for group in groups]
        width = program.vocabulary * program.logits_dtype.itemsize
        logits_at = device.allocate(count * seq * width)
        outputs = by_number(
            (number, base + index * new_block(group, count, seq))
            for group, base in zip(groups, new, strict=True)
            for index, number in enumerate(group.tensors)
        )
        inputs = ("input_ids", "position_ids", "attention_mask")
        pasts = program.names("past")
        shapes = dict(zip(inputs, ((count, seq), (count, seq), (count, past + seq)), strict=True)) | {
            name: (count, heads, past, size) for name, (heads, size) in zip(pasts, layout.shapes, strict=True)
        }
        addresses = (
            dict(zip(inputs, (staged.address + offset for offset in staged.offsets), strict=True))
            | dict(zip(pasts, cache.addresses(first), strict=True))
            | dict(zip(program.names("new"), outputs, strict=True))
            | {"logits": logits_at}
        )
        run = program.bind(phase, shapes, addresses)
        logits = device.host(count * width).reshape(count, width)
        return _Step(staged, np.zeros(count, np.int64), new, logits_at, logits, run)

    def _free(self, step: _Step) -> None:
        for address in (step.staged.address, *step.new, step.logits_at):
            self._device.free(address)

    def _forget_steps(self) -> None:
        if self._steps:
            self._device.wait()
        for step in self._steps.values():
            self._free(step)
        self._steps.clear()

    def _held(self) -> DeviceCache:
        assert self._cache is not None, "reserve comes first"
        return self._cache

    def move(self, source: int, target: int, filled: int) -> None:
        """Let row `target` hold the `filled` first positions of row `source`."""
        self._held().copy_rows(self._held(), (source, target), 1, filled)

    def wipe(self, row: int) -> None:
        """Let a row hold zeros."""
        self._held().wipe(row)

    def clear(self) -> None:
        """Forget all rows, and give the memory back."""
        self._forget_steps()
        if self._cache:
            self._cache.free()
        self._cache = None
