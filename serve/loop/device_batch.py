"""Active sequences on a device: the engine reads and writes there, and the host transfers only tokens and logits.

A decode step is captured once for each number of rows (powers of two; surplus rows are padding that attends to itself
alone) and each capacity: upload tokens, positions, mask and slots, run the engine, store the new keys and values in
these slots, in one launch. The logits stay on the device, which summarizes them (`device_logits`): the host waits once
for greedy tokens, and mostly twice for drawn ones. Without kernels for that (`device_kernels`) keys and values are
copied to their slots, with one copy for all rows at one position, and all logits downloaded. Chunks of prompts are
padded to few lengths (`padded_length`). The capacity grows by doubling, as in host memory (`host_batch`), since
attention reads every slot; it shrinks only after a while, for all steps are captured again then.
Memory is taken when a batch is opened, for the largest capacity and the largest chunk of a prompt (`take`), and while
nothing is in flight all is kept for the next request.

A captured step is trusted after `CHECKED` calls in which it gave the logits that the engine gave uncaptured; one that
does not ends all capturing, with a warning. Chunks of prompts vary in shape and are not captured.

Imports only NumPy and its neighbours in this folder, as it is copied into Triton repositories.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .device import CaptureError, Device, DeviceCache, bucket_of, padded_length, runs, slot_step
from .device_calls import BoundCall, CallShape, DeviceProgram, Room, bound_call, call_layout, float_logits
from .device_kernels import DeviceKernels
from .device_logits import DeviceLogits, DeviceSummaries, SummaryLayout
from .host_batch import CAPACITY_STEP, CachedBatch, attention_mask, chunk_layout, next_capacity
from .step_logits import Indices, Logits, StepLogits

LOG = logging.getLogger("fp8q")
#: Calls of a captured step that are held against uncaptured ones: the second has other tokens than were captured.
CHECKED = 2
#: The largest difference between their logits, as a share of the largest logit: BF16 keeps 8 bits.
ALIKE = 2.0**-6
#: Steps in a row for which a far too large cache is kept.
PATIENCE = 256


@dataclass
class _Step:
    """A decode step for a bucket of rows. `shown`: see `host_batch`; `work`: all of it, uncaptured; `launch`: captured,
    and trusted once it is `checked` often enough.
    """

    call: BoundCall
    room: Room
    shown: Indices
    work: Callable[[], None]
    launch: Callable[[], None] | None = None
    checked: int = 0


class DeviceBatch(CachedBatch[DeviceCache]):
    """A `sessions.Batch`; see there for what each method does."""

    def __init__(
        self, program: DeviceProgram, device: Device, rows: int, positions: int, kernels: DeviceKernels | None
    ):
        """Room for `rows` sequences of at most `positions`; `take` takes the memory. `kernels`: those of the device;
        without them keys and values are stored by copies, and all logits sent.
        """
        self._program = program
        self._device = device
        self._rows = rows
        self._chunk = 0
        step = slot_step(program.layout)
        self._positions = positions // step * step
        self._step = step
        self._steps: dict[int, _Step] = {}
        self._prompts = Room(device)
        self._sampling = Room(device)
        self._summary = SummaryLayout(rows, program.vocabulary, program.logits_dtype)
        self._kernels = kernels
        self._unread: DeviceLogits | None = None
        self._captures = program.captures
        self._wasted = 0
        # by the rows of a step; 0: of prompts, whose want of memory is to show at once
        self._contexts: dict[int, Any] = {0: program.context("prefill")}

    @property
    def context(self) -> Any:
        """The engine's context for prompts."""
        return self._context(0)

    def call_bytes(self, chunk: int) -> int:
        """The memory of what calls read and write beside the past: of chunks of prompts, one of so many positions in
        all rows together, and of the steps of all numbers of rows, behind the longest past.
        """
        calls = (call_layout(self._program, shape).device for shape in self._shapes(chunk))
        steps = {bucket_of(count, self._rows) for count in range(1, self._rows + 1)}
        asked = 1 if self._program.asks else None
        shapes = (CallShape(count, 1, self._positions, asked) for count in steps)
        sampling = self._summary.device if self._kernels else 0
        return max(calls) + sampling + sum(call_layout(self._program, shape).device for shape in shapes)

    def take(self, chunk: int) -> None:
        """Take the memory of the past, and of chunks of so many positions of prompts, to which padding adds up."""
        self._chunk = chunk
        self._cache = DeviceCache(self._device, self._program.layout, self._rows, self._positions)
        for shape in self._shapes(chunk):
            self._prompts.hold(call_layout(self._program, shape))
        if self._kernels:
            self._sampling.hold(self._summary)

    def _shapes(self, chunk: int) -> list[CallShape]:
        """The longest chunks of prompts: of one row, and of all rows, whose mask is the largest."""
        asked = 1 if self._program.asks else None
        # a single token gets one of padding (`_read_chunk`)
        return [CallShape(count, max(chunk // count, 2), self._positions, asked) for count in (1, self._rows)]

    def reserve(self, needed: int, most: int, rows: int) -> None:
        """Have slots for `needed` positions: twice as many as before where they run out, and at most `most`."""
        if (capacity := next_capacity(self.capacity, needed, most, self._rounded_up)) is None:
            self._wasted = 0
            return
        self._wasted += 1
        if capacity < self.capacity and self._wasted < PATIENCE:
            return
        self._wasted = 0
        self._forget_steps()
        if self._cache is None:
            self._cache = DeviceCache(self._device, self._program.layout, self._rows, self._positions)
        self._cache.resize(capacity)

    def _rounded_up(self, positions: int) -> int:
        unit = -(-CAPACITY_STEP // self._step) * self._step
        return min(-(-positions // unit) * unit, self._positions)

    def prefill(self, first: int, tokens: Indices, filled: Indices, lengths: Indices) -> Logits:
        """Read a chunk of prompts; the outputs of padding are discarded."""
        return self._read_chunk(first, tokens, filled, lengths, 1)[:, 0]

    def prefill_all(self, tokens: Indices, filled: Indices) -> Logits:
        """Read a chunk `tokens` [count, seq] of the first rows as `prefill` does, without padding; return the logits of
        all its positions [count, seq, vocabulary].
        """
        count, seq = tokens.shape
        return self._read_chunk(0, tokens, filled, np.full(count, seq), seq)

    def _read_chunk(
        self,
        first: int,
        tokens: Indices,
        filled: Indices,
        lengths: Indices,
        scored_positions: int,
    ) -> Logits:
        """Read a chunk of prompts; return the logits of the last positions of each row [count, scored_positions,
        vocabulary].

        Padding comes in front. A single token gets some too: an engine's profile for prompts begins at two, since with
        one it would keep the way of a decode step beside that of prompts (`export.engine.profiles`).
        """
        count, positions = tokens.shape
        seq = padded_length(max(positions, 2), self._chunk // count)
        tokens = np.pad(tokens, ((0, 0), (seq - positions, 0)))
        cache = self._held()
        past = cache.capacity if filled.any() else 0
        context = self._context(0)
        shape = CallShape(count, seq, past, scored_positions if self._program.asks else None)
        call = bound_call(self._program, context, "prefill", shape, cache.addresses(first), self._prompts)
        call.tokens[:] = tokens
        call.positions[:], real = chunk_layout(seq, filled, lengths)
        call.mask[:] = attention_mask(filled, past, real)
        self._device.upload(call.uploaded, call.address)
        call.run()
        width = call.logits.shape[1]
        logits = (
            call.logits
            if scored_positions == 1
            else self._device.host(count * scored_positions * width).reshape(count, scored_positions * width)
        )
        for row, (slot, length) in enumerate(zip(filled.tolist(), lengths.tolist(), strict=True)):
            cache.write(call.new, (count, seq), (row, first + row, slot), 1, length)
            last = (row + 1) * shape.scored - scored_positions
            self._device.download(call.logits_at + last * width, logits[row])
        self._device.wait()
        converted = float_logits(logits, self._program.logits_dtype)
        return converted.reshape(count, scored_positions, -1).copy()  # the next chunk writes over them

    def decode(self, tokens: Indices, filled: Indices) -> StepLogits:
        """Read one token of each row; the next call with as many rows overwrites the returned logits."""
        if self._unread and not self._unread.read:
            self._device.wait()  # what it uploads is written over
        count = len(tokens)
        bucket = bucket_of(len(tokens), self._rows)
        step = self._steps.get(bucket) or self._made(bucket)
        call = step.call
        call.tokens[:] = call.positions[:] = 0
        call.tokens[:count, 0], call.positions[:count, 0] = tokens, filled
        call.slots[:count], call.slots[count:] = filled, -1
        now = np.zeros(bucket, np.int64)
        now[:count] = filled
        for row, (before, after) in enumerate(zip(step.shown.tolist(), now.tolist(), strict=True)):
            call.mask[row, min(before, after) : max(before, after)] = after > before
        step.shown[:] = now
        self._run(step)
        summaries = None
        if self._kernels:
            room = self._sampling.hold(self._summary)
            layout = replace(self._summary, rows=count)
            summaries = DeviceSummaries(self._kernels, room, layout, call.logits_at)
        else:
            for first, rows, slot in runs(filled.tolist()):
                self._held().write(call.new, (bucket, 1), (first, first, slot), rows, 1)
        self._unread = DeviceLogits(self._device, call.logits_at, call.logits, self._program.logits_dtype, summaries)
        return self._unread

    def _made(self, bucket: int) -> _Step:
        """The step of a bucket of rows, made once for each capacity."""
        cache = self._held()
        device = self._device
        kernels = self._kernels
        room = Room(self._device)
        shape = CallShape(bucket, 1, cache.capacity, 1 if self._program.asks else None)
        context = self._context(bucket)
        pasts = cache.addresses(0)
        call = bound_call(self._program, context, "decode", shape, pasts, room)
        call.mask[:] = 0
        call.mask[:, -1] = 1  # the new token

        def work() -> None:  # knows nothing of the step: that would be a cycle, which keeps both beyond their use
            device.upload(call.uploaded, call.address)
            call.run()
            if kernels:
                kernels.scatter(cache, call.new, bucket, call.slots_at)

        self._steps[bucket] = _Step(call, room, np.zeros(bucket, np.int64), work)
        return self._steps[bucket]

    def _run(self, step: _Step) -> None:
        """Run a step: by its captured work, once that is trusted."""
        if step.launch and step.checked == CHECKED:
            step.launch()
            return
        step.work()  # the first run of an engine cannot be captured
        if not self._captures:
            return
        expected = self._logits_of(step)
        try:
            step.launch = step.launch or self._device.captured(step.work)
            step.launch()
            if not same_logits(expected, self._logits_of(step)):
                raise CaptureError("its logits are others than the engine gives uncaptured")
        except CaptureError as error:
            LOG.warning(
                "a decode step is not captured (%s); the engine runs without CUDA graphs, which is slower", error
            )
            self._captures = False
            for other_step in self._steps.values():
                other_step.launch = None
            step.work()
        step.checked += 1

    def _logits_of(self, step: _Step) -> Logits:
        """The logits of all rows of a step, padding too, when it is done."""
        logits = step.call.logits
        self._device.download(step.call.logits_at, logits.reshape(-1))
        self._device.wait()
        return float_logits(logits, self._program.logits_dtype).copy()

    def _context(self, rows: int) -> Any:
        """The engine's context for steps of so many rows, 0 for prompts: made once, whatever the capacity."""
        if rows not in self._contexts:
            self._contexts[rows] = self._program.context("decode" if rows else "prefill")
        return self._contexts[rows]

    def _forget_steps(self) -> None:
        if self._steps:
            self._device.wait()
        for step in self._steps.values():
            step.room.free()
        self._steps.clear()
        self._unread = None

    def idle(self) -> None:
        """Keep cache and steps: making them again costs more than many a request."""
        self._program.idle()

    def clear(self) -> None:
        """Forget all rows, and give the memory back."""
        self._forget_steps()
        self._prompts.free()
        self._sampling.free()
        if self._cache:
            self._cache.free()
        self._cache = None
        self._contexts.clear()


def same_logits(expected: Logits, actual: Logits) -> bool:
    """Tell whether two calls gave the same logits, up to the order of sums."""
    largest = np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max()
    return np.allclose(actual, expected, rtol=0.0, atol=ALIKE * float(largest), equal_nan=True)
