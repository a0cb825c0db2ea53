"""What is a device's own: one launch for each number of rows, one wait a token, copies by position, addresses. Run in
host memory that is as late and as dirty as a GPU's may be; that it answers as host memory does is in
test_host_batch.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.serve.loop.cache import CacheLayout
from fp8q.serve.loop.cuda import CudaDevice, CudaError, Memcpy3D, memcpy_3d
from fp8q.serve.loop.device import ALIGNMENT, CacheGroup, Copy, bucket_of, groups_of, new_block, runs, slot_step
from fp8q.serve.loop.device_batch import DeviceBatch, float_logits
from fp8q.serve.loop.engine_session import Bounds, bounds_of
from fp8q.serve.loop.generate import Generator, complete
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sessions import Pace
from fp8q.serve.loop.text import Vocabulary

if TYPE_CHECKING:
    from tests.serve.conftest import CountingModel

OnDevice = Callable[..., tuple[DeviceBatch, Any, Any]]


def filled(on_device: OnDevice, counting: CountingModel, lengths: Sequence[int]) -> tuple[DeviceBatch, Any, Any]:
    """A batch whose rows hold so many positions each."""
    batch, device, program = on_device(counting, 6)
    batch.reserve(64, 192, 0)
    tokens = np.ones((len(lengths), max(lengths)), np.int64)
    batch.prefill(0, tokens, np.zeros(len(lengths), np.int64), np.array(lengths))
    program.bound.clear()
    return batch, device, program


def decode(batch: DeviceBatch, positions: Sequence[int]) -> None:
    batch.decode(np.ones(len(positions), np.int64), np.array(positions))


def test_a_step_is_captured_once_for_each_bucket_and_capacity(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, program = filled(on_device, counting, [2, 2, 3, 5, 5])
    for positions in ([2, 2, 3, 5, 5], [3, 3, 4], [4, 4, 5], [5, 5, 6, 6], [6], [7]):
        decode(batch, positions)
    assert [(phase, shapes["input_ids"], shapes["attention_mask"]) for phase, shapes in program.bound] == [
        ("decode", (6, 1), (6, 65)),  # five rows: the next power of two is beyond the six that there are
        ("decode", (4, 1), (4, 65)),  # three, three, four
        ("decode", (1, 1), (1, 65)),
    ]
    batch.reserve(65, 192, 5)
    decode(batch, [8])
    assert device.captures == 4
    assert program.bound[-1][1]["past_key_values.0.key"] == (1, 2, 128, 4)


def test_the_host_waits_once_a_token(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, _ = filled(on_device, counting, [2, 2, 3])
    decode(batch, [2, 2, 3])
    before = device.waits
    decode(batch, [3, 3, 4])
    assert device.waits == before + 1


def test_rows_at_one_position_are_stored_by_one_copy(
    counting: CountingModel, on_device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, device, program = filled(on_device, counting, [2, 2, 3])
    copies: list[Copy] = []
    done = device.copy

    def seen(copy: Copy) -> None:
        copies.append(copy)
        done(copy)

    monkeypatch.setattr(device, "copy", seen)
    decode(batch, [2, 2, 3])
    alike = len(groups_of(program.layout))  # keys and values, or each by itself where they differ in width
    assert [copy.lines for copy in copies] == [2 * 2] * alike + [2] * alike  # two heads


def test_all_memory_is_given_back(counting: CountingModel, on_device: OnDevice) -> None:
    batch, device, _ = filled(on_device, counting, [2, 2, 3])
    decode(batch, [2, 2, 3])
    batch.reserve(100, 192, 3)
    decode(batch, [3, 3, 4])
    batch.clear()
    device.wait()
    assert device.memory == {}


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


def test_a_step_and_a_prompt_take_the_profiles_made_for_them() -> None:
    both = bounds_of([(4, 512), (8, 1)], [2048, 4096])
    assert both == Bounds({"decode": 1, "prefill": 0}, rows=4, capacity=2048, chunk=512)
    assert bounds_of([(2, 64)], [128]) == Bounds({"decode": 0, "prefill": 0}, rows=2, capacity=128, chunk=64)


def test_the_runtime_has_what_is_called() -> None:
    library = import_module("tensorrt_rtx")
    used = {
        "Runtime": ["deserialize_cuda_engine"],
        "ICudaEngine": [
            "create_execution_context", "create_runtime_config", "get_tensor_dtype", "get_tensor_name",
            "get_tensor_profile_shape", "get_tensor_shape", "num_io_tensors", "num_optimization_profiles",
        ],
        "IExecutionContext": [
            "execute_async_v3", "set_input_shape", "set_optimization_profile_async", "set_tensor_address",
        ],
        "IRuntimeConfig": ["cuda_graph_strategy"],
        "CudaGraphStrategy": ["WHOLE_GRAPH_CAPTURE"],
        "DataType": ["FLOAT", "HALF", "BF16", "FP8"],
    }  # fmt: skip
    absent = [
        f"{kind}.{name}" for kind, names in used.items() for name in names if not hasattr(getattr(library, kind), name)
    ]
    assert absent == []


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CudaError) as raised:
        CudaDevice()
    assert str(raised.value) == "there is no NVIDIA driver here (libcuda.so.1: cannot open shared object file)"
