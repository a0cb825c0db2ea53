"""The loss by buckets of positions, of distances from the prompt and of frequency in the calibration text, by hand."""

from __future__ import annotations

from math import expm1, nan

import numpy as np
import pytest

from fp8q.calibrate.text.evaluation import Protocol, cut
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.validate.accuracy.document import Accuracy, FrequencyBucket, load_accuracy, load_token_losses, save_accuracy
from fp8q.validate.report.drawings import drawings
from fp8q.validate.report.loss_buckets import (
    PositionRow,
    buckets,
    by_frequency,
    by_position,
    doubling_spans,
    frequency_rows,
    frequency_table,
    is_flat,
    not_covered,
    position_rows,
    position_table,
)


def test_buckets_double_and_end_with_the_window() -> None:
    assert list(doubling_spans(300)) == [(1, 32), (33, 64), (65, 128), (129, 256), (257, 300)]
    assert list(doubling_spans(32)) == [(1, 32)]
    assert list(doubling_spans(20)) == [(1, 20)]


def test_a_bucket_has_the_means_of_its_scored_tokens() -> None:
    base = np.full((2, 70), 2.0, np.float32)
    base[:, 0] = nan
    base[1, 64:] = nan
    other, kl = base + np.float32(0.5), np.where(np.isnan(base), nan, 0.01).astype(np.float32)
    other[0, 64:] += 1
    first, second, third = by_position(other, base, kl)
    assert [(each.first, each.last, each.tokens) for each in (first, second, third)] == [
        (1, 32, 62), (33, 64, 64), (65, 70, 6),
    ]  # fmt: skip
    assert (first.nll_nats, first.nll_increase_nats) == (2.5, 0.5)
    assert (third.nll_nats, third.nll_increase_nats) == (3.5, 1.5)
    assert third.kl_mean_nats == pytest.approx(0.01)
    base[:, :32] = nan
    assert [each.first for each in by_position(base, None, None)] == [33, 65]


def test_the_run_s_rows_are_percent_and_nats_and_a_flat_divergence_is_a_sentence(evaluated_run: Run) -> None:
    accuracy, nll = load_accuracy(evaluated_run), load_token_losses(evaluated_run)
    kl = {"reference": np.where(np.isnan(nll["bf16"]), nan, 0.01).astype(np.float32)}
    more = nll["bf16"] + np.float32(0.1)
    runtimes = {
        "bf16": accuracy.runtimes["bf16"].model_copy(update={"by_position": by_position(nll["bf16"], None, None)}),
        "reference": accuracy.runtimes["reference"].model_copy(
            update={"by_position": by_position(more, nll["bf16"], kl["reference"])}
        ),
    }
    with RunWriter(evaluated_run).stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(evaluated_run, accuracy.model_copy(update={"runtimes": runtimes}), nll, kl)
    rows = position_rows(evaluated_run)
    assert [(row.first, row.last) for row in rows] == [(1, 32), (33, 64)]
    assert rows[0].increases == {"reference": pytest.approx(expm1(0.1), rel=1e-4)}
    assert [cell.text for cell in next(iter(position_table(rows).cells()))][3:] == ["+10.52 %", "0.01"]
    found = drawings(evaluated_run)
    assert found.remarks["positions"] == (
        "The divergence from BF16 does not rise along the window: at the window’s beginning and its end it is 0.01 and "
        "0.01 nats (reference). No error builds up in the cache."
    )
    assert not {"positions", "divergence"} & found.plots.keys()


def test_a_divergence_that_rises_is_not_flat() -> None:
    rows = [PositionRow(1, 32, 100, 9.0, {}, {"a": 0.010}), PositionRow(33, 64, 100, 9.0, {}, {"a": 0.011})]
    assert is_flat(rows)
    assert is_flat([PositionRow(1, 32, 100, 9.0, {}, {"a": 0.1}), *rows[1:]])  # the beginning may be worse
    assert not is_flat([*rows, PositionRow(65, 128, 100, 9.0, {}, {"a": 0.02})])


