"""The next tokens of many rows are those that each row's own sampling takes: `token_at`, which is plain and in FP64,
and exact sums (`possible_tokens`) are the oracles.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fp8q.serve.loop import sampling
from fp8q.serve.loop.sampling import (
    BLOCK,
    FINE_SLACK,
    SLACK,
    UNDECIDED,
    Draws,
    HostRows,
    RowChoice,
    Sampling,
    best_first,
    choose_step,
    token_at,
)
from fp8q.serve.loop.step_logits import HostLogits
from tests.serve.loop.plain_sampling import choose, possible_tokens

VOCABULARY = 128_256
#: Logits as models have them: numbers, some alike, and what is forbidden.
LOGITS = st.one_of(
    st.floats(-30, 30, width=32),
    st.integers(-8, 8).map(float),
    st.sampled_from([-np.inf, float(np.finfo(np.float32).min), 0.0, -0.0, 1e-45, 1e-16]),
)
ROWS = arrays(np.float32, st.integers(1, 300), elements=LOGITS)
UNIFORM = st.floats(0, 1, exclude_max=True)


def zipf(seed: int, exponent: float) -> NDArray[np.float32]:
    """Logits whose probabilities fall as rank^-exponent, as those of texts do."""
    random = np.random.default_rng(seed)
    logits = 15.0 - exponent * np.log(np.arange(1, VOCABULARY + 1))
    return random.permutation(logits).astype(np.float32)


def draws(rows: int, temperature: float, top_p: float, uniforms: Any) -> Draws:
    """Draws of one temperature and nucleus."""
    return Draws(np.full(rows, temperature), np.full(rows, top_p), np.broadcast_to(uniforms, rows))


def likely(
    logits: NDArray[np.float32], temperature: float, top_p: float, uniform: float, *, fine: bool = False
) -> int | None:
    """The token of a row by its weights; None where they do not decide."""
    (token,) = HostRows([logits], draws(1, temperature, top_p, uniform), fine).drawn().tolist()
    return None if token == UNDECIDED else int(token)


@given(ROWS, st.floats(0.02, 50), st.one_of(st.just(1.0), st.floats(0, 1)), UNIFORM, st.booleans())
@example(np.zeros(200, np.float32), 1.0, 0.5, 0.5, False)
@example(np.zeros(200, np.float32), 1.0, 0.5, 0.5, True)
@example(np.array([0.0, 1.0 - 2**-24, 1.0], np.float32), 50.0, 0.5, 0.999, True)
@example(np.array([1e-16, 2e-16, 1.0], np.float32), 1.0, 0.999, 0.9999, True)
def test_a_likely_token_is_the_one_that_fp64_takes(
    logits: NDArray[np.float32], temperature: float, top_p: float, uniform: float, fine: bool
) -> None:
    assume(np.isfinite(logits.max()))
    expected = token_at(logits, temperature, top_p, uniform)
    assert likely(logits, temperature, top_p, uniform, fine=fine) in (None, expected)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 6), st.sampled_from([0.3, 0.8, 1.0, 2.0]), st.sampled_from([0.9, 1.0]))
def test_a_likely_token_of_thousands_is_the_one_that_fp64_takes(
    seed: int, spread: float, temperature: float, top_p: float
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(5000) * spread).astype(np.float32)
    if seed % 2:  # as BF16 has them: few values, and many ties
        logits = (logits.view(np.uint32) >> 16 << 16).view(np.float32)
    uniforms = random.random(20)
    expected = [token_at(logits, temperature, top_p, uniform) for uniform in uniforms]
    for fine in (False, True):
        tokens = HostRows([logits] * 20, draws(20, temperature, top_p, uniforms), fine).drawn()
        for token, wanted in zip(tokens.tolist(), expected, strict=True):
            assert token in (UNDECIDED, wanted)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.sampled_from([0.02, 0.3, 1.0, 50.0]), st.sampled_from([0.0, 0.5, 0.9, 1.0])), min_size=1),
)
@settings(max_examples=30)
def test_rows_of_a_batch_get_the_tokens_that_exact_sums_find(seed: int, kinds: list[tuple[float, float]]) -> None:
    random = np.random.default_rng(seed)
    rows = [(np.round(2 * random.standard_normal(150)) / 2).astype(np.float32) for _ in kinds]
    temperatures, top_p = (np.array(values) for values in zip(*kinds, strict=True))
    uniforms = random.random(len(kinds))
    tokens = HostRows(rows, Draws(temperatures, top_p, uniforms)).drawn().tolist()
    for row, kind, uniform, token in zip(rows, kinds, uniforms.tolist(), tokens, strict=True):
        assert token == UNDECIDED or token in possible_tokens(row, *kind, uniform)


@pytest.mark.parametrize("exponent", [1.25, 2.0])
@pytest.mark.parametrize(("top_p", "certain"), [(0.95, 1.0), (1.0, 0.9)])
def test_nearly_all_tokens_of_texts_are_certain(exponent: float, top_p: float, certain: float) -> None:
    logits = zipf(0, exponent)
    drawn = np.random.default_rng(1).random(40)
    found = HostRows([logits] * 40, draws(40, 0.8, top_p, drawn)).drawn()
    assert np.mean(found != UNDECIDED) >= certain
    assert all(
        token in (UNDECIDED, token_at(logits, 0.8, top_p, uniform))
        for token, uniform in zip(found.tolist(), drawn, strict=True)
    )


def test_where_the_sum_in_fp32_does_not_decide_the_one_in_fp64_does() -> None:
    # of equal tokens the nucleus ends on a boundary: 0.5 of 200 is 100 tokens, within any slack or 101
    logits = np.zeros(200, np.float32)
    # 0.7 of 100 and of 101 tokens: 70.0 and 70.7, the same token but for the boundary at 70
    assert likely(logits, 1.0, 0.5, 0.701) == 70
    # the nucleus is of 51 or of 52 tokens, and 0.999 of them is the last one of either
    top_p = 51 * (1 + SLACK / 2) / 200
    assert likely(logits, 1.0, top_p, 0.999) is None
    assert likely(logits, 1.0, top_p, 0.999, fine=True) == 51
    # by id, 0.5 of 200 is a boundary within either slack, and a millionth behind it is not within the finer
    assert likely(logits, 1.0, 1.0, 0.5 + 1e-6) is None
    assert likely(logits, 1.0, 1.0, 0.5 + 1e-6, fine=True) == 100
    assert likely(logits, 1.0, 1.0, 0.5, fine=True) is None
    # at the boundary itself nothing decides
    assert likely(logits, 1.0, 0.5, 0.7) is None
    assert likely(logits, 1.0, 0.5, 0.7, fine=True) is None


@pytest.mark.parametrize(
    ("logits", "temperature"),
    [
        ([1.0, np.nan], 1.0),
        ([np.inf, 0.0], 1.0),
        ([-np.inf], 1.0),
        ([1e31, 0.0], 1.0),
    ],
)
def test_rows_beyond_the_bounds_are_left_to_fp64(logits: list[float], temperature: float) -> None:
    assert likely(np.array(logits, np.float32), temperature, 1.0, 0.5) is None
    assert likely(np.array(logits, np.float32), temperature, 0.5, 0.5) is None


def test_temperatures_beyond_the_bounds_are_left_to_fp64() -> None:
    assert draws(4, 1.0, 1.0, 0.5)._replace(temperatures=np.array([0.01, 0.02, 50.0, 51.0])).bounded.tolist() == [
        False,
        True,
        True,
        False,
    ]


@given(ROWS)
def test_the_best_come_first_and_equals_by_id(logits: NDArray[np.float32]) -> None:
    expected = sorted(range(len(logits)), key=lambda token: -logits[token])
    assert best_first(logits).tolist() == expected


@pytest.mark.parametrize(("fine", "slack"), [(False, SLACK), (True, FINE_SLACK)])
def test_weights_and_their_sums_are_within_the_slack(fine: bool, slack: float) -> None:
    for seed, spread in ((0, 1.0), (1, 3.0), (2, 12.0)):
        logits = (np.random.default_rng(seed).standard_normal(VOCABULARY + 7) * spread).astype(np.float32)
        temperatures = (0.3, 1.0, 2.0)
        weighed = HostRows([logits] * 3, draws(3, 1.0, 1.0, 0.5)._replace(temperatures=np.array(temperatures)), fine)
        assert weighed.slack == slack
        for row, temperature in enumerate(temperatures):
            exact = np.exp((logits.astype(np.float64) - weighed.tops[row]) / temperature)
            ends, cumulative = weighed.blocks[row].cumsum(), exact.cumsum()[BLOCK - 1 :: BLOCK]
            assert abs(weighed.totals[row] / exact.sum() - 1) < slack
            assert np.abs(ends[: len(cumulative)] - cumulative).max() < slack * exact.sum()


def choices(rows: Sequence[NDArray[np.float32]], seed: int) -> list[RowChoice]:
    """Rows of all kinds: greedy, plain, nucleus, with penalties."""
    kinds = [
        (Sampling(), {}),
        (Sampling(0.8), {}),
        (Sampling(0.8, 0.95), {}),
        (Sampling(1.0, 0.9, 1.5, -0.5), {int(rows[0].argmax()): 3, 7: 1}),
    ]
    return [
        RowChoice(row, *kinds[index % len(kinds)], np.random.default_rng(seed + index))
        for index, row in enumerate(rows)
    ]


def choose_all(choices: Sequence[RowChoice]) -> list[int | Exception]:
    """Choose where all logits are on the host."""
    return choose_step(choices, range(len(choices)), HostLogits(np.zeros((0, 0), np.float32)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_all_rows_get_what_each_would_get_alone(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "THREAD_WORTH", 1)
    monkeypatch.setattr(sampling, "_most_threads", lambda: threads)
    rows = [zipf(seed, exponent) for seed, exponent in enumerate((1.2, 1.5, 2.0, 3.0, 1.3, 1.4, 1.7, 2.5, 1.25))]
    together, alone = choices(rows, 5), choices(rows, 5)
    for _ in range(3):
        expected = [choose(row, each.sampling, each.counts, each.random) for row, each in zip(rows, alone, strict=True)]
        assert choose_all(together) == expected
    states = [[each.random.bit_generator.state for each in made if each.random] for made in (together, alone)]
    assert states[0] == states[1]  # each token took as many numbers


def test_a_broken_row_harms_no_other() -> None:
    good, broken = zipf(0, 1.5), zipf(1, 1.5)
    broken[9] = np.nan
    random = np.random.default_rng
    found = choose_all(
        [
            RowChoice(good, Sampling(0.8, 0.95), {}, random(1)),
            RowChoice(broken, Sampling(0.8, 0.95), {}, random(2)),
            RowChoice(good, Sampling(), {}, None),
        ]
    )
    assert (found[0], found[2]) == (choose(good, Sampling(0.8, 0.95), {}, random(1)), int(good.argmax()))
    assert type(found[1]) is FloatingPointError
    assert str(found[1]).startswith("the model's logit of token 9 is nan; ")
    assert choose_all([]) == []
