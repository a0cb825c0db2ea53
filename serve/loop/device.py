"""Memory of a device, and the places of the active sequences' keys and values in it.

A graph returns only a step's new keys and values, which have to be written into the buffers of the past, by position,
on the device. No kernel of our own does this: all tensors of one shape and type lie in one allocation,

    past   [tensors, rows, heads, capacity, size]        new   [tensors, rows, heads, seq, size]

so that the addition to a row, in all layers, is one copy of lines with two strides, as `cuMemcpy3DAsync` does it: a
line is the new positions of one head, lines repeat over heads, blocks of them over tensors. Rows at the same position
are copied together. Each tensor begins at a multiple of `ALIGNMENT`, and so does every row of the past, since the
engine gets the rows of a prompt by the address of the first.

Nothing here depends on CUDA: addresses are numbers. Imports only the cache, as it is copied into Triton repositories.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .cache import CacheLayout

#: What TensorRT asks of the address of a tensor, in bytes.
ALIGNMENT = 256


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


class CaptureError(RuntimeError):
    """Work cannot be captured, or does something else when it is repeated."""


class Device(Protocol):
    """Memory and one queue of work, in which all that is not said to wait is done in order, later."""

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

    def zero(self, address: int, size: int) -> None:
        """Write zeros."""

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, without doing it, as a function that repeats it with the addresses that it has now. The
        function ends nothing but itself: it goes with its last reference. Raises CaptureError where it cannot be.
        """

    def wait(self) -> None:
        """Until all that was asked for is done."""


@dataclass(frozen=True)
class CacheGroup:
    """Tensors of the cache that are alike: their numbers in the layout, and the bytes that a head has of a position."""

    tensors: tuple[int, ...]
    heads: int
    size: int


def groups_of(layout: CacheLayout) -> list[CacheGroup]:
    """The tensors of a cache by shape and width."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, ((heads, size), dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True)):
        found.setdefault((heads, size * dtype.itemsize), []).append(number)
    return [CacheGroup(tuple(numbers), heads, size) for (heads, size), numbers in found.items()]


def slot_step(layout: CacheLayout) -> int:
    """Capacities are multiples of this, so that every row of every tensor begins at a multiple of `ALIGNMENT`."""
    return lcm(*(ALIGNMENT // gcd(ALIGNMENT, group.heads * group.size) for group in groups_of(layout)))


def new_block(group: CacheGroup, rows: int, seq: int) -> int:
    """Bytes from one tensor to the next of a step's new keys and values: whole lines, and a multiple of `ALIGNMENT`."""
    whole = lcm(ALIGNMENT, seq * group.size)
    return -(-rows * group.heads * seq * group.size // whole) * whole


def runs(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours of equal value: where they begin, how many, the value."""
    first = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[first]:
            yield first, index - first, values[first]
            first = index


def bucket_of(count: int, most: int) -> int:
    """The number of rows that a step of `count` is run with: the next power of two, or all that there are."""
    return min(1 << (count - 1).bit_length(), most)


class DeviceCache:
    """The past of `rows` sequences in slots `capacity`, on a device."""

    def __init__(self, device: Device, layout: CacheLayout, rows: int, capacity: int):
        """Make zeroed buffers: a slot that a mask hides weighs 0, and 0 × NaN is NaN."""
        self.device, self.groups, self.rows, self.capacity = device, groups_of(layout), rows, capacity
        self.bases = [device.allocate(len(group.tensors) * self._block(group)) for group in self.groups]
        for group, base in zip(self.groups, self.bases, strict=True):
            device.zero(base, len(group.tensors) * self._block(group))

    def _row(self, group: CacheGroup) -> int:
        return group.heads * self.capacity * group.size

    def _block(self, group: CacheGroup) -> int:
        return self.rows * self._row(group)

    def addresses(self, first: int) -> list[int]:
        """Return the address of row `first` in each tensor, in the order of the layout."""
        return by_number(
            (number, base + index * self._block(group) + first * self._row(group))
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
                    target_block=self._block(group),
                )
            )

    def copy_rows(self, other: "DeviceCache", rows: tuple[int, int], count: int, filled: int) -> None:
        """Copy the `filled` first positions of `count` rows of `other`; `rows`: the first row there, and the first row
        here.
        """
        if not count or not filled:
            return
        for group, base, source in zip(self.groups, self.bases, other.bases, strict=True):
            self.device.copy(
                Copy(
                    source=source + rows[0] * other._row(group),
                    target=base + rows[1] * self._row(group),
                    width=filled * group.size,
                    lines=count * group.heads,
                    blocks=len(group.tensors),
                    source_line=other.capacity * group.size,
                    source_block=other._block(group),
                    target_line=self.capacity * group.size,
                    target_block=self._block(group),
                )
            )

    def wipe(self, row: int) -> None:
        """Let a row hold zeros again."""
        for group, base in zip(self.groups, self.bases, strict=True):
            for index in range(len(group.tensors)):
                self.device.zero(base + index * self._block(group) + row * self._row(group), self._row(group))

    def free(self) -> None:
        """Give the memory back, when all work is done."""
        self.device.wait()
        for base in self.bases:
            self.device.free(base)


def by_number(numbered: Iterator[tuple[int, int]]) -> list[int]:
    """Values in the order of their numbers."""
    return [value for _, value in sorted(numbered)]
