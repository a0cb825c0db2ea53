"""Flips, McNemar's exact test and recovery, by hand and by scipy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.validate.tasks.pairs import Flips, count_flips, is_judged, mcnemar_p, mean_of_seeds, recovery_interval


def test_flips_are_counted_by_direction() -> None:
    assert count_flips([1, 1, 0, 0, 1], [0, 1, 1, 0, 0]) == Flips(right_to_wrong=2, wrong_to_right=1)


@pytest.mark.parametrize(("flips", "p"), [
    (Flips(0, 0), 1.0),
    (Flips(1, 1), 1.0),  # twice a tail of 3/4
    (Flips(3, 0), 0.25),  # 2 / 2**3
    (Flips(1, 5), 0.21875),  # 2 × (1 + 6) / 2**6
    (Flips(10, 0), 0.001953125),  # 2 / 2**10
])  # fmt: skip
def test_p_is_twice_the_smaller_tail_of_a_fair_coin(flips: Flips, p: float) -> None:
    assert mcnemar_p(flips) == p
    assert mcnemar_p(Flips(flips.wrong_to_right, flips.right_to_wrong)) == p


@given(st.integers(0, 400), st.integers(0, 400))
def test_p_is_scipys_of_a_binomial_test(right_to_wrong: int, wrong_to_right: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    flips = Flips(right_to_wrong, wrong_to_right)
    expected = stats.binomtest(right_to_wrong, sum(flips)).pvalue if sum(flips) else 1.0
    assert mcnemar_p(flips) == pytest.approx(expected, rel=1e-9)


def test_thousands_of_flips_have_a_p() -> None:
    assert 0 < mcnemar_p(Flips(5_000, 4_800)) < 0.05


def test_equal_answers_recover_all_of_the_score_in_every_draw() -> None:
    answers = [1.0, 0.0, 1.0, 1.0] * 20
    assert recovery_interval(answers, answers) == (1.0, 1.0)


def test_the_interval_of_recovery_is_that_of_paired_questions() -> None:
    """Of 400 questions half are right, and of these 8 turn wrong: 0.96, with s² ≈ p q / n over 200 right ones."""
    before = [1.0] * 200 + [0.0] * 200
    after = [0.0] * 8 + [1.0] * 192 + [0.0] * 200
    interval = recovery_interval(before, after)
    assert interval is not None
    assert interval == pytest.approx((0.96 - 1.96 * 0.0139, 0.96 + 1.96 * 0.0139), abs=0.005)


def test_pairing_narrows_the_interval() -> None:
    """The same scores with the flips on other questions: unpaired they would look alike."""
    before = [1.0, 0.0] * 100
    same, moved = before, before[1:] + before[:1]
    narrow, wide = recovery_interval(before, same), recovery_interval(before, moved)
    assert narrow is not None
    assert wide is not None
    assert narrow == (1.0, 1.0)
    assert wide[1] - wide[0] > 0.4


def test_a_score_of_one_right_answer_has_no_interval() -> None:
    """More than a draw in forty has none of it."""
    assert recovery_interval([1.0] + [0.0] * 9, [1.0] + [0.0] * 9) is None


def test_an_answer_is_judged_where_it_is_right_or_wrong() -> None:
    assert (is_judged([0.0, 1.0]), is_judged([0.0, 0.5])) == (True, False)


def test_seeds_are_averaged_question_by_question() -> None:
    assert mean_of_seeds([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]) == pytest.approx([2 / 3, 1 / 3])
