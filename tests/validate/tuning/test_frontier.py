"""The knapsack, by hand and against trying everything."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.validate.tuning.solve import LEVELS, Choice, Chosen, Items, cheapest, hull, loss_of, price_of, steps


def least(items: Items) -> Chosen:
    """Choose the least loss for every item, and among equals the cheapest."""
    return {name: min(choices, key=lambda option: (option.loss, option.price)) for name, choices in items.items()}


ONE, TWO, WIDE = Choice("one", 10, 1), Choice("two", 2, 2), Choice("wide", 0, 4)


def test_a_choice_above_the_line_between_two_others_is_no_corner() -> None:
    assert hull([WIDE, Choice("above", 6, 3), ONE, Choice("worse", 11, 2)]) == [ONE, WIDE]
    assert hull([WIDE, TWO, ONE]) == [ONE, TWO, WIDE]
    assert hull([ONE, Choice("as cheap", 9, 1)]) == [Choice("as cheap", 9, 1)]


def test_the_frontier_takes_first_what_saves_most_for_its_price() -> None:
    """a saves 8 for 1, then 2 for 2; b 3 for 1."""
    start, further = steps({"a": [ONE, TWO, WIDE], "b": [Choice("one", 4, 1), Choice("two", 1, 2)]})
    assert {name: choice.name for name, choice in start.items()} == {"a": "one", "b": "one"}
    assert [(name, choice.name) for name, choice in further] == [("a", "two"), ("b", "two"), ("a", "wide")]


@pytest.mark.parametrize(
    ("budget", "names", "price"),
    [
        (14, ("one", "one"), 2),
        (13.9, ("two", "one"), 3),  # 6: b alone would leave 11, for as much
        (6, ("two", "one"), 3),
        (5.9, ("two", "two"), 4),
        (3, ("two", "two"), 4),
        (2, ("wide", "two"), 6),
        (1, ("wide", "two"), 6),
    ],
)
def test_the_cheapest_within_a_budget(budget: float, names: tuple[str, str], price: float) -> None:
    items = {"a": [ONE, TWO, WIDE], "b": [Choice("one", 4, 1), Choice("two", 1, 2)]}
    chosen = cheapest(items, budget)
    assert chosen is not None
    assert loss_of(chosen) <= budget
    assert price_of(chosen) == price
    if budget != 13.9:
        assert tuple(choice.name for choice in chosen.values()) == names


def test_a_point_off_the_hull_is_found_where_it_is_the_cheapest() -> None:
    """For 6 the hull goes on to 0 for 4; the choice above its line costs 3."""
    items = {"a": [Choice("one", 10, 1), Choice("above", 6, 3), Choice("wide", 0, 4)]}
    chosen = cheapest(items, 6)
    assert chosen is not None
    assert chosen["a"].name == "above"


def test_a_budget_that_nothing_meets_has_no_answer_but_the_least_there_is() -> None:
    items = {"a": [ONE, TWO], "b": [ONE, Choice("as good", 10, 0.5)]}
    assert cheapest(items, 11.9) is None
    assert cheapest(items, 0) is None
    assert {name: choice.name for name, choice in least(items).items()} == {"a": "two", "b": "as good"}


numbers = st.floats(0, 10, allow_nan=False).map(lambda value: round(value, 3))
choices = st.lists(st.builds(Choice, st.just("x"), numbers, numbers), min_size=1, max_size=3)


@given(st.lists(choices, min_size=1, max_size=5), st.floats(0.01, 40))
def test_nothing_that_meets_the_budget_is_cheaper_but_by_the_grid(every: list[list[Choice]], budget: float) -> None:
    """Against all combinations: never over the budget, and never dearer than the best for the budget less one part an
    item.
    """
    items: Items = {str(number): found for number, found in enumerate(every)}
    all_of_them = [dict(zip(items, combination, strict=True)) for combination in product(*items.values())]
    chosen, inner = cheapest(items, budget), budget * (1 - (len(items) + 1) / LEVELS)
    within = [price_of(each) for each in all_of_them if loss_of(each) <= inner]
    if chosen is None:
        assert not within
        return
    assert loss_of(chosen) <= budget * (1 + 1e-12)
    assert price_of(chosen) >= min(price_of(each) for each in all_of_them if loss_of(each) <= budget * (1 + 1e-12))
    if within:
        assert price_of(chosen) <= min(within) + 1e-9


@given(st.lists(choices, min_size=1, max_size=4))
def test_no_combination_lies_below_the_frontier(every: list[list[Choice]]) -> None:
    """Between two neighbouring points of the frontier nothing loses less for the same price than the line has."""
    items: Items = {str(number): found for number, found in enumerate(every)}
    chosen, further = steps(items)
    points = [(price_of(chosen), loss_of(chosen))]
    for name, choice in further:
        chosen[name] = choice
        points.append((price_of(chosen), loss_of(chosen)))
    assert points[-1][1] == pytest.approx(loss_of(least(items)))
    for combination in product(*items.values()):
        price, loss = sum(each.price for each in combination), sum(each.loss for each in combination)
        assert price >= points[0][0] - 1e-9
        for (x, y), (right, lower) in pairwise(points):
            if x <= price <= right and right > x:
                assert loss >= y + (lower - y) * (price - x) / (right - x) - 1e-6
