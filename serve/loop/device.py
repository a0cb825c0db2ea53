"""Memory of a device, and the places of the active sequences' keys and values in it.

A graph returns only a step's new keys and values, which have to be written into the buffers of the past, by position,
on the device. All tensors of one shape and type lie in one allocation,

    past   [tensors, rows, heads, capacity, size]        new   [tensors, rows, heads, seq, size]

so that the addition to a row, in all layers, is one copy of lines with two strides, as `cuMemcpy3DAsync` does it: a
line is the new positions of one head, lines repeat over heads, blocks of them over tensors. So prompts are stored; a
decode step is by one kernel for all rows (`device_kernels`), or, without kernels, by copies, of rows at the same
position together. Each tensor begins at a multiple of `ALIGNMENT`, and so does every row of the past, since the engine
gets the rows of a prompt by the address of the first.

The past has its memory at once, for all slots that its rows may fill, since a server that runs out of it later loses
the requests in flight. Of that memory only a beginning is in use: the lines, of one head each, lie as close as the
capacity allows, since attention reads every slot. Another capacity moves them apart, or together, where they are
(`moves`), so that growing takes no memory.

Nothing here depends on CUDA: addresses are numbers. Imports only NumPy and its neighbours in this folder, as it is
copied into Triton repositories.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from .cache import CacheLayout
from .sessions import SessionError

#: The alignment that TensorRT requires of a tensor's address, in bytes.
ALIGNMENT = 256
#: Lengths of chunks of prompts up to this are powers of two, longer ones its multiples.
FINE = 128


@dataclass(frozen=True)
class Copy:
    """`blocks` times `lines` times `width` bytes, from address to address; `line` and `block` are the distances between
    the beginnings of two lines, and of two blocks, at the source and at the target. A block is whole lines.
    """

    source: int
    target: int
    width: int
    lines: int
    blocks: int
    source_line: int
    source_block: int
    target_line: int
    target_block: int


#: A kernel that a device has loaded.
Function = NewType("Function", int)


class CaptureError(RuntimeError):
    """Work cannot be captured, or does something else when it is repeated."""


class BrokenDeviceError(SessionError):
    """The device has failed in a way that all later calls fail too."""


class Device(Protocol):
    """Memory and one queue of work. Calls enqueue work, which is done in order, and return at once unless they say that
    they wait.
    """

    def allocate(self, size: int) -> int:
        """Memory of so many bytes, one or more, whatever it holds; its address is a multiple of `ALIGNMENT`."""

    def free(self, address: int) -> None:
        """Give memory back."""

    def host(self, size: int) -> NDArray[np.uint8]:
        """Host memory that the device reads and writes by itself; it goes with the array."""

    def upload(self, source: NDArray[Any], target: int) -> None:
        """Copy an array of `host` to the device."""

    def download(self, source: int, target: NDArray[Any]) -> None:
        """Copy from the device into an array of `host`."""

    def copy(self, copy: Copy) -> None:
        """Copy on the device."""

    def zero(self, address: int, width: int, lines: int = 1, line: int = 0) -> None:
        """Write zeros: `lines` times `width` bytes, which begin `line` bytes apart."""

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, without doing it, as a function that repeats it with the addresses that it has now. The
        function ends nothing but itself: it goes with its last reference. Raises CaptureError where it cannot be.
        """

    def load(self, image: bytes, names: Sequence[str]) -> dict[str, Function]:
        """Load the kernels of these names from PTX, for as long as the device is there. Raises SessionError where the
        device does not take them.
        """

    def launch(self, function: Function, grid: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
        """Run a kernel of so many programs with so many threads each; `arguments` are values of ctypes."""

    def wait(self) -> None:
        """Wait until all enqueued work is done."""


@dataclass(frozen=True)
class CacheGroup:
    """Tensors of the cache with equal shape and type: their numbers in the layout, heads, and bytes per head and
    position.
    """

    tensors: tuple[int, ...]
    heads: int
    size: int


def groups_of(layout: CacheLayout) -> list[CacheGroup]:
    """The tensors of a cache by shape and width."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number, ((heads, size), dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True)):
        by_shape.setdefault((heads, size * dtype.itemsize), []).append(number)
    return [CacheGroup(tuple(numbers), heads, size) for (heads, size), numbers in by_shape.items()]


def slot_step(layout: CacheLayout) -> int:
    """Capacities are multiples of this, so that every row of every tensor begins at a multiple of `ALIGNMENT`, and is
    of whole blocks.
    """
    return lcm(layout.step, *(ALIGNMENT // gcd(ALIGNMENT, group.heads * group.size) for group in groups_of(layout)))


def new_block(group: CacheGroup, rows: int, seq: int) -> int:
    """Bytes from one tensor to the next of a step's new keys and values: whole lines, and a multiple of `ALIGNMENT`."""
    unit = lcm(ALIGNMENT, seq * group.size)
    return -(-rows * group.heads * seq * group.size // unit) * unit


def runs(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours of equal value: where they begin, how many, the value."""
    first = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[first]:
            yield first, index - first, values[first]
            first = index


def bucket_of(count: int, most: int) -> int:
    """The number of rows with which a step of `count` rows runs: the next power of two, at most all rows."""
    return min(1 << (count - 1).bit_length(), most)


def padded_length(positions: int, most: int) -> int:
    """The length with which a chunk of so many `positions` of prompts runs, of at most `most`: the next power of two,
    and beyond `FINE` the next multiple of that. TensorRT-RTX compiles its kernels anew for each length it meets.
    """
    multiple = -(-positions // FINE) * FINE
    return max(positions, bucket_of(positions, most) if positions <= FINE else min(multiple, most))


def cache_bytes(layout: CacheLayout, rows: int, slots: int) -> int:
    """The bytes of the past of `rows` sequences with so many `slots` each."""
    return sum(rows * _lines(group) * slots * group.size for group in groups_of(layout))


def _lines(group: CacheGroup) -> int:
    return len(group.tensors) * group.heads


def moves(count: int, before: int, after: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the copies, in order, that move `count` lines from `before` bytes apart to `after` bytes apart: the first
    line, the number of lines, and which bytes of them, the first and how many.

    No copy reads what it writes, and none writes over what a later one reads. Lines that go apart are moved from the
    last on, as many at once as come to lie behind all that are not moved yet; a line that is moved by less than its
    length is moved in parts. Line 0 stays where it is.
    """
    width = min(before, after)
    step = abs(after - before)
    apart = after > before
    first, end = (count, count) if apart else (1, 1)
    while step and (first > 1 if apart else end < count):
        if apart:
            first, end = max(1, -(-first * before // after)), first
        else:
            first = end
            end = min(count, end * before // after)
        if first < end:
            yield first, end - first, 0, width
            continue
        first, end = (end - 1, end) if apart else (first, first + 1)
        parts = [(begin, min(first * step, width - begin)) for begin in range(0, width, first * step)]
        yield from ((first, 1, *part) for part in (reversed(parts) if apart else parts))


class DeviceCache:
    """The past of `rows` sequences on a device, with memory for `slots` each, of which `capacity` are in use."""

    def __init__(self, device: Device, layout: CacheLayout, rows: int, slots: int):
        """Take the memory; no slot is in use."""
        self.device = device
        self.groups = groups_of(layout)
        self.rows = rows
        self.capacity = 0
        self.bases = [device.allocate(rows * _lines(group) * slots * group.size) for group in self.groups]

    def resize(self, capacity: int) -> None:
        """Use so many slots of each row; what the lesser number of them holds stays.

        New slots are zeros: one that a mask hides weighs 0, and 0 × NaN is NaN.
        """
        for group, base in zip(self.groups, self.bases, strict=True):
            count = self.rows * _lines(group)
            before = self.capacity * group.size
            after = capacity * group.size
            for first, lines, begin, width in moves(count, before, after) if before else ():
                self.device.copy(
                    Copy(
                        source=base + first * before + begin,
                        target=base + first * after + begin,
                        width=width,
                        lines=lines,
                        blocks=1,
                        source_line=before,
                        source_block=lines * before,
                        target_line=after,
                        target_block=lines * after,
                    )
                )
            if after > before:
                self.device.zero(base + before, after - before, count, after)
        self.capacity = capacity

    def _row(self, group: CacheGroup) -> int:
        return group.heads * self.capacity * group.size

    def block(self, group: CacheGroup) -> int:
        """Bytes from one tensor of a group to the next."""
        return self.rows * self._row(group)

    def addresses(self, first: int) -> list[int]:
        """Return the address of row `first` in each tensor, in the order of the layout."""
        return by_number(
            (number, base + index * self.block(group) + first * self._row(group))
            for group, base in zip(self.groups, self.bases, strict=True)
            for index, number in enumerate(group.tensors)
        )

    def write(self, new: Sequence[int], of: tuple[int, int], at: tuple[int, int, int], count: int, length: int) -> None:
        """Store what a step gave: `new` [groups] are addresses of tensors `of` (rows, seq); `at` is the first of
        `count` rows there, the same row here, and the slot that the first of their `length` last positions goes to.
        """
        rows, seq = of
        source_row, row, slot = at
        for group, base, source in zip(self.groups, self.bases, new, strict=True):
            line = seq * group.size
            self.device.copy(
                Copy(
                    source=source + source_row * group.heads * line + (seq - length) * group.size,
                    target=base + row * self._row(group) + slot * group.size,
                    width=length * group.size,
                    lines=count * group.heads,
                    blocks=len(group.tensors),
                    source_line=line,
                    source_block=new_block(group, rows, seq),
                    target_line=self.capacity * group.size,
                    target_block=self.block(group),
                )
            )

    def move(self, source: int, target: int, filled: int) -> None:
        """Let row `target` hold the `filled` first positions of row `source`."""
        for group, base in zip(self.groups, self.bases, strict=True) if filled else ():
            line = self.capacity * group.size
            block = self.block(group)
            self.device.copy(
                Copy(
                    source=base + source * self._row(group),
                    target=base + target * self._row(group),
                    width=filled * group.size,
                    lines=group.heads,
                    blocks=len(group.tensors),
                    source_line=line,
                    source_block=block,
                    target_line=line,
                    target_block=block,
                )
            )

    def wipe(self, row: int) -> None:
        """Let a row hold zeros again."""
        for group, base in zip(self.groups, self.bases, strict=True):
            for index in range(len(group.tensors)):
                self.device.zero(base + index * self.block(group) + row * self._row(group), self._row(group))

    def free(self) -> None:
        """Give the memory back, when all work is done."""
        self.device.wait()
        for base in self.bases:
            self.device.free(base)


def by_number(numbered: Iterator[tuple[int, int]]) -> list[int]:
    """Values in the order of their numbers."""
    return [value for _, value in sorted(numbered)]
