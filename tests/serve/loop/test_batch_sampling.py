"""The next tokens of many rows are those that each row's own sampling takes: `sampling.choose`, which is plain and in
FP64, is the oracle throughout.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fp8q.serve.loop import sampling
from fp8q.serve.loop.sampling import (
    BLOCK,
    SLACK,
    RowChoice,
    Sampling,
    WeighedRow,
    best_first,
    choose,
    choose_all,
    likely_token,
    token_at,
    weigh_row,
)

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


@given(ROWS, st.floats(0.02, 50), st.one_of(st.just(1.0), st.floats(0, 1)), UNIFORM)
@example(np.zeros(200, np.float32), 1.0, 0.5, 0.5)
@example(np.array([0.0, 1.0 - 2**-24, 1.0], np.float32), 50.0, 0.5, 0.999)
@example(np.array([1e-16, 2e-16, 1.0], np.float32), 1.0, 0.999, 0.9999)
def test_a_likely_token_is_the_one_that_fp64_takes(
    logits: NDArray[np.float32], temperature: float, top_p: float, uniform: float
) -> None:
    assume(np.isfinite(logits.max()))
    sampling = Sampling(temperature, top_p)
    assert likely_token(logits, sampling, uniform) in (None, token_at(logits, sampling, uniform))


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 6), st.sampled_from([0.3, 0.8, 1.0, 2.0]), st.sampled_from([0.9, 1.0]))
def test_a_likely_token_of_thousands_is_the_one_that_fp64_takes(
    seed: int, spread: float, temperature: float, top_p: float
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(5000) * spread).astype(np.float32)
    if seed % 2:  # as BF16 has them: few values, and many ties
        logits = (logits.view(np.uint32) >> 16 << 16).view(np.float32)
    sampling = Sampling(temperature, top_p)
    for uniform in random.random(20):
        assert likely_token(logits, sampling, uniform) in (None, token_at(logits, sampling, uniform))


@pytest.mark.parametrize("exponent", [1.25, 2.0])
@pytest.mark.parametrize(("top_p", "certain"), [(0.95, 1.0), (1.0, 0.9)])
def test_nearly_all_tokens_of_texts_are_certain(exponent: float, top_p: float, certain: float) -> None:
    logits, sampling = zipf(0, exponent), Sampling(0.8, top_p)
    drawn = np.random.default_rng(1).random(40)
    found = [likely_token(logits, sampling, uniform) for uniform in drawn]
    assert np.mean([token is not None for token in found]) >= certain
    assert all(
        token in (None, token_at(logits, sampling, uniform)) for token, uniform in zip(found, drawn, strict=True)
    )


def test_where_the_sum_in_fp32_does_not_decide_the_one_in_fp64_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # of equal tokens the nucleus ends on a boundary: 0.5 of 200 is 100 tokens, within any slack or 101
    logits, summed = np.zeros(200, np.float32), list[int]()
    weights = WeighedRow.weights

    def counted(row: WeighedRow, values: NDArray[np.float32]) -> NDArray[np.float64]:
        summed.extend([len(values)] * (values is logits))
        return weights(row, values)

    monkeypatch.setattr(WeighedRow, "weights", counted)
    # 0.7 of 100 and of 101 tokens: 70.0 and 70.7, the same token but for the boundary at 70
    assert likely_token(logits, Sampling(1.0, 0.5), 0.701) == 70
    assert summed == []
    # the nucleus is of 51 or of 52 tokens, and 0.999 of them is the last one of either
    assert likely_token(logits, Sampling(1.0, 51 * (1 + SLACK / 2) / 200), 0.999) == 51
    assert summed == [200]
    # at the boundary itself nothing decides
    assert likely_token(logits, Sampling(1.0, 0.5), 0.7) is None


@pytest.mark.parametrize(
    ("logits", "temperature"),
    [
        ([1.0, np.nan], 1.0),
        ([np.inf, 0.0], 1.0),
        ([-np.inf], 1.0),
        ([1e31, 0.0], 1.0),
        ([1.0, 0.0], 0.01),
        ([1.0], 51.0),
    ],
)
def test_rows_beyond_the_bounds_are_left_to_fp64(logits: list[float], temperature: float) -> None:
    assert likely_token(np.array(logits, np.float32), Sampling(temperature), 0.5) is None


@given(ROWS)
def test_the_best_come_first_and_equals_by_id(logits: NDArray[np.float32]) -> None:
    expected = sorted(range(len(logits)), key=lambda token: -logits[token])
    assert best_first(logits).tolist() == expected


def test_a_weight_in_fp32_and_its_sum_are_within_the_slack() -> None:
    for seed, spread in ((0, 1.0), (1, 3.0), (2, 12.0)):
        logits = (np.random.default_rng(seed).standard_normal(VOCABULARY + 7) * spread).astype(np.float32)
        for temperature in (0.3, 1.0, 2.0):
            row = weigh_row(logits, temperature)
            assert row is not None
            exact = np.exp((logits.astype(np.float64) - row.top) / temperature)
            ends, cumulative = row.blocks.cumsum(), exact.cumsum()[BLOCK - 1 :: BLOCK]
            assert abs(row.total / exact.sum() - 1) < SLACK
            assert np.abs(ends[: len(cumulative)] - cumulative).max() < SLACK * exact.sum()


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
