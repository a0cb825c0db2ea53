"""An engine's session on a stand-in for driver and runtime: the calls of CUDA and TensorRT as they are made, and the
errors where they fail. That its batches answer as host memory does is in test_host_batch.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from loaded_runtimes import stacked

from fp8q.core.errors import BackendError
from fp8q.serve.loop.cuda import CudaDevice, CudaError, CudaFaultError, DeviceMemoryError
from fp8q.serve.loop.engine_session import RUNTIMES, EngineRuntime, EngineSession
from fp8q.serve.loop.generate import Generator, complete
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sessions import SessionError
from fp8q.serve.loop.text import Vocabulary
from fp8q.validate.accuracy.session_logits import engine_logits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import OpenEngine
    from tests.serve.counting_model import CountingModel
    from tests.stand_in.runtime import Machine

each_runtime = pytest.mark.parametrize("runtime", RUNTIMES)


def logits_at_once(counting: CountingModel, ids: np.ndarray) -> np.ndarray:
    """The logits of windows, each read in one call of the graph."""
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    found: np.ndarray = counting.session().forward(ids, np.ones_like(ids), positions)[0]
    return found


def held_beside_contexts(gpu: Machine, session: EngineSession) -> set[int]:
    """The addresses that are allocated when all is done, but for the memory that the session's contexts share."""
    gpu.driver.cuStreamSynchronize(0)
    return gpu.driver.held.keys() - {address for address, _ in session._memory._blocks}


@each_runtime
def test_an_engine_answers_as_the_model_does(
    counting: CountingModel, open_engine: OpenEngine, gpu: Machine, runtime: EngineRuntime
) -> None:
    prompts = ["t3 t1 t4", "t9", "t2 t6 t5 t3 t5 t8 t9 t7 t9 t3 t2", "t1 t1", "t8 t4"]
    generator = Generator(open_engine(counting, runtime), Vocabulary.read(counting.directory))
    assert generator.max_batch == 4
    answers = complete(generator, [Request(prompt, 12) for prompt in prompts])
    assert [list(answer.tokens) for answer in answers] == [counting.answer(prompt, 12) for prompt in prompts]
    captured = gpu.driver.launches > 2 * len(gpu.driver.modules)  # those of the kernels' example
    assert captured == (runtime == "tensorrt"), "TensorRT-RTX captures graphs by itself"


@each_runtime
def test_kernels_are_loaded_once_for_all_batches(
    counting: CountingModel, open_engine: OpenEngine, gpu: Machine, runtime: EngineRuntime
) -> None:
    session = open_engine(counting, runtime)
    for _ in range(3):
        session.open_batch(2, 64).clear()
    assert len(gpu.driver.modules) == 1


