"""The logits of a decode step on a device: a summary of their blocks is downloaded, and what is asked for besides.

    host and device    one over the temperatures | pairs (row, block) | maxima | sums | places | logits of blocks

A step's logits are in the memory of its call until the step runs again. The memory of what is made of them is taken
when a batch is opened, for all of its rows, and is of all its steps.

Imports only NumPy and its neighbours in this folder, as it is copied into Triton repositories.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .device import Device, runs
from .device_calls import Room, float_logits, offsets
from .device_kernels import DeviceKernels, count_blocks
from .sampling import BLOCK
from .step_logits import Logits, Summaries, Summary

#: Blocks of a row that are sent at most, 16,384 logits: where more are near the best, all are sent.
MOST_BLOCKS = 256


@dataclass(frozen=True)
class SummaryLayout:
    """Offsets in bytes, alike on both sides, of what the logits of `rows` of some type and vocabulary are summarized
    by, and its size.
    """

    rows: int
    vocabulary: int
    dtype: np.dtype[Any]

    @property
    def _offsets(self) -> list[int]:
        summary = 4 * self.rows * self.blocks
        pairs = self.rows * self.most_blocks
        return offsets([4 * self.rows, 8 * pairs, summary, summary, summary, pairs * BLOCK * self.dtype.itemsize])

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return count_blocks(self.vocabulary)

    @property
    def most_blocks(self) -> int:
        """The most blocks of a row that are sent at once, on average."""
        return min(MOST_BLOCKS, self.blocks)

    @property
    def parts(self) -> list[int]:
        """The beginnings of the parts."""
        return self._offsets[:-1]

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return self._offsets[-1]

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self._offsets[-1]


class DeviceSummaries:
    """`Summaries` of the logits at the address `logits`, made in `room`, which has the `layout` of their rows."""

    def __init__(self, kernels: DeviceKernels, room: Room, layout: SummaryLayout, logits: int):
        """Ask for nothing yet."""
        self._kernels = kernels
        self._room = room
        self._layout = layout
        self._logits = logits
        self.count = layout.rows
        self.most_blocks = layout.rows * layout.most_blocks
        self.read = False

    def _part(self, number: int, size: int) -> tuple[NDArray[np.uint8], int]:
        """The first `size` bytes of a part on the host, and its address on the device."""
        begin = self._layout.parts[number]
        return self._room.host[begin : begin + size], self._room.address + begin

    def summary(self, temperatures: Logits) -> Summary:
        """Summarize, and wait: `Summaries.summary`."""
        device = self._kernels.device
        layout = self._layout
        count = self.count
        inverses, inverses_at = self._part(0, 4 * count)
        inverses.view(np.float32)[:] = 1.0 / temperatures
        device.upload(inverses, inverses_at)
        parts = [self._part(number, 4 * count * layout.blocks) for number in (2, 3, 4)]
        maxima, sums, places = (address for _, address in parts)
        summary = maxima, sums, places
        self._kernels.summarize(self._logits, layout.dtype, count, layout.vocabulary, inverses_at, summary)
        together, _ = self._part(2, places + 4 * count * layout.blocks - maxima)
        device.download(maxima, together)
        device.wait()
        self.read = True
        maxima_of, sums_of, places_of = (part.reshape(count, -1) for part, _ in parts)
        return Summary(maxima_of.view(np.float32), sums_of.view(np.float32), places_of.view(np.int32))

    def blocks(self, pairs: NDArray[np.int32]) -> Logits:
        """Gather blocks, and wait: `Summaries.blocks`."""
        device = self._kernels.device
        layout = self._layout
        count = len(pairs)
        asked, asked_at = self._part(1, 8 * count)
        asked.view(np.int32)[:] = pairs.reshape(-1)
        device.upload(asked, asked_at)
        raw, raw_at = self._part(5, count * BLOCK * layout.dtype.itemsize)
        self._kernels.gather_blocks(self._logits, layout.dtype, layout.vocabulary, (count, asked_at), raw_at)
        device.download(raw_at, raw)
        device.wait()
        logits = float_logits(raw, layout.dtype).reshape(count, BLOCK)
        behind = BLOCK * pairs[:, 1, None] + np.arange(BLOCK) >= layout.vocabulary
        return np.where(behind, np.float32(-np.inf), logits)


class DeviceLogits:
    """`StepLogits` on a device: `raw` [rows, bytes] is the host's memory for those at the address `at`. `read`: whether
    anything was asked for, so that the step is done.
    """

    def __init__(
        self, device: Device, at: int, raw: NDArray[np.uint8], dtype: np.dtype[Any], summaries: DeviceSummaries | None
    ):
        """Ask for nothing yet."""
        self._device = device
        self._at = at
        self._raw = raw
        self._dtype = dtype
        self.summaries: Summaries | None = summaries
        self._summaries = summaries
        self._read = False

    @property
    def read(self) -> bool:
        """Tell whether the host waited for the step."""
        return self._read or bool(self._summaries and self._summaries.read)

    def rows(self, rows: Sequence[int]) -> Sequence[Logits]:
        """Download rows, and wait: `StepLogits.rows`."""
        width = self._raw.shape[1]
        neighbours = [(first, count) for first, count, _ in runs([row - index for index, row in enumerate(rows)])]
        parts = [self._raw[rows[first] : rows[first] + count] for first, count in neighbours]
        for (first, _), part in zip(neighbours, parts, strict=True):
            self._device.download(self._at + rows[first] * width, part.reshape(-1))
        if parts:
            self._device.wait()
            self._read = True
        return [row for part in parts for row in float_logits(part, self._dtype)]
