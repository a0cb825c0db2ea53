"""Groups of weights are assigned to ranks by what rounding them costs; codes are compared in `test_handed_moments`."""

from fp8q.quantize.checkpoint.rounding_ranks import assigned


def test_the_costliest_group_goes_to_the_rank_with_the_least_so_far() -> None:
    costs = {("a",): 5, ("b", "c"): 9, ("d",): 4, ("e",): 1}
    assert assigned(costs, 2) == [[("b", "c"), ("e",)], [("a",), ("d",)]]


def test_equal_costs_go_by_name_so_that_every_call_assigns_alike() -> None:
    assert assigned({("b",): 1, ("c",): 1, ("a",): 1}, 2) == [[("a",), ("c",)], [("b",)]]


def test_ranks_without_a_group_have_none() -> None:
    assert assigned({("a",): 1}, 3) == [[("a",)], [], []]
