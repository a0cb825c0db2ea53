"""What is a device's own: one launch for each number of rows, one wait a token, copies by position, addresses. Run in
host memory that is as late and as dirty as a GPU's may be; that it answers as host memory does is in
test_host_batch.py.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.serve.loop.cache import CacheLayout
from fp8q.serve.loop.cuda import CudaDevice, CudaError, Memcpy3D, memcpy_3d
from fp8q.serve.loop.device import (
    ALIGNMENT,
    FINE,
    CacheGroup,
    CaptureError,
    Copy,
    DeviceCache,
    bucket_of,
    cache_bytes,
    groups_of,
    moves,
    new_block,
    padded_length,
    runs,
    slot_step,
)
from fp8q.serve.loop.device_batch import ALIKE, CHECKED, PATIENCE, DeviceBatch, same_logits
from fp8q.serve.loop.device_calls import float_logits
from fp8q.serve.loop.generate import Generator, complete
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sampling import best_tokens
from fp8q.serve.loop.sessions import Pace
from fp8q.serve.loop.text import Vocabulary
from tests.serve.host_engine import HostDevice, at

if TYPE_CHECKING:
    from tests.serve.counting_model import CountingModel

#: The warning when capturing ends, around its reason.
NOT_CAPTURED = "a decode step is not captured ({}); the engine runs without CUDA graphs, which is slower"
#: The warning when kernels are not used, around its reason.
NO_KERNELS = "the kernels that choose tokens on the GPU are not used ({}); all logits go to the host, which is slower"
OnDevice = Callable[..., tuple[DeviceBatch, Any, Any]]


def filled(on_device: OnDevice, counting: CountingModel, lengths: Sequence[int]) -> tuple[DeviceBatch, Any, Any]:
    """A batch whose rows hold so many positions each."""
    batch, device, program = on_device(counting, 6)
    batch.reserve(64, 192, 0)
    tokens = np.ones((len(lengths), max(lengths)), np.int64)
    batch.prefill(0, tokens, np.zeros(len(lengths), np.int64), np.array(lengths))
    program.bound.clear()
    return batch, device, program


def decode(batch: DeviceBatch, positions: Sequence[int]) -> list[int]:
    """Read the token 1 in each row; return the best tokens."""
    logits = batch.decode(np.ones(len(positions), np.int64), np.array(positions))
    found: list[int] = best_tokens(logits, len(positions)).tolist()
    return found


def test_a_step_is_captured_once_for_each_bucket_and_capacity(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, program = filled(on_device, counting, [2, 2, 3, 5, 5])
    for positions in ([2, 2, 3, 5, 5], [3, 3, 4], [4, 4, 5], [5, 5, 6, 6], [6], [7], [8]):
        decode(batch, positions)
    assert [(phase, shapes["input_ids"], shapes["attention_mask"]) for phase, shapes in program.bound] == [
        ("decode", (6, 1), (6, 65)),  # five rows: the next power of two is beyond the six that there are
        ("decode", (4, 1), (4, 65)),  # three, three, four
        ("decode", (1, 1), (1, 65)),
    ]
    batch.reserve(65, 192, 5)
    decode(batch, [9])
    assert device.captures == len(program.bound) == 4
    assert program.bound[-1][1]["past_key_values.0.key"] == (1, 2, 128, 4)
    # contexts outlast the capacity: one for prompts, one for each number of rows
    assert program.made == ["prefill", "decode", "decode", "decode"]
    assert len(device.graphs) == 1  # those of the smaller cache went with it


def test_the_host_waits_once_a_token(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, _ = filled(on_device, counting, [2, 2, 3])
    waits = [device.waits]
    for step in range(4):
        decode(batch, [2 + step, 2 + step, 3 + step])
        waits.append(device.waits)
    # the first steps are run captured and uncaptured, and what they give is compared
    assert np.diff(waits).tolist() == [3] * CHECKED + [1, 1]


@pytest.mark.parametrize("positions", [[2, 2, 3], [4, 2, 3]])
def test_a_step_stores_its_keys_and_values_by_one_kernel_in_the_launch(
    counting: CountingModel, on_device: OnDevice, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each group of tensors: keys and values, or each by itself where they differ in width."""
    batch, device, program = filled(on_device, counting, positions)
    monkeypatch.setattr(device, "copy", None)
    assert device.captures == 0
    launched = list(device.launched)
    decode(batch, positions)
    groups = len(groups_of(program.layout))
    # run, captured and run again; then the logits are summarized
    assert device.launched[len(launched) :] == ["scatter"] * 2 * groups + ["summarize_fp32"]
    decode(batch, [position + 1 for position in positions])
    decode(batch, [position + 2 for position in positions])
    assert device.launched[-1] == "summarize_fp32"
    assert device.launched.count("scatter") - launched.count("scatter") == 3 * groups  # one more captured, and compared


