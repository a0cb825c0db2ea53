"""Choose one option for each item so that losses sum to at most a budget, at the least price.

`cheapest` is exact but for the grid of losses: a table over items and budgets, a multiple-choice knapsack (Kellerer,
Pferschy, Pisinger 2004, "Knapsack Problems", chapter 11). Losses are rounded up to a part in `LEVELS` of the budget, so
the result meets the budget, and its price is at most that of the best for a budget smaller by one part an item. `steps`
follows the corners of the lower convex hulls by loss saved for the price: every point on the way is the cheapest of its
own loss, and together they are the frontier.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

#: Parts of the budget that losses are counted in.
LEVELS = 20_000


@dataclass(frozen=True)
class Choice:
    """A choice for an item: its name, its loss, its price."""

    name: str
    loss: float
    price: float


Items = Mapping[str, Sequence[Choice]]
Chosen = dict[str, Choice]


def hull(choices: Sequence[Choice]) -> list[Choice]:
    """The corners of the lower convex hull, from the cheapest on: each next one loses less, and saves less for its
    price than the one before.
    """
    corners: list[Choice] = []
    for choice in sorted(choices, key=lambda option: (option.price, option.loss)):
        if corners and choice.loss >= corners[-1].loss:
            continue
        while corners and choice.price == corners[-1].price:
            corners.pop()
        while len(corners) > 1 and _saved(corners[-1], choice) >= _saved(corners[-2], corners[-1]):
            corners.pop()
        corners.append(choice)
    return corners


def _saved(before: Choice, after: Choice) -> float:
    """The loss that a step saves for each unit of its price."""
    paid = after.price - before.price
    return (before.loss - after.loss) / paid if paid > 0 else inf


def steps(items: Items) -> tuple[Chosen, list[tuple[str, Choice]]]:
    """The cheapest choice of each item, and the changes from there on, those first that save most for their price."""
    hulls = {name: hull(choices) for name, choices in items.items()}
    moves = [
        (_saved(before, after), name, after)
        for name, corners in hulls.items()
        for before, after in itertools.pairwise(corners)
    ]
    # the sort is stable, and within an item what is saved falls, so that its corners stay in order
    ordered = sorted(moves, key=lambda move: -move[0])
    return {name: corners[0] for name, corners in hulls.items()}, [(name, after) for _, name, after in ordered]


def cheapest(items: Items, budget: float) -> Chosen | None:
    """The cheapest choices whose losses add up to at most `budget`; None where there are none such."""
    solutions = [chosen for chosen in (_table(items, budget), _along_the_hull(items, budget)) if chosen is not None]
    return min(solutions, key=price_of) if solutions else None


def loss_of(chosen: Chosen) -> float:
    """Return the sum of the losses."""
    return sum(choice.loss for choice in chosen.values())


def price_of(chosen: Chosen) -> float:
    """Return the sum of the prices."""
    return sum(choice.price for choice in chosen.values())


def least(items: Items) -> Chosen:
    """Choose the least loss for every item, and among equals the cheapest."""
    return {name: min(choices, key=lambda option: (option.loss, option.price)) for name, choices in items.items()}


def _along_the_hull(items: Items, budget: float) -> Chosen | None:
    """The first point of the frontier that meets the budget: where losses are too fine for the table."""
    chosen, further = steps(items)
    for name, choice in further:
        if loss_of(chosen) <= budget:
            break
        chosen[name] = choice
    return chosen if loss_of(chosen) <= budget else None


def _table(items: Items, budget: float) -> Chosen | None:
    if budget <= 0:
        return None
    best, taken = np.zeros(LEVELS + 1), list[npt.NDArray[np.int8]]()
    for choices in items.values():
        options = np.full((len(choices), LEVELS + 1), inf)
        for row, choice in zip(options, choices, strict=True):
            if choice.loss <= budget:
                parts = int(np.ceil(choice.loss / budget * LEVELS))
                row[parts:] = best[: LEVELS + 1 - parts] + choice.price
        taken.append(options.argmin(0).astype(np.int8))
        best = options.min(0)
    if not np.isfinite(best[-1]):
        return None
    chosen, level = Chosen(), LEVELS
    for (name, choices), column in reversed(list(zip(items.items(), taken, strict=True))):
        chosen[name] = choices[column[level]]
        level -= int(np.ceil(chosen[name].loss / budget * LEVELS))
    return dict(reversed(chosen.items()))
