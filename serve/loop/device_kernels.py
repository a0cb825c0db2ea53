"""Kernels of our own on a GPU: they put a step's keys and values into the cache, and read its logits.

    scatter         the new keys and values of all rows, each behind its row's past, in one launch for each group of
                    tensors; by copies it would be one for each position that a row is at
    summarize       the blocks of each row's logits (`step_logits.Summary`)
    gather_blocks   the logits of some blocks of some rows, one behind the other

They are compiled from `serve/kernels.py` into `kernels.ptx`, which the driver compiles for the GPU when it is loaded.
Before they are used each is held against NumPy on a small example, `scatter` captured and repeated. If the driver
refuses one, or it answers otherwise, a warning is logged, the cache is written by copies, and all logits go to the
host. A kernel that fails on the GPU takes the process's context with it, and is an error.

Imports only NumPy and its neighbours in this folder, as it is copied into Triton repositories.
"""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import CacheLayout
from .device import BrokenDeviceError, CaptureError, Device, DeviceCache, Function, groups_of, new_block
from .device_calls import float_logits
from .sampling import BLOCK, SLACK
from .sessions import SessionError
from .step_logits import Summary

PTX = Path(__file__).with_name("kernels.ptx")
#: Threads of a program, and the words of four bytes that one of `scatter` writes.
THREADS = 128
WORDS = 512
#: Blocks that a program of `summarize` takes; 16-bit halves of logits that one of `gather_blocks` may copy.
TILE = 16
LINE_HALVES = 2 * BLOCK
#: The type of logits -> the kernel that summarizes them; uint16 holds BF16.
SUMMARIZE = {"float32": "summarize_fp32", "float16": "summarize_fp16", "uint16": "summarize_bf16"}
WORD = 4
HALF = 2
LOG = logging.getLogger("fp8q")


class KernelError(SessionError):
    """The kernels cannot be loaded, or give something else than they should."""