def test_without_kernels_rows_at_one_position_are_stored_by_one_copy_and_all_logits_are_read(
    counting: CountingModel, on_device: OnDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(device: HostDevice, image: bytes, names: Sequence[str]) -> None:
        raise CudaError(
            "cuModuleLoadData failed with 222 (the provided PTX was compiled with an unsupported toolchain)"
        )

    monkeypatch.setattr(HostDevice, "load", refused)
    batch, device, program = filled(on_device, counting, [2, 2, 3])
    assert caplog.messages == [
        NO_KERNELS.format(
            "cuModuleLoadData failed with 222 (the provided PTX was compiled with an unsupported toolchain)"
        )
    ]
    copies: list[Copy] = []
    done = device.copy

    def seen(copy: Copy) -> None:
        copies.append(copy)
        done(copy)

    monkeypatch.setattr(device, "copy", seen)
    # 1·1 + 1·2 + 1·3 = 6, and 10 in the last row
    assert decode(batch, [2, 2, 3]) == [6, 6, 7]
    alike = len(groups_of(program.layout))  # keys and values, or each by itself where they differ in width
    assert [copy.lines for copy in copies] == [2 * 2] * alike + [2] * alike  # two heads
    read = device.downloaded
    assert decode(batch, [3, 3, 4]) == [7, 7, 9]
    assert device.downloaded - read == (4 + 4 + 3) * 16 * 4  # two comparisons of four rows, and the three rows


def test_all_memory_is_given_back(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, _ = filled(on_device, counting, [2, 2, 3])
    decode(batch, [2, 2, 3])
    batch.reserve(100, 192, 3)
    decode(batch, [3, 3, 4])
    step = next(iter(batch._steps.values()))
    pinned = weakref.ref(step.room.host)
    del step
    batch.clear()
    device.wait()
    assert device.memory == {}
    assert pinned() is None, "the host's page-locked memory went too"


def test_nothing_is_made_again_after_a_pause(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, program = filled(on_device, counting, [2, 2, 3])
    decode(batch, [2, 2, 3])
    batch.idle()
    assert (program.idles, batch.capacity) == (1, 64)
    batch.reserve(64, 192, 0)
    batch.prefill(0, np.ones((3, 2), np.int64), np.zeros(3, np.int64), np.full(3, 2))
    decode(batch, [2, 2, 2])
    assert (device.captures, program.made) == (1, ["prefill", "decode"])


def test_a_far_too_large_cache_is_given_up_after_a_while(counting: CountingModel, on_device: OnDevice) -> None:
    batch, _, _ = on_device(counting, 1, 2000)
    batch.reserve(320, 320, 0)
    for _ in range(PATIENCE - 1):
        batch.reserve(1, 64, 1)
    batch.reserve(1, 80, 1)  # a longer request begins the count again: 320 is no more than 4 times 128
    for _ in range(PATIENCE - 1):
        batch.reserve(1, 64, 1)
    assert batch.capacity == 320
    batch.reserve(1, 64, 1)
    assert batch.capacity == 64


def test_a_chunk_of_a_prompt_downloads_its_rows_last_logits(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, _ = on_device(counting, 4, 2000)
    batch.reserve(1024, 1024, 0)
    device.downloaded = 0
    batch.prefill(0, np.ones((1, 1024), np.int64), np.zeros(1, np.int64), np.array([1024]))
    assert device.downloaded == 16 * 4  # a vocabulary of 16, in FP32
    batch.prefill(1, np.ones((3, 5), np.int64), np.zeros(3, np.int64), np.array([5, 4, 2]))
    assert device.downloaded == 4 * 16 * 4


def test_chunks_of_prompts_share_memory(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, _ = filled(on_device, counting, [9])
    held = set(device.memory)
    for size in (9, 3, 8):
        batch.prefill(0, np.ones((1, size), np.int64), np.zeros(1, np.int64), np.array([size]))
    assert set(device.memory) == held
    batch.prefill(0, np.ones((1, 60), np.int64), np.zeros(1, np.int64), np.array([60]))
    assert len(set(device.memory)) == len(held)  # a larger block came for the smaller one


def test_prompts_of_any_length_run_with_few(counting: CountingModel, on_device: OnDevice) -> None:
    """An engine of TensorRT-RTX compiles for each length, and holds no longer ones than its profile's."""
    batch, _, program = on_device(counting, 4, 1000)
    plain, _, _ = on_device(counting, 4, 1000)
    batch.take(600)
    for one in (batch, plain):
        one.reserve(1000, 1000, 0)
    for length in (1, 2, 3, 5, 8, 9, 100, 128, 129, 300, 384, 500, 512, 513, 600):
        tokens = np.random.default_rng(length).integers(0, 16, (1, length))
        padded, read = (one.prefill(0, tokens, np.zeros(1, np.int64), np.array([length])) for one in (batch, plain))
        np.testing.assert_array_equal(padded, read)
        padded, read = (one.prefill_all(tokens, np.zeros(1, np.int64)) for one in (batch, plain))
        np.testing.assert_array_equal(padded, read)
    lengths = {shapes["input_ids"][1] for phase, shapes in program.bound if phase == "prefill"}
    assert lengths == {2, 4, 8, 16, 128, 256, 384, 512, 600}
    batch.prefill(0, np.ones((2, 299), np.int64), np.zeros(2, np.int64), np.array([299, 7]))
    assert program.bound[-1][1]["input_ids"] == (2, 300)  # of two rows, the longest of 600 positions


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_padded_length_holds_the_chunk_and_exceeds_its_room_no_more_than_that(positions: int, most: int) -> None:
    length = padded_length(positions, most)
    assert positions <= length <= max(most, positions)
    assert length < 2 * positions
    assert length - positions < FINE
    assert padded_length(length, most) == length


class OnDeviceSession:
    """The counting model as a session whose batches lie on a device."""

    pace, vocabulary = Pace(chunk=8, share=8), 16
    most_rows: int | None = 4
    most_positions: int | None = 192

    def __init__(self, open_batch: Callable[[int], DeviceBatch]):
        self._open = open_batch

    def open_batch(self, rows: int, positions: int) -> DeviceBatch:
        return self._open(rows)


def test_the_loop_answers_as_the_model_does(counting: CountingModel, on_device: OnDevice) -> None:
    session = OnDeviceSession(lambda rows: on_device(counting, rows)[0])
    prompts = ["t3 t1 t4", "t9", "t2 t6 t5 t3 t5 t8 t9 t7 t9 t3 t2", "t1 t1", "t8 t4", "t6 t2 t6 t4", "t3"]
    generator = Generator(session, Vocabulary.read(counting.directory))
    answers = complete(generator, [Request(prompt, 20 + number) for number, prompt in enumerate(prompts)])
    assert [list(answer.tokens) for answer in answers] == [
        counting.answer(prompt, 20 + number) for number, prompt in enumerate(prompts)
    ]


def test_a_thousand_requests_make_a_context_for_each_bucket(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, program = on_device(counting, 4)
    generator = Generator(OnDeviceSession(lambda rows: batch), Vocabulary.read(counting.directory))
    most_contexts = most_graphs = 0
    for number in range(1000):
        together = 2 if number % 10 == 0 else 1
        for piece in generator.run([Request("t3 t1 t4", 4, ignore_end=True)] * together):
            assert piece.error is None
            most_contexts = max(most_contexts, len(program.contexts))
            most_graphs = max(most_graphs, len(device.graphs))
    # steps of one row and of two; prompts have a context and no graph
    assert program.made == ["prefill", "decode", "decode"]
    assert (most_contexts, most_graphs, device.captures) == (3, 2, 2)


def test_what_is_forgotten_is_freed_at_once(counting: CountingModel, on_device: OnDevice) -> None:
    gc.disable()  # nothing may need it
    try:
        batch, device, program = filled(on_device, counting, [2, 2, 3])
        for capacity in (64, 100, 180):
            batch.reserve(capacity, 192, 3)
            decode(batch, [2, 2, 3])
            assert (len(device.graphs), len(program.contexts)) == (1, 2)
        batch.clear()
        assert (len(device.graphs), len(program.contexts)) == (0, 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong_from", [1, 2])
def test_a_captured_step_that_answers_otherwise_ends_capturing(
    counting: CountingModel,
    on_device: OnDevice,
    wrong_from: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch, device, program = filled(on_device, counting, [3])
    captured, launches = device.captured, count(1)

    def miscaptured(work: Callable[[], None]) -> Callable[[], None]:
        launch = captured(work)

        def again() -> None:
            launch()  # the engine's last word before the download is another from a certain call on
            if next(launches) >= wrong_from:
                device.queue.insert(-1, lambda: at(program.logits_at, np.float32, 16).fill(0))

        return again

    monkeypatch.setattr(device, "captured", miscaptured)
    ids = [1, 1, 1]
    for _ in range(5):
        token = counting.next_token(ids)
        ids.append(token)
        (best,) = best_tokens(batch.decode(np.array([token]), np.array([len(ids) - 1])), 1)
        assert best == counting.next_token(ids)
    assert device.captures == 1
    assert next(launches) == wrong_from + 1  # it was not launched again
    assert caplog.messages == [NOT_CAPTURED.format("its logits are others than the engine gives uncaptured")]


def test_a_capture_that_fails_costs_no_answer(
    counting: CountingModel, on_device: OnDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch, device, _ = filled(on_device, counting, [3])

    def refused(work: Callable[[], None]) -> Callable[[], None]:
        raise CaptureError("cuStreamEndCapture failed with 901")

    monkeypatch.setattr(device, "captured", refused)
    # 1·1 + 1·2 + 1·3 = 6, and 5·1 = 11
    assert best_tokens(batch.decode(np.array([5]), np.array([3])), 1).tolist() == [11]
    assert caplog.messages == [NOT_CAPTURED.format("cuStreamEndCapture failed with 901")]


def test_an_engine_with_branches_is_not_captured(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, program = on_device(counting, 4, captures=False)
    generator = Generator(OnDeviceSession(lambda rows: batch), Vocabulary.read(counting.directory))
    answers = complete(generator, [Request("t3 t1 t4", 20), Request("t9", 20)])
    assert [list(answer.tokens) for answer in answers] == [counting.answer("t3 t1 t4", 20), counting.answer("t9", 20)]
    assert (device.captures, program.made) == (0, ["prefill", "decode"])


def test_logits_are_alike_up_to_the_order_of_sums() -> None:
    expected = np.array([[64.0, -1.0, 0.5, -np.inf, np.nan]], np.float32)
    for difference, found in ((0.0, True), (64 * ALIKE, True), (64 * ALIKE * 1.01, False), (np.nan, False)):
        assert same_logits(expected, expected + np.array([difference, 0, 0, 0, 0], np.float32)) is found


def test_rows_run_in_powers_of_two() -> None:
    assert [bucket_of(count, 6) for count in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert [bucket_of(count, 8) for count in (5, 8)] == [8, 8]


@given(st.lists(st.integers(0, 3), max_size=12))
def test_runs_are_neighbours_of_one_value(values: list[int]) -> None:
    found = list(runs(values))
    assert [value for _, count, value in found for _ in range(count)] == values
    assert [first for first, _, _ in found] == [sum(count for _, count, _ in found[:n]) for n in range(len(found))]
    assert all(one[2] != other[2] for one, other in pairwise(found))


layouts = st.tuples(st.integers(1, 40), st.integers(1, 256), st.sampled_from([np.uint8, np.uint16, np.float32]))


@given(st.lists(layouts, min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 300))
def test_every_row_and_every_tensor_begins_where_the_engine_takes_it(
    tensors: list[tuple[int, int, Any]], rows: int, seq: int
) -> None:
    layout = CacheLayout(
        tuple(map(str, range(len(tensors)))),
        tuple((heads, size) for heads, size, _ in tensors),
        tuple(np.dtype(dtype) for _, _, dtype in tensors),
    )
    step = slot_step(layout)
    assert step <= ALIGNMENT
    groups = groups_of(layout)
    assert sorted(number for group in groups for number in group.tensors) == list(range(len(tensors)))
    for group in groups:
        assert group.heads * step * group.size % ALIGNMENT == 0
        block = new_block(group, rows, seq)
        assert block >= rows * group.heads * seq * group.size
        assert block % ALIGNMENT == block % (seq * group.size) == 0


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 40))
def test_lines_are_moved_where_they_are(count: int, before: int, after: int) -> None:
    """No copy overlaps itself, and what is moved is what lay there."""
    memory = np.full(count * max(before, after), -1)
    memory[: count * before] = np.arange(count * before)
    for first, lines, begin, width in moves(count, before, after):
        assert 0 <= begin < begin + width <= min(before, after)
        at_source, at_target = (
            (first + np.arange(lines))[:, None] * line + begin + np.arange(width) for line in (before, after)
        )
        assert not np.intersect1d(at_source, at_target).size
        memory[at_target] = memory[at_source].copy()
    width = min(before, after)
    found = memory[(np.arange(count) * after)[:, None] + np.arange(width)]
    np.testing.assert_array_equal(found, (np.arange(count) * before)[:, None] + np.arange(width))


def test_twice_the_capacity_takes_a_copy_for_each_halving_of_the_lines() -> None:
    assert list(moves(8, 4, 8)) == [(4, 4, 0, 4), (2, 2, 0, 4), (1, 1, 0, 4)]
    assert list(moves(8, 8, 4)) == [(1, 1, 0, 4), (2, 2, 0, 4), (4, 4, 0, 4)]
    assert list(moves(3, 2, 3)) == [(2, 1, 0, 2), (1, 1, 1, 1), (1, 1, 0, 1)]  # the second by 1, less than its length
    assert list(moves(9, 4, 4)) == []


@pytest.mark.parametrize("capacities", [(1, 3, 5), (5, 2, 4), (4, 4), (2, 8, 3, 7)])
def test_a_resized_cache_has_what_it_held_and_zeros_behind(capacities: Sequence[int], host_device: Any) -> None:
    """Two tensors alike and one of another size, three rows; each new slot is written before the next resize."""
    layout = CacheLayout(("0.key", "0.value", "1.key"), ((2, 64), (2, 64), (1, 32)), (np.dtype(np.uint8),) * 3)
    device = host_device()
    cache = DeviceCache(device, layout, 3, 8)
    taken = set(device.memory)
    expected = [np.zeros((3, heads, 0, size), np.uint8) for heads, size in layout.shapes]
    for number, capacity in enumerate(capacities):
        cache.resize(capacity)
        device.wait()
        for index, (heads, size) in enumerate(layout.shapes):
            there = at(cache.addresses(0)[index], np.uint8, 3, heads, capacity, size)
            held = min(capacity, expected[index].shape[2])
            np.testing.assert_array_equal(there[:, :, :held], expected[index][:, :, :held])
            assert not there[:, :, held:].any()
            there[:] = np.random.default_rng(10 * number + index).integers(1, 255, there.shape, np.uint8)
            expected[index] = there.copy()
    assert set(device.memory) == taken
    assert sum(size for _, size in device.memory.values()) == cache_bytes(layout, 3, 8) == 3 * 8 * (2 * 128 + 32)


def test_a_block_of_new_values_is_worked_out_by_hand() -> None:
    # two heads of 96 bytes: 192 bytes a position of a row; lines of 96 and multiples of 256 meet at 768
    assert new_block(CacheGroup((0, 1), 2, 96), rows=1, seq=1) == 768
    assert new_block(CacheGroup((0, 1), 2, 96), rows=5, seq=1) == 1536
    assert slot_step(CacheLayout(("0.key",), ((2, 96),), (np.dtype(np.uint8),))) == 4  # 4 · 192 = 3 · 256


def test_logits_in_bf16_are_widened_exactly() -> None:
    values = np.array([[1.0, -2.5, 3.0e38]], np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    expected = (raw.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(float_logits(raw.view(np.uint8), np.dtype(np.uint16)), expected)
    assert expected[0, :2].tolist() == [1.0, -2.5]
    np.testing.assert_array_equal(
        float_logits(values[:, :2].astype(np.float16).view(np.uint8), np.dtype(np.float16)), values[:, :2]
    )


def test_a_copy_is_told_to_the_driver_in_lines() -> None:
    told = memcpy_3d(Copy(1000, 2000, 64, 6, 3, 64, 640, 4096, 40960))
    assert ctypes.sizeof(Memcpy3D) == 200  # CUDA_MEMCPY3D_v2 on 64 bits
    assert (told.srcMemoryType, told.srcDevice, told.srcPitch, told.srcHeight) == (2, 1000, 64, 10)
    assert (told.dstMemoryType, told.dstDevice, told.dstPitch, told.dstHeight) == (2, 2000, 4096, 10)
    assert (told.WidthInBytes, told.Height, told.Depth) == (64, 6, 3)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CudaError) as raised:
        CudaDevice()
    assert str(raised.value) == "there is no NVIDIA driver here (libcuda.so.1: cannot open shared object file)"
