"""The memory of one call of an engine, in page-locked host memory and on the device.

    host     tokens | positions | mask | (indices) | slots | logits of the last positions
    device   tokens | positions | mask | (indices) | slots | new keys and values, group by group | logits

The inputs lie alike on both sides, so they are uploaded at once; `slots` are for the kernel that stores the new keys
and values of a decode step (`device_kernels`). Of the logits only a row's last position is downloaded, if any: rows of
a chunk end together. Where the graph is asked for it by its index, there are no other logits;
otherwise those of all positions lie on the device. Allocating page-locked memory stops the device, so a `Room` outlasts
its call: that of a decode step belongs to it, since a captured step repeats its addresses; all chunks of prompts share
one, which grows to the largest of them.

Nothing here depends on CUDA. Imports only NumPy and its neighbours, as it is copied into Triton repositories.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .cache import CacheLayout
from .device import ALIGNMENT, Device, by_number, groups_of, new_block
from .host_batch import LOGITS_INDICES, last_indices

Shapes = Mapping[str, tuple[int, ...]]
Phase = Literal["prefill", "decode"]
#: Bytes of an int64.
WORD = 8


class DeviceProgram(Protocol):
    """An engine. Tensors are known by name: three of tokens, `past`, `new`, `logits`. `asks`: whether an input says
    which positions' logits it gives. `captures`: whether its work may be captured and repeated; not where it reads a
    condition on the host, which a captured graph freezes.
    """

    layout: CacheLayout
    vocabulary: int
    logits_dtype: np.dtype[Any]
    asks: bool
    captures: bool

    def names(self, kind: Literal["past", "new"]) -> Sequence[str]:
        """The tensors of the past, or the new ones, in the order of the layout."""

    def context(self, phase: Phase) -> Any:
        """Make a context of the engine, which runs one shape of inputs at a time."""

    def bind(self, context: Any, phase: Phase, shapes: Shapes, addresses: Mapping[str, int]) -> Callable[[], None]:
        """Return the function that runs the engine in `context` on tensors at these addresses; `shapes` are those of
        its inputs. What was bound in that context before is not to be run any more.
        """

    def idle(self) -> None:
        """Use the time in which nothing is to be run."""


def float_logits(raw: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """Logits as they came, [rows, bytes], in FP32; uint16 holds BF16, which NumPy has not."""
    values = raw.view(dtype)
    if dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


@dataclass(frozen=True)
class CallShape:
    """`count` rows of `seq` tokens over `past` slots; `asked`: the number of positions of a row whose logits are asked
    for, None where the graph gives all.
    """

    count: int
    seq: int
    past: int
    asked: int | None = None

    @property
    def tokens(self) -> dict[str, tuple[int, int]]:
        """The shapes of tokens, positions and mask, and of the indices where logits are asked for."""
        shapes = {
            "input_ids": (self.count, self.seq),
            "position_ids": (self.count, self.seq),
            "attention_mask": (self.count, self.past + self.seq),
        }
        if self.asked is None:
            return shapes
        return {**shapes, LOGITS_INDICES: (self.count, self.asked)}

    @property
    def scored(self) -> int:
        """The number of positions of a row that have logits."""
        return self.seq if self.asked is None else self.asked


@dataclass(frozen=True)
class CallLayout:
    """Offsets in bytes: of the inputs and the slots on both sides, of each group's new values and of the logits on the
    device; the logits of the host follow what is `uploaded`. `host` and `device`: the bytes in all.
    """

    inputs: tuple[int, ...]
    slots: int
    uploaded: int
    new: tuple[int, ...]
    logits: int
    host: int
    device: int


def call_layout(program: DeviceProgram, shape: CallShape) -> CallLayout:
    """Lay out the memory of a call."""
    width = program.vocabulary * program.logits_dtype.itemsize
    sizes = [WORD * rows * columns for rows, columns in shape.tokens.values()]
    *inputs, slots, uploaded = offsets([*sizes, WORD * shape.count])
    blocks = [len(group.tensors) * new_block(group, shape.count, shape.seq) for group in groups_of(program.layout)]
    *new, logits, device = offsets([*blocks, shape.count * shape.scored * width], uploaded)
    return CallLayout(tuple(inputs), slots, uploaded, tuple(new), logits, uploaded + shape.count * width, device)


def offsets(sizes: Sequence[int], begin: int = 0) -> list[int]:
    """The aligned offsets of blocks of these `sizes`, one behind the other from `begin`, and the end of the last."""
    offsets = [begin]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


class MemoryLayout(Protocol):
    """Anything that has parts on `host` and `device`, of so many bytes there."""

    @property
    def host(self) -> int:
        """Bytes on the host."""

    @property
    def device(self) -> int:
        """Bytes on the device."""


class Room:
    """Memory for a call on host and device, which may be more than the call needs."""

    def __init__(self, device: Device):
        """No memory yet."""
        self._device = device
        self.host: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.address = self._size = 0

    def hold(self, layout: MemoryLayout) -> "Room":
        """Make room for a layout; contents are lost if the room is too small. The device must have finished with it."""
        if layout.host > self.host.size:
            self.host = self._device.host(layout.host)
        if layout.device > self._size:
            self.free()
            self.address = self._device.allocate(layout.device)
            self._size = layout.device
        return self

    def free(self) -> None:
        """Give the device's memory back, when the work that was asked for is done."""
        if self._size:
            self._device.free(self.address)
        self.address = self._size = 0