def test_positions_that_no_window_reached_are_named_with_the_command() -> None:
    protocol = Protocol(dataset="text", sha256="0", tokens=9, context=512, stride=512)
    accuracy = Accuracy(protocol=protocol, runtimes={}, positions=2048)
    assert not_covered(accuracy) == (
        "Positions 513 to 2,048 of the model were not evaluated, since windows have 512 tokens: `fp8q validate RUN "
        "--context 2048` reaches them, on a text of that length."
    )
    assert not_covered(accuracy.model_copy(update={"positions": 512})) == ""
    assert not_covered(accuracy.model_copy(update={"positions": None})) == ""


EVALUATION = cut(np.array([0, 1, 2, 3, 1, 1, 9, 2]), "text", 4, 4)  # scored: 1 2 3 and 1 9 2
CALIBRATION = np.array([[1] * 4, [1, 2, 2, 2], [3, 3, 3, 3]])  # 1: five times, 2: three times, 3: four times, 9: never
NLL = np.array([[np.nan, 1, 2, 3], [np.nan, 5, 7, 4]], np.float32)


def test_buckets_go_up_by_powers_of_four() -> None:
    assert list(buckets(np.array([0, 17]))) == [(0, 0), (1, 3), (4, 15), (16, 63)]
    assert list(buckets(np.array([16]))) == [(0, 0), (1, 3), (4, 15), (16, 63)]
    assert list(buckets(np.array([0]))) == [(0, 0)]


def test_each_scored_token_counts_in_the_bucket_of_its_occurrences_in_the_calibration_text() -> None:
    base = NLL - np.array([[0, 0.75, 0, 0], [0, 0, 0, 0.25]], np.float32)
    assert by_frequency(EVALUATION, CALIBRATION, NLL, base) == [
        FrequencyBucket(least=0, most=0, tokens=1, nll_nats=7, nll_increase_nats=0),
        FrequencyBucket(least=1, most=3, tokens=2, nll_nats=3, nll_increase_nats=0.125),  # both 2
        FrequencyBucket(least=4, most=15, tokens=3, nll_nats=3, nll_increase_nats=0.25),  # 1, 3, 1
    ]
    assert [bucket.nll_increase_nats for bucket in by_frequency(EVALUATION, CALIBRATION, NLL, None)] == [None] * 3
    assert sum(bucket.tokens for bucket in by_frequency(EVALUATION, CALIBRATION, NLL, None)) == 6


def test_the_table_has_a_column_for_each_runtime_beside_bf16(evaluated_run: Run) -> None:
    assert frequency_table(frequency_rows(evaluated_run)).rows == []  # written before there were any
    accuracy, nll = load_accuracy(evaluated_run), load_token_losses(evaluated_run)
    of = {"bf16": None, "reference": -0.5}
    runtimes = {
        name: accuracy.runtimes[name].model_copy(
            update={
                "by_frequency": [
                    FrequencyBucket(least=0, most=0, tokens=12, nll_nats=3, nll_increase_nats=more),
                    FrequencyBucket(least=1024, most=4095, tokens=2000, nll_nats=1.5, nll_increase_nats=more),
                ]
            }
        )
        for name, more in of.items()
    }
    with RunWriter(evaluated_run).stage("validate", {}, {"context": 64}) as log:
        log.outputs += save_accuracy(evaluated_run, accuracy.model_copy(update={"runtimes": runtimes}), nll)
    table = frequency_table(frequency_rows(evaluated_run))
    titles = ["in the calibration text", "tokens", "NLL of BF16, nats", "reference: more"]
    assert [column.title for column in table.columns] == titles
    assert [[cell.text for cell in row] for row in table.cells()] == [
        ["never", "12", "3.0000", "−0.5000"],
        ["1,024 to 4,095 times", "2,000", "1.5000", "−0.5000"],
    ]
