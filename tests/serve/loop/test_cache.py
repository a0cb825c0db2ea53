import tracemalloc

import numpy as np
import pytest

from fp8q.serve.loop.cache import CacheLayout, HostCache

LAYOUT = CacheLayout(("0.key", "0.value"), ((2, 3), (1, 4)), (np.dtype(np.uint8), np.dtype(np.float32)))


def step(rows: int, seq: int) -> list[np.ndarray]:
    """New keys and values whose every number tells row, head, position and channel apart."""
    return [
        np.arange(rows * heads * seq * size, dtype=np.uint8).reshape(rows, heads, seq, size)
        for heads, size in LAYOUT.shapes
    ]


def test_what_is_written_lies_in_the_slots_of_its_positions_and_everything_else_is_zero() -> None:
    cache = HostCache(LAYOUT, rows=4, capacity=8)
    new = step(rows=2, seq=1)
    cache.write(1, np.array([[5], [2]]), new)
    for buffer, values in zip(cache.past(0, 4), new, strict=True):
        expected = np.zeros_like(buffer)
        expected[1, :, 5] = values[0, :, 0]
        expected[2, :, 2] = values[1, :, 0]
        np.testing.assert_array_equal(buffer, expected)


def test_a_prompt_is_written_in_the_order_of_its_positions() -> None:
    cache = HostCache(LAYOUT, rows=1, capacity=4)
    new = step(rows=1, seq=3)
    cache.write(0, np.array([[0, 1, 2]]), new)
    for buffer, values in zip(cache.past(0, 1), new, strict=True):
        np.testing.assert_array_equal(buffer[:, :, :3], values)
        assert not buffer[:, :, 3].any()


def test_the_past_of_neighbouring_rows_is_the_buffer_itself() -> None:
    cache = HostCache(LAYOUT, rows=4, capacity=8)
    for whole, part in zip(cache.past(0, 4), cache.past(1, 2), strict=True):
        assert part.shape == (2, *whole.shape[1:])
        assert part.flags.c_contiguous
        assert part.ctypes.data == whole[1:].ctypes.data


@pytest.mark.parametrize("count", [1, 2])
def test_growing_keeps_the_rows_in_use(count: int) -> None:
    cache = HostCache(LAYOUT, rows=3, capacity=2)
    new = step(rows=2, seq=2)
    cache.write(0, np.array([[0, 1], [0, 1]]), new)
    cache.resize(5, count)
    assert cache.capacity == 5
    for buffer, values in zip(cache.past(0, 3), new, strict=True):
        assert buffer.shape[2] == 5
        np.testing.assert_array_equal(buffer[:count, :, :2], values[:count])
        assert not buffer[count:].any()
        assert not buffer[:, :, 2:].any()


def test_growing_holds_one_tensor_twice_and_not_the_cache() -> None:
    """Eight tensors of 1 MB become eight of 2 MB: 16 MB, and beside them one that is copied from."""
    megabyte, tensors = 1 << 20, 8
    layout = CacheLayout(tuple(map(str, range(tensors))), ((1, megabyte),) * tensors, (np.dtype(np.uint8),) * tensors)
    tracemalloc.start()
    try:
        cache = HostCache(layout, rows=1, capacity=1)
        cache.resize(2, 1)
        assert tracemalloc.get_traced_memory()[1] < 18 * megabyte
    finally:
        tracemalloc.stop()


def test_a_smaller_cache_keeps_what_fits() -> None:
    cache = HostCache(LAYOUT, rows=2, capacity=4)
    new = step(rows=1, seq=3)
    cache.write(0, np.array([[0, 1, 2]]), new)
    cache.resize(2, 1)
    for buffer, values in zip(cache.past(0, 1), new, strict=True):
        np.testing.assert_array_equal(buffer, values[:, :, :2])


def test_moving_a_row_copies_its_filled_slots_and_wiping_one_leaves_zeros() -> None:
    cache = HostCache(LAYOUT, rows=3, capacity=3)
    cache.write(0, np.array([[0, 1, 2]] * 3), step(rows=3, seq=3))
    before = [buffer.copy() for buffer in cache.past(0, 3)]
    cache.move(2, 0, 2)
    cache.wipe(1)
    for buffer, values in zip(cache.past(0, 3), before, strict=True):
        np.testing.assert_array_equal(buffer[0, :, :2], values[2, :, :2])
        np.testing.assert_array_equal(buffer[0, :, 2], values[0, :, 2])
        np.testing.assert_array_equal(buffer[2], values[2])
        assert not buffer[1].any()