def test_a_fault_of_the_gpu_is_an_error_of_its_own(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice()
    monkeypatch.setattr(gpu.driver, "cuStreamSynchronize", lambda stream: 700)
    with pytest.raises(CudaFaultError) as raised:
        device.wait()
    assert str(raised.value) == "cuStreamSynchronize failed with 700 (an illegal memory access was encountered)"


def test_a_thread_with_two_gpus_allocates_on_each(gpu: Machine) -> None:
    gpu.driver.gpus = 2
    devices = CudaDevice(0), CudaDevice(1)
    addresses = [device.allocate(256) for device in (*devices, devices[0])]
    assert [gpu.driver.gpu_of[address] for address in addresses] == [0, 1, 0]


@each_runtime
def test_windows_in_chunks_over_the_cache_have_the_logits_of_whole_ones(
    counting: CountingModel, open_engine: OpenEngine, gpu: Machine, runtime: EngineRuntime
) -> None:
    """Seven windows, in fours and with a chunk that the context is no multiple of."""
    session = open_engine(counting, runtime)
    session.pace = type(session.pace)(chunk=24, share=24)
    ids = np.random.default_rng(0).integers(0, 15, (7, 100))
    found = stacked(engine_logits(session)(ids))
    assert found.shape == (7, 100, 16)
    assert np.array_equal(found, logits_at_once(counting, ids))
    assert held_beside_contexts(gpu, session) == set()


@each_runtime
def test_windows_as_served_have_the_logits_of_whole_ones_behind_the_prompt(
    counting: CountingModel, open_engine: OpenEngine, gpu: Machine, runtime: EngineRuntime
) -> None:
    ids = np.random.default_rng(1).integers(0, 15, (6, 40))
    session = open_engine(counting, runtime)
    found = stacked(engine_logits(session, 30)(ids))
    assert np.array_equal(found, logits_at_once(counting, ids)[:, 29:39])
    assert held_beside_contexts(gpu, session) == set()


def test_windows_longer_than_the_slots_are_refused(counting: CountingModel, open_engine: OpenEngine) -> None:
    session = open_engine(counting, "tensorrt")
    with pytest.raises(BackendError) as refused:
        stacked(engine_logits(session)(np.zeros((1, 257), np.int64)))
    assert str(refused.value) == "a window of 257 tokens is longer than the engine's 256 slots; give --context 256"


@pytest.mark.parametrize(
    ("free", "fits"),
    [
        (24, "room for 2 of them; take --max-batch 2"),
        (4, "room for {0} positions of one; build an engine with --max-seq-len {0} or less"),
        (0, "room for no position of one; end what else runs there"),
    ],
)
def test_a_cache_that_the_gpu_has_no_room_for_is_refused_and_what_fits_is_said(
    counting: CountingModel, open_engine: OpenEngine, gpu: Machine, free: int, fits: str
) -> None:
    """`free` in units of 20 positions: eight sequences of 192 take 77 of them. Codes take them in whole steps."""
    position = {"off": 64, "v": 40, "fp8": 16}[counting.cache]
    session = open_engine(counting, "tensorrt")
    batch = session.open_batch(8, 192)
    batch.clear()
    calls = batch.call_bytes(session.pace.chunk)
    gpu.driver.cuStreamSynchronize(0)
    gpu.driver.total = gpu.driver.used() + calls + free * 20 * position
    with pytest.raises(SessionError) as refused:
        session.open_batch(8, 192)
    takes, works, has = (f"{size / 1e3:.3g} kB" for size in (8 * 192 * position, calls, calls + free * 20 * position))
    assert str(refused.value) == (
        f"a cache of 8 sequences of 192 positions takes {takes} and the engine {works} to work in, and this GPU has "
        f"{has} free, {fits.format(80 if counting.cache == 'off' else 64)}"
    )
    assert held_beside_contexts(gpu, session) == set()


def open_batch_in(total: int, session: EngineSession, gpu: Machine, rows: int, positions: int) -> bool:
    """Tell whether a GPU of so many bytes admits a batch."""
    gpu.driver.total = total
    try:
        session.open_batch(rows, positions).clear()
    except DeviceMemoryError:
        return False
    finally:
        gpu.driver.cuStreamSynchronize(0)
        gpu.driver.total = 1 << 30
    return True


@each_runtime
def test_what_is_admitted_can_grow_to_its_end(
    counting: CountingModel, open_engine: OpenEngine, gpu: Machine, runtime: EngineRuntime
) -> None:
    """On the smallest GPU that admits four rows, all four grow to the model's last position and go on answering.

    Their cache doubles from 64 slots, and prompts in several rows and in one are read meanwhile.
    """
    least, most = 0, 1 << 20
    while most - least > 1:
        middle = (least + most) // 2
        admitted = open_batch_in(middle, open_engine(counting, runtime), gpu, 4, counting.positions)
        least, most = (least, middle) if admitted else (middle, most)
    session = open_engine(counting, runtime)
    gpu.driver.cuStreamSynchronize(0)
    gpu.driver.total, gpu.driver.peak = most, 0
    generator = Generator(session, Vocabulary.read(counting.directory), 4)
    prompts = ["t3 t1 t4", "t9 t2", "t2 t6 t5 " * 40, "t1 t1 t1 t2", "t8 t4 " * 60, "t7"]
    answers = complete(generator, [Request(prompt.strip(), 200, ignore_end=True) for prompt in prompts])
    assert [answer.input_tokens + len(answer.tokens) for answer in answers] == [generator.positions] * len(prompts)
    assert generator.positions >= 192
    for prompt, answer in zip(prompts, answers, strict=True):
        ended = counting.answer(prompt.strip(), len(answer.tokens))  # up to the end that is ignored
        assert list(answer.tokens)[: len(ended)] == ended
    assert gpu.driver.peak <= most


def test_an_engine_that_the_runtime_does_not_load_is_named(gpu: Machine, tmp_path: Path) -> None:
    plan = tmp_path / "cut.plan"
    plan.write_bytes(b"ftrt, and cut off")
    with pytest.raises(SessionError) as refused:
        EngineSession(plan, "tensorrt")
    assert str(refused.value) == (
        f"{plan}: tensorrt 11.4.0.1 does not load it on this GPU; build it here with `fp8q build-engine`"
    )


def test_a_driver_on_which_the_runtime_does_not_start_is_named(gpu: Machine, tmp_path: Path) -> None:
    gpu.starts = False
    with pytest.raises(SessionError) as refused:
        EngineSession(tmp_path / "any.plan", "tensorrt")
    assert str(refused.value) == (
        "tensorrt 11.4.0.1 does not start on this machine's driver; update it (built for CUDA 13 it needs r580 or "
        "newer, for CUDA 12 r535)"
    )


def test_a_driver_without_a_function_is_too_old(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(gpu.driver), "cuMemAllocAsync")
    with pytest.raises(CudaError) as refused:
        CudaDevice().allocate(1)
    assert str(refused.value) == "this NVIDIA driver is too old, and has no cuMemAllocAsync; update it to r535 or newer"


def test_memory_that_is_used_up_is_told_with_what_is_free(gpu: Machine) -> None:
    device = CudaDevice()
    assert device.free_memory() == 1 << 30
    with pytest.raises(CudaError, match=r" GB are free \(cuMemAllocAsync failed with 2 \(out of memory\)\); "):
        device.allocate((1 << 30) + 1)