def count_blocks(vocabulary: int) -> int:
    """The number of blocks of a row of logits."""
    return -(-vocabulary // BLOCK)


@dataclass(frozen=True)
class DeviceKernels:
    """The loaded kernels of a device, by their names."""

    device: Device
    functions: dict[str, Function]

    def scatter(self, cache: DeviceCache, new: Sequence[int], rows: int, slots_at: int) -> None:
        """Store a step's new keys and values, of one position a row: `new` [groups] are their addresses, as
        `DeviceCache.write` has them; `slots_at` that of an int64 [rows], the slot of each row, -1 for none.
        """
        for group, source, base in zip(cache.groups, new, cache.bases, strict=True):
            line = group.size // WORD
            words = rows * group.heads * group.size // WORD
            strides = (cache.capacity * line, new_block(group, rows, 1) // WORD, cache.block(group) // WORD)
            self._launch(
                "scatter",
                (-(-words // WORDS), len(group.tensors)),
                *_addresses(source, base, slots_at),
                *map(ctypes.c_int32, (words, group.heads * line, line)),
                *map(ctypes.c_int64, strides),
            )

    def summarize(
        self,
        logits: int,
        dtype: np.dtype[Any],
        rows: int,
        vocabulary: int,
        inverses: int,
        summary: tuple[int, int, int],
    ) -> None:
        """Summarize the logits [rows, vocabulary] at an address under the float32 [rows] `inverses` of temperatures;
        `summary`: the addresses for what a `Summary` has.
        """
        blocks = count_blocks(vocabulary)
        numbers = map(ctypes.c_int32, (vocabulary, blocks))
        grid = (-(-blocks // TILE), rows)
        self._launch(SUMMARIZE[dtype.name], grid, *_addresses(logits, inverses, *summary), *numbers)

    def gather_blocks(
        self, logits: int, dtype: np.dtype[Any], vocabulary: int, pairs: tuple[int, int], out: int
    ) -> None:
        """Copy blocks of logits, `BLOCK` each, to `out`; `pairs`: the number of blocks, and the address of an int32
        [number, 2] of their rows and their numbers in these. What is behind a row's last logit stays as it was.
        """
        count, pairs_at = pairs
        halves = dtype.itemsize // HALF
        numbers = map(ctypes.c_int32, (vocabulary * halves, BLOCK * halves))
        self._launch("gather_blocks", (count, 1), *_addresses(logits, pairs_at, out), *numbers)

    def _launch(self, name: str, grid: tuple[int, int], *arguments: Any) -> None:
        # the last two are the memory that Triton's kernels may ask for beside their own
        self.device.launch(self.functions[name], grid, THREADS, (*arguments, *_addresses(0, 0)))


def _addresses(*addresses: int) -> list[ctypes.c_uint64]:
    return [ctypes.c_uint64(address) for address in addresses]


def load_kernels(device: Device, layout: CacheLayout) -> DeviceKernels | None:
    """Load the kernels into a device and try them there; None, with a warning, where they are not to be used, or store
    no cache of this layout. Raises BrokenDeviceError where the device fails.
    """
    try:
        if broken := [group.size for group in groups_of(layout) if group.size % WORD]:
            raise KernelError(f"a head of the cache has {broken[0]} bytes, which are no whole words")
        kernels = DeviceKernels(
            device, device.load(PTX.read_bytes(), ["scatter", "gather_blocks", *SUMMARIZE.values()])
        )
        _try(kernels)
    except BrokenDeviceError:
        raise
    except (OSError, SessionError, CaptureError) as error:
        LOG.warning(
            "the kernels that choose tokens on the GPU are not used (%s); all logits go to the host, which is slower",
            error,
        )
        return None
    return kernels


def summarized(logits: NDArray[np.float32], inverses: NDArray[np.float32]) -> Summary:
    """Summarize `logits` [rows, vocabulary] as the kernel does; a row's temperature is one over its `inverses`."""
    rows, vocabulary = logits.shape
    padded = np.full((rows, count_blocks(vocabulary) * BLOCK), -np.inf, np.float32)
    padded[:, :vocabulary] = logits
    blocks = padded.reshape(rows, -1, BLOCK)
    numbers = np.where(np.isnan(blocks), np.float32(-np.inf), blocks)  # a GPU's maximum passes over what is none
    maxima = numbers.max(2)
    base = np.where(np.isneginf(maxima), np.float32(0.0), maxima)  # of a block that is forbidden as a whole
    with np.errstate(invalid="ignore", over="ignore"):  # of what is no number, or forbidden by the lowest that there is
        weights = np.exp((blocks - base[..., None]) * inverses[:, None, None])
    return Summary(maxima, weights.sum(2), numbers.argmax(2).astype(np.int32))


def gathered_blocks(logits: NDArray[Any], pairs: NDArray[np.int32]) -> NDArray[Any]:
    """The blocks of `logits` [rows, vocabulary] of each of the `pairs` [count, 2]: [count, BLOCK], zeros behind a row's
    last logit.
    """
    blocks = np.zeros((len(pairs), BLOCK), logits.dtype)
    for target, (row, block) in zip(blocks, pairs.tolist(), strict=True):
        part = logits[row, BLOCK * block : BLOCK * (block + 1)]
        target[: len(part)] = part
    return blocks


def scattered(past: NDArray[Any], new: NDArray[Any], slots: NDArray[np.int64]) -> None:
    """Write `new` [tensors, rows, heads, line] into the `slots` [rows] of `past` [tensors, rows, heads, capacity,
    line], where they are not negative.
    """
    rows = np.flatnonzero(slots >= 0)
    past[:, rows, :, slots[rows]] = new[:, rows].swapaxes(0, 1)


#: The example: rows; a vocabulary of several tiles, whose last block is broken; heads and bytes of a line, which are
#: several programs of `scatter`, the last one broken.
_ROWS = 3
_VOCABULARY = TILE * BLOCK * 2 + BLOCK + 5
_HEADS = 2
_LINE = 520
_CAPACITY = 8
#: Slots that a captured `scatter` writes at first, and when it is repeated.
_SLOTS = ((5, -1, 0), (-1, 2, 7))


def _try(kernels: DeviceKernels) -> None:
    """Raise KernelError where a kernel gives something else than NumPy does."""
    _try_scatter(kernels)
    for name in SUMMARIZE:
        _try_logits(kernels, np.dtype(name))


def _try_scatter(kernels: DeviceKernels) -> None:
    """Run `scatter` as it is, and as a decode step repeats it: captured, with other slots."""
    device = kernels.device
    layout = CacheLayout(("key", "value"), ((_HEADS, _LINE),) * 2, (np.dtype(np.uint8),) * 2)
    cache = DeviceCache(device, layout, _ROWS, _CAPACITY)
    cache.resize(_CAPACITY)
    (group,) = cache.groups
    values = np.random.default_rng(0).integers(1, 255, (2, _ROWS, _HEADS, _LINE), np.uint8)
    new = np.zeros((2, new_block(group, _ROWS, 1)), np.uint8)
    new[:, : values[0].size] = values.reshape(2, -1)
    expected = np.zeros((2, _ROWS, _HEADS, _CAPACITY, _LINE), np.uint8)
    try:
        with _Example(device) as example:
            new_at = example.put(new)
            slots_at = example.put(np.array(_SLOTS[0]))

            def work() -> None:
                kernels.scatter(cache, [new_at], _ROWS, slots_at)

            work()
            device.wait()
            launch = device.captured(work)
            for slots in _SLOTS:
                example.put(np.array(slots), slots_at)
                launch()
                scattered(expected, values, np.array(slots))
            past = example.read(cache.bases[0], expected)
    finally:
        cache.free()
        device.wait()  # so that the pool has it, before memory is counted
    if not np.array_equal(past, expected):
        raise KernelError("scatter gives something else than it should")


def _try_logits(kernels: DeviceKernels, dtype: np.dtype[Any]) -> None:
    """Summarize rows with a block that is forbidden, and with logits that are no numbers; gather whole and broken
    blocks.
    """
    values = np.random.default_rng(1).normal(0, 3, (_ROWS, _VOCABULARY)).astype(np.float32)
    values[0, BLOCK : 2 * BLOCK], values[1, 3], values[1, -1] = -np.inf, np.nan, np.inf
    logits = (values.view(np.uint32) >> 16).astype(dtype) if dtype == np.uint16 else values.astype(dtype)
    inverses = np.array([1.0, 2.0, 0.5], np.float32)
    pairs = np.array([[2, 0], [0, TILE], [1, 2 * TILE - 1], [_ROWS - 1, _VOCABULARY // BLOCK]], np.int32)
    expected = summarized(float_logits(logits.view(np.uint8), dtype), inverses)
    blocks = gathered_blocks(logits, pairs)
    with _Example(kernels.device) as example:
        at = example.put(logits)
        out = example.put(np.zeros_like(blocks))
        maxima, sums, places = (example.put(np.zeros_like(part)) for part in expected)
        summary = maxima, sums, places
        kernels.summarize(at, dtype, _ROWS, _VOCABULARY, example.put(inverses), summary)
        kernels.gather_blocks(at, dtype, _VOCABULARY, (len(pairs), example.put(pairs)), out)
        kernels.device.wait()
        made = Summary(*(example.read(address, part) for address, part in zip(summary, expected, strict=True)))
        copied = example.read(out, blocks)
    numbers = ~np.isnan(expected.sums)
    if not (
        np.array_equal(made.maxima[numbers], expected.maxima[numbers])
        and np.allclose(made.sums, expected.sums, rtol=SLACK, atol=0.0, equal_nan=True)
        and np.array_equal(made.places[numbers], expected.places[numbers])
    ):
        raise KernelError(f"{SUMMARIZE[dtype.name]} gives something else than it should")
    if not np.array_equal(copied, blocks):
        raise KernelError("gather_blocks gives something else than it should")


class _Example:
    """Arrays on a device while the block runs."""

    def __init__(self, device: Device):
        self._device = device
        self._held: list[int] = []

    def __enter__(self) -> "_Example":
        return self

    def __exit__(self, *_: object) -> None:
        for address in self._held:
            self._device.free(address)
        self._device.wait()

    def put(self, array: NDArray[Any], address: int | None = None) -> int:
        """Copy an array to the device, where another one of its size is or to memory of its own; return its address."""
        if address is None:
            address = self._device.allocate(array.nbytes)
            self._held.append(address)
        host = self._device.host(array.nbytes)
        host[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self._device.upload(host, address)
        self._device.wait()  # the host's memory goes with this call
        return address

    def read(self, address: int, like: NDArray[Any]) -> NDArray[Any]:
        """Copy from the device an array of the shape and type of another one."""
        host = self._device.host(like.nbytes)
        self._device.download(address, host)
        self._device.wait()
        return host.view(like.dtype).reshape(like.shape)
