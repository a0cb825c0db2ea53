"""The kernels of `serve/loop/kernels.ptx` on memory of the host, by NumPy: a stand-in for a GPU runs them. That they do
what the kernels do is in tests/serve/test_kernels.py.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fp8q.serve.loop.device_calls import float_logits
from fp8q.serve.loop.device_kernels import SUMMARIZE, THREADS, TILE, WORDS, count_blocks, scattered, summarized

#: Types of PTX's parameters -> those of ctypes.
KINDS = {"u64": ctypes.c_uint64, "u32": ctypes.c_int32}
Inside = Callable[[int, int], bool]


def entries(image: bytes) -> dict[str, list[Any]]:
    """The kernels of a PTX module, and the types of their parameters; all of them run with `THREADS` threads."""
    text, found = image.decode(), {}
    for name, parameters, threads in re.findall(r"\.visible \.entry (\w+)\((.*?)\)\n\.reqntid (\d+)", text, re.DOTALL):
        assert int(threads) == THREADS
        found[name] = [KINDS[kind] for kind in re.findall(r"\.param \.(\w+) ", parameters)]
    return found


def run_kernel(name: str, grid: tuple[int, int], arguments: Sequence[int], inside: Inside) -> None:
    """Run a kernel on memory that has to be `inside` of what was allocated. The last two arguments are Triton's own."""
    *arguments, scratch, profile = arguments
    assert (scratch, profile) == (0, 0)

    def at(address: int, dtype: Any, *shape: int) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert inside(address, size), "what lies outside was not allocated"
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)

    if name == "scatter":
        _scatter(grid, arguments, at)
    elif name == "gather_blocks":
        logits_at, pairs_at, out_at, row, block = arguments
        pairs = at(pairs_at, np.int32, grid[0], 2)
        logits = at(logits_at, np.uint16, int(pairs[:, 0].max()) + 1, row)
        out = at(out_at, np.uint16, grid[0], block)
        for place, (number, first) in zip(out, pairs.tolist(), strict=True):
            part = logits[number, first * block : (first + 1) * block]
            place[: len(part)] = part
    else:
        (dtype,) = [np.dtype(kind) for kind, kernel in SUMMARIZE.items() if kernel == name]
        logits_at, inverses_at, *places, vocabulary, blocks = arguments
        assert (grid[0], blocks) == (-(-blocks // TILE), count_blocks(vocabulary))
        logits = at(logits_at, np.uint8, grid[1], vocabulary * dtype.itemsize)
        summary = summarized(float_logits(logits, dtype), at(inverses_at, np.float32, grid[1]))
        for address, values in zip(places, summary, strict=True):
            at(address, values.dtype, *values.shape)[:] = values


def _scatter(grid: tuple[int, int], arguments: Sequence[int], at: Callable[..., np.ndarray]) -> None:
    new_at, past_at, slots_at, words, row, line, past_line, new_tensor, past_tensor = arguments
    assert grid[0] == -(-words // WORDS)
    rows, heads, tensors, capacity = words // row, row // line, grid[1], past_line // line
    new = at(new_at, np.int32, (tensors - 1) * new_tensor + words)
    past = at(past_at, np.int32, tensors * past_tensor)
    for tensor in range(tensors):
        values = new[tensor * new_tensor :][:words].reshape(1, rows, heads, line)
        cache = past[tensor * past_tensor :][: rows * heads * past_line].reshape(1, rows, heads, capacity, line)
        scattered(cache, values, at(slots_at, np.int64, rows))
