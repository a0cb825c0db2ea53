"""Work that is divided among ranks; codes are compared in `test_handed_moments` and `test_sequential_ranks`."""

import pytest

from fp8q.calibrate.ranks.shares import assigned, batch_numbers, half_ranks


def test_the_costliest_group_goes_to_the_rank_with_the_least_so_far() -> None:
    costs = {("a",): 5, ("b", "c"): 9, ("d",): 4, ("e",): 1}
    assert assigned(costs, 2) == [[("b", "c"), ("e",)], [("a",), ("d",)]]


def test_equal_costs_go_in_their_order_so_that_every_call_assigns_alike() -> None:
    assert assigned({"b": 1, "c": 1, "a": 1}, 2) == [["b", "a"], ["c"]]


def test_ranks_without_a_group_have_none() -> None:
    assert assigned({"a": 1}, 3) == [["a"], [], []]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [8, 9, 15])
def test_each_batch_is_added_once_and_in_order_in_its_half(ranks: int, count: int) -> None:
    shares = [batch_numbers(rank, ranks, count) for rank in range(ranks)]
    assert sorted(number for share in shares for number in share) == list(range(count))
    for parity, members in enumerate(half_ranks(ranks)):
        added = [number for rank in members for number in shares[rank] if number % 2 == parity]
        assert added == list(range(parity, count, 2))
    assert all(shares)
    assert shares[0][0] == 0
