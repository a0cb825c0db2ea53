"""Several texts in one corpus: weights as the user writes them, shares by the largest remainder, and an order that any
prefix keeps.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.text.mixture import WeightedText, apportion, interleave, largest_total, parse
from fp8q.core.errors import InputError

WEIGHTS = st.lists(st.fractions(Fraction(1, 100), 100), min_size=1, max_size=5)


def refusal(*data: str) -> str:
    with pytest.raises(InputError) as refused:
        parse(data)
    return str(refused.value)


def test_a_weight_follows_the_last_equals_sign() -> None:
    assert parse("a.txt") == parse(["a.txt"]) == [WeightedText("a.txt", Fraction(1))]
    assert parse(["a.txt=3", "b=c.jsonl=0.25", "owner/name:config:split=.5", "d.txt"]) == [
        WeightedText("a.txt", Fraction(3)),
        WeightedText("b=c.jsonl", Fraction(1, 4)),
        WeightedText("owner/name:config:split", Fraction(1, 2)),
        WeightedText("d.txt", Fraction(1)),
    ]


def test_what_follows_an_equals_sign_and_is_no_number_is_part_of_the_name() -> None:
    assert [part.spec for part in parse(["year=2024/part.txt", "a=nan", "b=1e3", "c="])] == [
        "year=2024/part.txt",
        "a=nan",
        "b=1e3",
        "c=",
    ]


def test_a_file_whose_name_ends_in_a_number_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    assert parse(f"{tmp_path}/year=2024") == [WeightedText(f"{tmp_path}/year=2024")]
    assert parse(f"{tmp_path}/year=2024=2") == [WeightedText(f"{tmp_path}/year=2024", Fraction(2))]


def test_weights_and_texts_that_mean_nothing_are_refused() -> None:
    assert refusal("a.txt=0") == "--data a.txt=0: its weight is 0; give one above 0, or leave the text out"
    assert refusal("a.txt=-1.5") == "--data a.txt=-1.5: its weight is -1.5; give one above 0, or leave the text out"
    assert (
        refusal("a.txt=2", "a.txt") == "--data a.txt: is given more than once; give it once, and its weight as a.txt=2"
    )
    assert refusal() == "--data: names no text; give at least one"


def test_shares_go_by_the_largest_remainder() -> None:
    # Quotas 4.7, 3.1 and 2.2 of 10: the one left over goes to the first.
    assert apportion(10, [Fraction(47), Fraction(31), Fraction(22)]) == [5, 3, 2]
    assert apportion(2, [Fraction(1)] * 3) == [1, 1, 0]
    assert apportion(512, [Fraction("0.7"), Fraction("0.3")]) == [358, 154]  # 358.4 and 153.6


@given(total=st.integers(0, 2000), weights=WEIGHTS)
def test_shares_sum_to_the_whole_and_none_is_off_by_one(total: int, weights: list[Fraction]) -> None:
    given_out = apportion(total, weights)
    assert sum(given_out) == total
    assert all(abs(share - total * weight / sum(weights)) < 1 for share, weight in zip(given_out, weights, strict=True))


@given(data=st.data(), weights=WEIGHTS)
def test_the_largest_total_is_what_trying_them_all_finds(data: st.DataObject, weights: list[Fraction]) -> None:
    available = [data.draw(st.integers(0, 30)) for _ in weights]

    def fits(total: int) -> bool:
        return all(share <= count for share, count in zip(apportion(total, weights), available, strict=True))

    assert largest_total(available, weights) == max(total for total in range(sum(available) + 1) if fits(total))


def test_the_rarest_text_limits_the_whole() -> None:
    # 42 are 31.5 and 10.5, and of two halves the first is rounded up; of 43 the second would give 10.75, which is 11.
    assert largest_total([100, 10], [Fraction(3), Fraction(1)]) == 42
    assert largest_total([7], [Fraction(5)]) == 7


def test_a_smaller_total_may_fit_where_the_largest_does_and_this_does_not() -> None:
    weights, available = [Fraction(4), Fraction(20), Fraction(15), Fraction(6)], [1, 8, 11, 7]
    assert largest_total(available, weights) == 17
    assert apportion(16, weights) == [2, 7, 5, 2]  # two of the first text, which has one
    nearest = largest_total(available, weights, 16)
    assert nearest < 16
    assert all(share <= count for share, count in zip(apportion(nearest, weights), available, strict=True))


def test_windows_are_interleaved_by_their_place_in_their_own_text() -> None:
    first, second = np.arange(4)[:, None], np.array([[10], [11]])
    # Places 1/8 3/8 5/8 7/8 and 1/4 3/4.
    assert interleave([first, second]).ravel().tolist() == [0, 10, 1, 2, 11, 3]
    assert interleave([first]).tolist() == first.tolist()


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_every_prefix_is_mixed_as_the_whole_is(counts: list[int]) -> None:
    mixed = interleave([np.full((count, 1), number) for number, count in enumerate(counts)]).ravel()
    for length in range(1, len(mixed) + 1):
        for number, count in enumerate(counts):
            expected = count * length / len(mixed)
            assert abs((mixed[:length] == number).sum() - expected) <= (len(counts) + 1) / 2
