"""Timing answers: on the counting model, whose tokens can be worked out, and with times made up where only arithmetic
is meant.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fp8q.serve.bench.meter import GpuMeter, HostMeter, MemoryTaken, open_meter
from fp8q.serve.bench.timing import BatchTiming, Contender, million_tokens_cost, time_batch, time_contenders, timing
from fp8q.serve.loop.host_batch import HostBatch
from fp8q.serve.loop.sessions import Pace
from fp8q.serve.loop.step_logits import HostLogits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.serve.counting_model import CountingModel


class Seen(HostBatch):
    """A batch in host memory that remembers what it was asked."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chunks: list[tuple[int, list[list[int]], list[int]]] = []
        self.steps: list[list[int]] = []

    def prefill(
        self, first: int, tokens: NDArray[np.int64], filled: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        self.chunks.append((first, tokens.tolist(), filled.tolist()))
        return super().prefill(first, tokens, filled, lengths)

    def decode(self, tokens: NDArray[np.int64], filled: NDArray[np.int64]) -> HostLogits:
        self.steps.append(tokens.tolist())
        return super().decode(tokens, filled)


def test_what_is_timed_is_the_greedy_answer_of_every_row(counting: CountingModel) -> None:
    batch = Seen(counting.session(), 2, 20)
    prompts = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    for _ in range(2):  # the second begins anew
        found = time_batch(batch, Pace(chunk=4, share=1), prompts, 4)
        assert len(found.between) == 3
        assert 0 < found.first < found.total
    # 3·1 + 1·2 + 4·3 + 1·1 + 5·2 = 28 -> 12, + 12·3 -> 0, + 0 -> 0; 9 + 4 + 18 + 5 + 6 = 42 -> 10, + 30 -> 8, + 8 -> 0
    assert batch.steps == [[12, 10], [0, 8], [0, 0]] * 2
    # a chunk of four positions holds no second row of five
    one = [(0, [[3, 1, 4, 1]], [0]), (0, [[5]], [4]), (1, [[9, 2, 6, 5]], [0]), (1, [[3]], [4])]
    assert batch.chunks == one * 2


def test_short_prompts_go_in_together(counting: CountingModel) -> None:
    batch = Seen(counting.session(), 3, 20)
    time_batch(batch, Pace(chunk=4, share=1), np.array([[3, 1], [9, 2], [6, 5]]), 2)
    assert batch.chunks == [(0, [[3, 1], [9, 2]], [0, 0]), (2, [[6, 5]], [0])]


def test_medians_over_answers_and_quantiles_over_all_their_steps() -> None:
    steps = tuple(number / 1000 for number in range(101))  # 0 to 100 ms: 5.05 s
    found = timing([BatchTiming(0.5, steps), BatchTiming(9.0, steps[::-1]), BatchTiming(0.7, steps)], rows=4)
    assert found.ttft_ms == 700
    assert (found.itl_p50_ms, found.itl_p95_ms, found.itl_p99_ms) == pytest.approx((50, 95, 99))
    assert found.latency_ms == pytest.approx(5750)
    assert found.tokens_per_second == pytest.approx(4 * 102 / 5.75)


def test_a_million_tokens_at_a_price() -> None:
    # 1000 tokens a second are 3.6 million an hour
    assert million_tokens_cost(3.6, 1000) == pytest.approx(1)


def test_models_take_turns_and_another_begins_each_round(counting: CountingModel) -> None:
    meter, order, ticks = HostMeter(), list[str](), count()
    sessions = [counting.session() for _ in range(3)]
    contenders = [Contender(name, session, MemoryTaken(meter)) for name, session in zip("abc", sessions, strict=True)]
    for name, session in zip("abc", sessions, strict=True):
        opened = session.open_batch

        def told(rows: int, positions: int, name: str = name, opened: Any = opened) -> HostBatch:
            batch: HostBatch = opened(rows, positions)
            cleared = batch.clear

            def clear() -> None:
                order.append(name)
                cleared()

            batch.clear = clear  # type: ignore[method-assign]
            return batch

        session.open_batch = told  # type: ignore[method-assign]
    done: list[int] = []
    found = time_contenders(contenders, (2, 3, 4), 3, done.append, clock=lambda: float(next(ticks)))
    # one answer each that is not timed, three rounds, and the memory given back
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert sum(done) == 12
    assert [each.timings for each in found] == [
        [BatchTiming(1.0, (1.0, 1.0, 1.0))] * 3
    ] * 3  # a clock that ticks once a look
    assert [each.joules for each in found] == [None] * 3


class Stepped:
    """A meter whose memory and energy are made up."""

    device, total_bytes = "a meter", 100

    def __init__(self, memory: list[int]) -> None:
        self.memory, self.spent = iter(memory), 0.0

    def memory_bytes(self) -> int:
        return next(self.memory)

    def joules(self) -> float:
        self.spent += 1.5
        return self.spent


def test_memory_is_counted_to_whoever_took_it_and_energy_to_the_round(counting: CountingModel) -> None:
    meter = Stepped([100, 130, 130, 170, 170, 150])
    held = MemoryTaken(meter)
    with held.counting():
        session = counting.session()  # takes 30
    (found,) = time_contenders([Contender("a", session, held)], (1, 2, 2), 4)  # takes 40 more, gives 20 back
    assert (found.memory_bytes, held.bytes) == (70, 50)
    assert found.joules == 4 * 1.5


def test_this_process_is_measured_where_no_gpu_runs_the_model() -> None:
    meter = open_meter(on_gpu=False)
    assert isinstance(meter, HostMeter)
    held = MemoryTaken(meter)
    with held.counting():
        taken = np.ones(50_000_000)  # 400 MB: what the process gives back meanwhile is little of it
    assert 0.9 * taken.nbytes < held.bytes < 1.2 * taken.nbytes
    assert taken.nbytes < meter.memory_bytes() < meter.total_bytes
    assert meter.joules() is None


class NvmlError(Exception):
    """What NVML raises."""


def nvml(**functions: Any) -> Any:
    """NVML as it answers on a GPU of 80 GB, and as `functions` have it."""
    known = {
        "NVMLError": NvmlError,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * 10**9, used=3 * 10**9),
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 2_500,
    }
    return SimpleNamespace(**(known | functions))


def test_nvml_counts_millijoules_and_the_whole_gpu() -> None:
    meter = GpuMeter(nvml(), "handle")
    assert (meter.device, meter.total_bytes) == ("NVIDIA H100", 80 * 10**9)
    assert (meter.memory_bytes(), meter.joules()) == (3 * 10**9, 2.5)


def test_a_gpu_without_a_counter_of_energy_has_none() -> None:
    def refused(handle: Any) -> int:
        raise NvmlError

    assert GpuMeter(nvml(nvmlDeviceGetTotalEnergyConsumption=refused), "handle").joules() is None


@pytest.mark.gpu
def test_a_gpu_is_measured_by_nvml() -> None:
    meter = open_meter(on_gpu=True)
    assert isinstance(meter, GpuMeter)
    assert 0 < meter.memory_bytes() < meter.total_bytes
