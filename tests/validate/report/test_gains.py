"""The times in the report are those that `fp8q bench` measured of BF16 and FP8, and no gain where FP8 was emulated."""

from __future__ import annotations

import pytest

from fp8q.core.files import write_document
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.validate.bench.document import Bench, BenchProtocol, BenchRow
from fp8q.validate.report.gains import gain_table, gains, operations_text


def row(variant: str, batch: int, rate: float) -> BenchRow:
    return BenchRow(
        variant=variant, batch=batch, prompt=128, ttft_ms=1.0, itl_p50_ms=1000 / rate, itl_p95_ms=1.0, itl_p99_ms=1.0,
        latency_ms=1.0, tokens_per_second=rate, memory_bytes=1,
    )  # fmt: skip


def write(run: Run, emulated: bool, rows: list[BenchRow]) -> None:
    protocol = BenchProtocol(
        runtime="tensorrt", version="10", device="H100", emulated=emulated, tokens=64, rounds=3, positions=192,
        memory_bytes=1, method="",
    )  # fmt: skip
    with RunWriter(run).stage("bench", {}, {}) as log:
        write_document(run.bench, Bench(protocol=protocol, rows=rows, capacity=[]))
        log.outputs.append(run.bench)


@pytest.mark.parametrize("emulated", [False, True])
def test_times_are_of_the_largest_size_that_both_were_measured_at(evaluated_run: Run, emulated: bool) -> None:
    rows = [row("bf16", 1, 100.0), row("bf16", 8, 400.0), row("fp8", 1, 150.0), row("fp8", 8, 700.0), row("fp8", 16, 1)]
    write(evaluated_run, emulated, rows)
    weights, rate, between = gains(evaluated_run)
    assert weights.what == "weights"
    assert (rate.what, rate.bf16, rate.fp8) == ("tokens a second", "400", "700")
    assert (between.bf16, between.fp8) == ("2.5", "1.429")
    known = "fp8q bench, tensorrt on H100, batch 8, prompts of 128"
    if emulated:
        assert rate.known == f"{known}; FP8 is emulated there, which says nothing of its speed on a GPU"
        assert (rate.gain, between.gain) == ("", "")
    else:
        assert (rate.known, rate.gain, between.gain) == (known, "1.75× as many", "0.57× the time")
    assert len(list(gain_table([weights, rate, between]).cells())) == 3


def test_fp8_s_times_stand_alone_where_bf16_was_not_measured(evaluated_run: Run) -> None:
    write(evaluated_run, False, [row("fp8", 1, 150.0), row("fp8", 8, 700.0)])
    _, rate, _ = gains(evaluated_run)
    assert (rate.bf16, rate.fp8, rate.gain) == ("", "700", "")


def test_operations_are_written_in_thousands_and_millions() -> None:
    assert [operations_text(number) for number in (512, 6_950_000, 16_000_000_000)] == ["512", "6.95 M", "16 G"]
