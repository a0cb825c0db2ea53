from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fp8q.serve.loop.sampling import Sampling, nucleus, penalized, probabilities, token_at
from tests.serve.loop.plain_sampling import choose, possible_tokens

RANDOM = np.random.default_rng(0)


def logits(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def test_temperature_zero_takes_the_best_token_and_draws_nothing() -> None:
    random = np.random.default_rng(1)
    assert choose(logits(1, 3, 2), Sampling(), {}, random) == 1
    assert random.random() == np.random.default_rng(1).random()


def test_penalties_are_openais() -> None:
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    values = logits(1, 2, 3)
    # token 2 was produced twice: 3 - 2 · 0.5 - 0.25 = 1.75; token 0 once: 1 - 0.5 - 0.25 = 0.25
    np.testing.assert_array_equal(penalized(values, sampling, {2: 2, 0: 1}), logits(0.25, 2, 1.75))
    np.testing.assert_array_equal(values, logits(1, 2, 3))
    assert choose(values, sampling, {2: 2, 0: 1}, RANDOM) == 1
    assert choose(values, Sampling(frequency_penalty=-1.0), {0: 3}, RANDOM) == 0


@pytest.mark.parametrize(
    ("values", "token", "worst"),
    [((1.0, float("nan"), 2.0), 1, "nan"), ((float("inf"), 1.0, 2.0), 0, "inf"), ((float("-inf"),) * 3, 0, "-inf")],
)
def test_a_broken_model_is_not_sampled_from(values: tuple[float, ...], token: int, worst: str) -> None:
    with pytest.raises(FloatingPointError) as raised:
        choose(logits(*values), Sampling(), {}, RANDOM)
    assert str(raised.value) == (
        f"the model's logit of token {token} is {worst}; `fp8q inspect` shows its scales, `fp8q validate` where "
        "it goes wrong"
    )


def test_a_token_that_the_model_rules_out_is_never_drawn() -> None:
    random = np.random.default_rng(3)
    drawn = {choose(logits(0, float("-inf"), 0), Sampling(temperature=1.0), {}, random) for _ in range(200)}
    assert drawn == {0, 2}


class Zero(np.random.Generator):
    """Draws the smallest number there is."""

    def random(self, *arguments: Any, **options: Any) -> Any:
        return 0.0


def test_the_smallest_number_draws_no_token_without_probability() -> None:
    assert choose(logits(float("-inf"), float("-inf"), 0), Sampling(temperature=1.0), {}, Zero(np.random.PCG64())) == 2


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(0.0, [1]), (0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.76, [1, 2, 0]), (0.999, [1, 2, 0, 3])],
)
def test_the_nucleus_is_the_fewest_tokens_that_hold_top_p(top_p: float, tokens: list[int]) -> None:
    probability = np.array([0.125, 0.5, 0.25, 0.125])
    kept, weights = nucleus(probability, top_p)
    assert kept.tolist() == tokens
    np.testing.assert_array_equal(weights, probability[tokens])


def slow_nucleus(probability: NDArray[np.float64], top_p: float) -> list[int]:
    kept: list[int] = []
    for token in sorted(range(len(probability)), key=lambda each: -probability[each]):
        kept.append(token)
        if probability[kept].cumsum()[-1] >= top_p:
            break
    return kept


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)), st.floats(0, 1, exclude_max=True))
def test_sorting_only_the_candidates_loses_none_of_the_nucleus(values: NDArray[np.float32], top_p: float) -> None:
    probability = probabilities(values, 1.0)
    assert nucleus(probability, top_p)[0].tolist() == slow_nucleus(probability, top_p)


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.integers(-40, 40).map(lambda number: number / 8)),
    st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    st.one_of(st.just(1.0), st.floats(0, 1)),
    st.floats(0, 1, exclude_max=True),
)
def test_a_token_is_the_one_that_exact_sums_find(
    values: NDArray[np.float32], temperature: float, top_p: float, uniform: float
) -> None:
    assert token_at(values, temperature, top_p, uniform) in possible_tokens(values, temperature, top_p, uniform)


def test_probabilities_are_the_softmax_at_that_temperature() -> None:
    # e^(ln 2 / 0.5) = 4
    np.testing.assert_allclose(probabilities(logits(0, np.log(2)), 0.5), [0.2, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(probabilities(logits(0, 1, 0.5), 1e-300), [0, 1, 0])


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    random = np.random.default_rng(7)
    values = np.log(logits(0.125, 0.5, 0.25, 0.125))
    draws = 4000
    counts = Counter(choose(values, Sampling(temperature=1.0, top_p=0.75), {}, random) for _ in range(draws))
    # The nucleus is {1, 2} with 2/3 and 1/3; one standard deviation of the count is 30.
    assert set(counts) == {1, 2}
    assert abs(counts[1] - draws * 2 / 3) < 5 * np.sqrt(draws * 2 / 9)


def test_a_seed_fixes_what_is_drawn() -> None:
    values = RANDOM.normal(size=1000).astype(np.float32)
    one, two, other = (np.random.default_rng(seed) for seed in (5, 5, 6))
    sampling = Sampling(temperature=1.0)
    drawn = [[choose(values, sampling, {}, random) for _ in range(20)] for random in (one, two, other)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
