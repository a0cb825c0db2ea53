"""The loss by a token's position: buckets that double, up to the end of the window, and what no window reached."""

from __future__ import annotations

from math import expm1, nan

import numpy as np
import pytest

from fp8q.core.run import Run
from fp8q.validate.accuracy.document import Accuracy, Protocol, load_accuracy, load_token_losses, save_accuracy
from fp8q.validate.report.drawings import drawings
from fp8q.validate.report.position_buckets import (
    PositionRow,
    by_position,
    doubling_spans,
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
    with evaluated_run.stage("validate", {}, {}) as log:
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