@dataclass
class BoundCall:
    """The inputs of a call and its `slots` [rows] on the host, its outputs on the device, its last logits on the host,
    and the engine's run; `uploaded`: inputs and slots, as one array.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.int64]
    slots: NDArray[np.int64]
    uploaded: NDArray[np.uint8]
    address: int
    slots_at: int
    new: tuple[int, ...]
    logits_at: int
    logits: NDArray[np.uint8]
    run: Callable[[], None]


def bound_call(
    program: DeviceProgram, context: Any, phase: Phase, shape: CallShape, pasts: Sequence[int], room: Room
) -> BoundCall:
    """Bind the engine to memory in `room`; `pasts`: the addresses of the past of the first row, tensor by tensor."""
    layout = call_layout(program, shape)
    room.hold(layout)
    tokens, positions, mask, *asked = (
        room.host[offset : offset + WORD * rows * columns].view(np.int64).reshape(rows, columns)
        for offset, (rows, columns) in zip(layout.inputs, shape.tokens.values(), strict=True)
    )
    for indices in asked:
        indices[:] = last_indices((shape.count, shape.seq), shape.scored)
    width = program.vocabulary * program.logits_dtype.itemsize
    logits = room.host[layout.uploaded : layout.uploaded + shape.count * width].reshape(shape.count, width)
    new = tuple(room.address + offset for offset in layout.new)
    run = program.bind(
        context,
        phase,
        input_shapes(program, shape),
        dict(zip(shape.tokens, (room.address + offset for offset in layout.inputs), strict=True))
        | dict(zip(program.names("past"), pasts, strict=True))
        | dict(zip(program.names("new"), _new_addresses(program, shape, new), strict=True))
        | {"logits": room.address + layout.logits},
    )
    slots = room.host[layout.slots : layout.slots + WORD * shape.count].view(np.int64)
    slots[:] = -1
    return BoundCall(
        tokens, positions, mask, slots, room.host[: layout.uploaded], room.address, room.address + layout.slots, new,
        room.address + layout.logits, logits, run,
    )  # fmt: skip


def input_shapes(program: DeviceProgram, shape: CallShape) -> dict[str, tuple[int, ...]]:
    """The shapes of the engine's inputs."""
    layout = program.layout
    names = enumerate(program.names("past"))
    return shape.tokens | {name: layout.past_shape(shape.count, shape.past, number) for number, name in names}


def _new_addresses(program: DeviceProgram, shape: CallShape, bases: Sequence[int]) -> list[int]:
    """The addresses of the new keys and values, tensor by tensor; `bases`: of their groups."""
    return by_number(
        (number, base + index * new_block(group, shape.count, shape.seq))
        for group, base in zip(groups_of(program.layout), bases, strict=True)
        for index, number in enumerate(group.tensors)
    )
