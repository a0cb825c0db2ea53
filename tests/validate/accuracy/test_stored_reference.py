"""Runtimes that are held against what a run keeps: equal to what torch finds of the same logits, within its bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.measure.scoring import log_softmax_of_array
from fp8q.calibrate.text.evaluation import Evaluation, cut
from fp8q.core.reporter import SILENT
from fp8q.validate.accuracy import compare, top_logits
from fp8q.validate.accuracy.compare import Outcome, Turns, compare_in_turn
from fp8q.validate.accuracy.stored_reference import StoredReference, against_stored
from fp8q.validate.accuracy.top_divergence import bounded_kl
from fp8q.validate.accuracy.top_logits import TopLogits, TopTokens, positions_to_keep, top_of, top_of_array
from tests.noise import OTHER_SUMS

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 60


@pytest.fixture
def evaluation() -> Evaluation:
    return cut(np.random.default_rng(1).integers(0, VOCABULARY, 400), "text", 20, 20)


def tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits of the next token by the last one: a runtime's, and another's near it."""
    random = np.random.default_rng(2)
    first = random.normal(scale=3, size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    return first, first + random.normal(scale=0.1, size=first.shape).astype(np.float32)


def stored(evaluation: Evaluation, found: Outcome) -> StoredReference:
    kept = positions_to_keep(evaluation)
    windows = np.flatnonzero(kept.any(axis=1))
    nll = {name: values[windows][kept[windows]] for name, values in found.nll.items()}
    tops = TopTokens(windows, evaluation.ids[windows], kept[windows], found.top, nll)
    return StoredReference(tops, found.nll, evaluation)


@pytest.mark.parametrize("prompt", [None, 8])
def test_without_torch_a_runtime_has_the_numbers_that_torch_gives(prompt: int | None, tmp_path: Path) -> None:
    """Of whole windows, and of windows decoded behind a prompt, whose last token is not read."""
    evaluation = cut(np.random.default_rng(1).integers(0, VOCABULARY, 400), "text", 20, 20, prompt=prompt)
    base, other = tables()
    read = None if prompt is None else -1

    def in_torch(table: np.ndarray) -> Callable[[], Callable[[np.ndarray], torch.Tensor]]:
        return lambda: lambda ids: torch.from_numpy(table[ids][:, :read])

    openers = {"bf16": in_torch(base), "other": in_torch(other)}
    with_torch = compare_in_turn(Turns(evaluation, openers, VOCABULARY, tmp_path / "torch"), SILENT)
    only = replace(with_torch, nll={"bf16": with_torch.nll["bf16"]}, top={"bf16": with_torch.top["bf16"]})
    reference = stored(evaluation, only)
    arrays = {"other": lambda: lambda ids: other[ids][:, :read]}
    alone = compare_in_turn(Turns(evaluation, arrays, VOCABULARY, tmp_path / "numpy", reference.token_measure), SILENT)
    row, expected = against_stored(alone, reference)["other"], with_torch.accuracy.runtimes["other"]
    assert row.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert row.perplexity_increase == pytest.approx(expected.perplexity_increase, abs=1e-6)
    np.testing.assert_allclose(alone.nll["other"], with_torch.nll["other"], rtol=OTHER_SUMS)
    np.testing.assert_array_equal(alone.top["other"].tokens, with_torch.top["other"].tokens)
    np.testing.assert_allclose(alone.top["other"].rest, with_torch.top["other"].rest, atol=1e-5)
    assert row.stored is not None
    distance = row.stored.runtimes["bf16"]
    assert expected.kl_mean_nats is not None
    assert distance.kl_nats.mean <= expected.kl_mean_nats * (1 + 1e-5) <= distance.kl_most_nats
    assert distance.kl_nats.mean > 0.8 * expected.kl_mean_nats
    assert distance.top1_agreement == pytest.approx(expected.top1_agreement)
    assert (row.stored.positions, row.kl_mean_nats) == (int(evaluation.scored.sum()), None)


@pytest.mark.parametrize("windows", [1, 3, 20])
def test_likeliest_tokens_of_some_windows_are_held_against_those(
    windows: int, evaluation: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of twenty windows keep theirs: in batches of which some have none, the distances are those windows' own."""
    context = evaluation.ids.shape[1]
    monkeypatch.setattr(top_logits, "MOST_TOKENS", 5 * context)
    monkeypatch.setattr(compare, "LOGITS_BYTES", windows * 4 * context * VOCABULARY)
    base, other = tables()
    opener = {"bf16": lambda: lambda ids: torch.from_numpy(base[ids])}
    reference = stored(evaluation, compare_in_turn(Turns(evaluation, opener, VOCABULARY, tmp_path / "torch"), SILENT))
    arrays = {"other": lambda: lambda ids: other[ids]}
    alone = compare_in_turn(Turns(evaluation, arrays, VOCABULARY, tmp_path / "numpy", reference.token_measure), SILENT)
    distance = against_stored(alone, reference)["other"].stored
    assert distance is not None
    p, q = (log_softmax_of_array(table) for table in (base, other))
    read = evaluation.ids[:, :-1][positions_to_keep(evaluation)[:, 1:]]
    divergence = (np.exp(p) * (p - q)).sum(axis=1)[read].mean()
    row = distance.runtimes["bf16"]
    assert row.kl_nats.mean <= divergence * (1 + 1e-5) <= row.kl_most_nats
    assert row.kl_nats.mean > 0.8 * divergence
    assert row.top1_agreement == pytest.approx((p.argmax(axis=1) == q.argmax(axis=1))[read].mean())
    assert 0 < distance.positions < evaluation.scored.sum() / 3


def test_a_runtime_that_is_the_stored_one_is_at_no_distance(evaluation: Evaluation, tmp_path: Path) -> None:
    base, _ = tables()
    opener = {"bf16": lambda: lambda ids: torch.from_numpy(base[ids])}
    reference = stored(evaluation, compare_in_turn(Turns(evaluation, opener, VOCABULARY, tmp_path / "torch"), SILENT))
    arrays = {"other": lambda: lambda ids: base[ids]}
    alone = compare_in_turn(Turns(evaluation, arrays, VOCABULARY, tmp_path / "numpy", reference.token_measure), SILENT)
    distance = against_stored(alone, reference)["other"].stored
    assert distance is not None
    same = distance.runtimes["bf16"]
    assert same.top1_agreement == 1
    assert same.nll_increase_nats.mean == pytest.approx(0, abs=1e-6)
    assert same.kl_nats.mean == pytest.approx(0, abs=1e-6)


def test_logits_that_are_no_numbers_are_named_by_window_and_position(evaluation: Evaluation, tmp_path: Path) -> None:
    base, _ = tables()
    opener = {"bf16": lambda: lambda ids: torch.from_numpy(base[ids])}
    reference = stored(evaluation, compare_in_turn(Turns(evaluation, opener, VOCABULARY, tmp_path / "torch"), SILENT))

    def broken(ids: np.ndarray) -> np.ndarray:
        logits: np.ndarray = base[ids].copy()
        logits[2, 7] = np.nan
        return logits

    alone = compare_in_turn(
        Turns(evaluation, {"x": lambda: broken}, VOCABULARY, tmp_path / "x", reference.token_measure), SILENT
    )
    found = against_stored(alone, reference)["x"]
    assert found.not_finite is not None
    assert (found.not_finite.window, found.not_finite.position, found.not_finite.bf16) == (2, 7, False)


def top(shares: np.ndarray, count: int) -> TopLogits:
    order = np.argsort(-shares, kind="stable")[:count]
    rest = max(1 - shares[order].sum(), 0.0)
    logs = np.log(shares[order]).astype(np.float32)
    with np.errstate(divide="ignore"):
        return TopLogits(order[None].astype(np.int32), logs[None], np.log(np.array([rest], np.float32)))


def test_bounds_by_hand() -> None:
    """p = (1/2, 1/4, 1/4), of which the first is kept; q = (1/2, 3/8, 1/8). Least: the rest is 1/2 on both sides, so 0.
    Most: all of the rest at the token of 1/8, since no token has more than 1/2: 1/2 log((1/2) / (1/8)).
    """
    p, q = np.array([1 / 2, 1 / 4, 1 / 4]), np.array([1 / 2, 3 / 8, 1 / 8])
    least, most, rest = bounded_kl(top(p, 1), np.log(q).astype(np.float32)[None])
    assert (least[0], rest[0]) == (pytest.approx(0, abs=1e-6), pytest.approx(1 / 2))
    assert most[0] == pytest.approx(1 / 2 * np.log(4), rel=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_the_whole_kl_lies_between_the_bounds(seed: int, count: int) -> None:
    p, q = np.random.default_rng(seed).dirichlet(np.full(12, 0.5), 2) * 0.99 + 0.01 / 12
    whole = float((p * np.log(p / q)).sum())
    least, most, _ = bounded_kl(top(p, count), np.log(q).astype(np.float32)[None])
    assert least[0] <= whole + 1e-5
    assert most[0] >= whole - 1e-5
    if count == 12:
        assert least[0] == pytest.approx(most[0], abs=1e-5)


def test_likeliest_tokens_are_those_that_torch_finds() -> None:
    logits = np.random.default_rng(3).normal(scale=4, size=(50, 200)).astype(np.float32)
    ours, theirs = top_of_array(log_softmax_of_array(logits)), top_of(torch.from_numpy(logits))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=OTHER_SUMS, atol=1e-6)
    np.testing.assert_allclose(ours.rest, theirs.rest, atol=1e-5)
