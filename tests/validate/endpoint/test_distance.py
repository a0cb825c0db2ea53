"""KL over the tokens that both name, those that one names, and the rest: by hand, and never more than the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8q.validate.accuracy.bootstrap import Bootstrap
from fp8q.validate.accuracy.top_divergence import coarse_kl
from fp8q.validate.accuracy.top_logits import TopLogits
from fp8q.validate.endpoint.answers import NO_TOKEN, LikelyTokens
from fp8q.validate.endpoint.distance import most_unlisted


def top(shares: np.ndarray, count: int) -> TopLogits:
    """The `count` likeliest of one position's `shares`."""
    order = np.argsort(-shares)
    rest = np.log(shares[order[count:]].sum()) if count < len(shares) else -np.inf
    return TopLogits(
        order[None, :count].astype(np.int32), np.log(shares[order[None, :count]]).astype(np.float32),
        np.array([rest], np.float32),
    )  # fmt: skip


def kl_of(known: TopLogits, answer: LikelyTokens, own: int = NO_TOKEN) -> tuple[np.ndarray, np.ndarray]:
    unlisted = most_unlisted(answer, np.array([own]))
    return coarse_kl(known.at(answer.rows), answer.tokens, answer.logprobs, unlisted)


def answered(shares: np.ndarray, count: int) -> LikelyTokens:
    order = np.argsort(-shares)[:count]
    nothing = np.array([np.nan])
    return LikelyTokens(np.array([0]), order[None], np.log(shares[order])[None], nothing, 0, 0)


def test_the_sum_is_over_common_tokens_and_what_others_may_have() -> None:
    """p names 0, 1, 2 and q names 0, 1, 3: common are 0 and 1, and q has 1/16 at most where p has its 1/8."""
    p, q = np.array([1 / 2, 5 / 16, 1 / 8, 1 / 16]), np.array([1 / 4, 1 / 2, 1 / 16, 3 / 16])
    kl, rest = kl_of(top(p, 3), answered(q, 3))
    expected = 1 / 2 * np.log(2) + 5 / 16 * np.log((5 / 16) / (1 / 2))
    expected += 1 / 8 * np.log((1 / 8) / (1 / 16)) + 1 / 16 * np.log((1 / 16) / (3 / 16))
    assert kl[0] == pytest.approx(expected, rel=1e-5)
    assert rest[0] == pytest.approx(3 / 16, rel=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12))
def test_it_is_never_more_than_the_whole_and_the_whole_where_all_is_known(seed: int, ours: int, theirs: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.full(12, 0.5), 2) * 0.99 + 0.01 / 12
    whole = float((p * np.log(p / q)).sum())
    assert kl_of(top(p, ours), answered(q, theirs))[0][0] <= whole + 1e-5
    assert kl_of(top(p, 12), answered(q, 12))[0][0] == pytest.approx(whole, abs=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12), st.integers(0, 11), st.integers(0, 11))
def test_nor_with_the_texts_own_token_listed_and_a_name_unknown(
    seed: int, ours: int, theirs: int, own: int, unknown: int
) -> None:
    """As servers list them: the text's own token behind the likeliest, and a text that is no token of the run's."""
    assume(own != unknown)
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.full(12, 0.5), 2) * 0.99 + 0.01 / 12
    answer = answered(q, theirs)
    if own not in answer.tokens:
        tokens, logprobs = np.append(answer.tokens, [[own]], 1), np.append(answer.logprobs, [[np.log(q[own])]], 1)
        answer = replace(answer, tokens=tokens, logprobs=logprobs)
    answer = replace(answer, tokens=np.where(answer.tokens == unknown, NO_TOKEN, answer.tokens))
    assert kl_of(top(p, ours), answer, own)[0][0] <= float((p * np.log(p / q)).sum()) + 1e-5


def test_what_is_not_listed_has_no_more_than_the_last_that_is() -> None:
    """p names 0 and 1, q 2 and 3: on p's two q has at most twice 1/8, and 3/8 by what its own names leave."""
    p, q = np.array([1 / 2, 1 / 4, 1 / 16, 1 / 16, 1 / 16, 1 / 16]), np.array([0, 0, 1 / 2, 1 / 8, 0, 0])
    least = 3 / 4 * np.log((3 / 4) / (1 / 4)) + 1 / 4 * np.log((1 / 4) / (3 / 4))
    kl, rest = kl_of(top(p, 2), answered(q, 2))
    assert (kl[0], rest[0]) == pytest.approx((least, 1), rel=1e-5)
    free = coarse_kl(top(p, 2), answered(q, 2).tokens, answered(q, 2).logprobs)[0][0]
    assert free == pytest.approx(3 / 4 * np.log((3 / 4) / (3 / 8)) + 1 / 4 * np.log((1 / 4) / (5 / 8)), rel=1e-5)


def test_lists_that_may_have_lost_a_token_bound_nothing() -> None:
    """The second position lists one token fewer; the third's 7 is the text's own, and bounds nothing either."""
    tokens = np.array([[1, 2, 3], [1, 2, NO_TOKEN], [1, 2, 7], [1, 2, 4]])
    logprobs = np.log([[0.5, 0.2, 0.1], [0.5, 0.2, 1], [0.5, 0.2, 1e-9], [0.5, 0.2, 0.05]])
    logprobs[1, 2] = np.nan
    answer = LikelyTokens(np.arange(4), tokens, logprobs, np.full(4, np.nan), 0, 0)
    assert most_unlisted(answer, np.array([9, 9, 7, 9])) == pytest.approx([0.1, 1, 1, 0.05])


def test_what_is_no_token_is_part_of_the_rest() -> None:
    p = np.array([1 / 2, 1 / 4, 1 / 4])
    answer = LikelyTokens(np.array([0]), np.array([[0, NO_TOKEN]]), np.log([[1 / 2, 1 / 4]]), np.array([np.nan]), 0, 0)
    kl, rest = kl_of(top(p, 2), answer)
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert rest[0] == pytest.approx(1 / 2, rel=1e-5)


def test_an_interval_is_over_windows_and_not_over_their_tokens() -> None:
    """Equal values in a window are one value: the interval of ten windows of a hundred is that of ten."""
    values = np.random.default_rng(0).normal(size=10)
    each = Bootstrap(np.arange(10)).interval(values)
    many = Bootstrap(np.repeat(np.arange(10), 100)).interval(np.repeat(values, 100))
    assert many == pytest.approx(each)
    assert each.low < each.mean < each.high


def test_an_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Of 100 windows of 1 and -1 the mean has a standard deviation of 0.1, and 95 % lie within 1.96 of them."""
    found = Bootstrap(np.arange(100)).interval(np.tile([1.0, -1.0], 50))
    assert found.mean == 0
    assert [found.low, found.high] == pytest.approx([-0.196, 0.196], abs=0.02)


def test_values_that_are_not_known_are_left_out() -> None:
    values = np.array([1.0, np.nan, 3.0, np.nan])
    assert Bootstrap(np.array([0, 0, 1, 1])).interval(values).mean == 2
    assert np.isnan(Bootstrap(np.array([0, 1])).interval(np.full(2, np.nan)).mean)
