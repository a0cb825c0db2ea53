"""Find the cheapest mix within a budget, by predicted losses that joint measurements correct.

Predicted losses add up; measured together they are not quite the sum. The ratio of the two changes little from a mix to
a like one, so it is interpolated, in logarithms, between the mixes that were measured, and the mix that is chosen is
measured before it is believed.

`cheapest` chooses one option for each item so that losses sum to at most a budget, at the least price. It is exact but
for the grid of losses: a table over items and budgets, a multiple-choice knapsack (Kellerer, Pferschy, Pisinger 2004,
"Knapsack Problems", chapter 11). Losses are rounded up to a part in `LEVELS` of the budget, so the result meets the
budget, and its price is at most that of the best for a budget smaller by one part an item. `steps` follows the corners
of the lower convex hulls by loss saved for the price: every point on the way is the cheapest of its own loss, and
together they are the frontier.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from ...options import KvCache
from ...quantize.scales.decisions import CACHE_PARTS
from .choices import CODES, FORMS, TWO_TERMS, Group, GroupForm, Mix, Price, RoundingName, Shape, changes, variant

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
    if paid > 0:
        return (before.loss - after.loss) / paid
    return inf


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


def along_the_hull(items: Items) -> Iterator[Chosen]:
    """Yield the points of the frontier: the cheapest choices, then those after each of the `steps`."""
    chosen, further = steps(items)
    yield chosen
    for name, choice in further:
        chosen = {**chosen, name: choice}
        yield chosen


def cheapest(items: Items, budget: float) -> Chosen | None:
    """The cheapest choices whose losses add up to at most `budget`; None where there are none such.

    Where losses are too fine for the table, the first point of the frontier that meets the budget.
    """
    on_hull = next((chosen for chosen in along_the_hull(items) if loss_of(chosen) <= budget), None)
    solutions = [chosen for chosen in (_table(items, budget), on_hull) if chosen is not None]
    return min(solutions, key=price_of, default=None)


def loss_of(chosen: Chosen) -> float:
    """Return the sum of the losses."""
    return sum(choice.loss for choice in chosen.values())


def price_of(chosen: Chosen) -> float:
    """Return the sum of the prices."""
    return sum(choice.price for choice in chosen.values())


def _table(items: Items, budget: float) -> Chosen | None:
    if budget <= 0:
        return None
    best = np.zeros(LEVELS + 1)
    taken: list[npt.NDArray[np.int8]] = []
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
    chosen = Chosen()
    level = LEVELS
    for (name, choices), column in reversed(list(zip(items.items(), taken, strict=True))):
        chosen[name] = choices[column[level]]
        level -= int(np.ceil(chosen[name].loss / budget * LEVELS))
    return dict(reversed(chosen.items()))


#: The price of a change: of equal mixes the one that changes least is taken.
CHANGED = 1e-9
#: The choices for the cache of a layer: codes, or the compute type.
CODED = "coded"
IN_BF16 = "wide"
#: Forms that cost the same, and lose nothing but the rounding of weights: a group is offered one of them.
EXACT: tuple[GroupForm, ...] = (TWO_TERMS, "weights_alone")
#: The smallest loss whose logarithm is taken.
SMALLEST = 1e-12


@dataclass(frozen=True)
class Losses:
    """Predicted losses in nats a token: `parts` group or cache tensor -> variant -> its loss alone; and the available
    roundings, cache forms and forms with codes of weights.

    A group or tensor that no token of the windows reached is not in `parts`: it loses nothing there, and nothing is
    known of other text. `Problem` leaves it as it is.
    """

    parts: Mapping[str, Mapping[str, float]]
    roundings: tuple[RoundingName, ...]
    caches: tuple[KvCache, ...]
    on_codes: tuple[GroupForm, ...]

    def group(self, name: str, form: GroupForm, rounding: str) -> float:
        """Return the loss of a group in a form; 0 in BF16, or where no token reached it."""
        if form == "bf16" or name not in self.parts:
            return 0.0
        return self.parts[name][variant(rounding, form)]

    def tensor(self, name: str) -> float:
        """Return the loss of a cache tensor in codes; 0 where no token reached it."""
        if name in self.parts:
            return self.parts[name][CODES]
        return 0.0

    def total(self, mix: Mix) -> float:
        """Return the loss of a mix: the sum of its parts."""
        cache = sum(losses[CODES] for name, losses in self.parts.items() if CODES in losses and mix.codes(name))
        return cache + sum(self.group(name, form, mix.rounding) for name, form in mix.forms.items())


class Correction:
    """Convert the predicted loss of a mix to the measured one, and back."""

    def __init__(self, pairs: Iterable[tuple[float, float]]):
        """By `pairs` of predicted and measured losses, at least one."""
        logarithms = np.log(np.maximum(sorted(pairs), SMALLEST))
        self.predicted = logarithms[:, 0]
        self.measured = np.maximum.accumulate(logarithms[:, 1])

    def to_measured(self, predicted: float) -> float:
        """Return the expected loss of a mix from its predicted one; beyond all pairs the nearest one's ratio."""
        return _between(predicted, self.predicted, self.measured)

    def to_predicted(self, expected: float) -> float:
        """Return the predicted loss that leads to an expected one."""
        return _between(expected, self.measured, self.predicted)


def _between(value: float, here: npt.NDArray[np.float64], there: npt.NDArray[np.float64]) -> float:
    if value <= 0:
        return 0.0
    at = float(np.log(max(value, SMALLEST)))
    inside = float(np.clip(at, here[0], here[-1]))
    return float(np.exp(np.interp(inside, here, there) + at - inside))


@dataclass(frozen=True)
class Problem:
    """The optimization problem: losses and shape, the price, and the mix of the run, which few changes should alter."""

    losses: Losses
    shape: Shape
    price: Price
    run_mix: Mix

    def cheapest(self, budget: float) -> Mix | None:
        """The cheapest mix that is predicted to lose at most `budget`, with the cache where that is no choice; None
        where there is none.
        """
        parts = self.losses.parts
        no_choice = [name for name in parts if CODES in parts[name] and name not in self.shape.cache]
        left = budget - sum(parts[name][CODES] for name in no_choice if self.run_mix.codes(name))

        def choose(items: Items) -> list[Chosen]:
            chosen = cheapest(items, left)
            return [] if chosen is None else [chosen]

        _, _, mix = min(self._priced(choose), key=lambda point: point[0], default=(0.0, 0.0, None))
        return mix

    def best(self) -> Mix:
        """Return the mix that loses least: all but one group in BF16, since a run without FP8 is none; groups of
        unknown loss stay as they are.
        """
        losses = self.losses
        forms = {name: form for name, form in self.finest().forms.items() if name in losses.parts}
        rounding = min(losses.roundings, key=lambda method: min(losses.group(*item, method) for item in forms.items()))
        left = min(forms, key=lambda name: losses.group(name, forms[name], rounding))
        for group in self.shape.groups:
            if group.name in forms and group.name != left and "bf16" in group.forms:
                forms[group.name] = "bf16"
        return Mix({**self.run_mix.forms, **forms}, rounding, losses.caches[0])

    @property
    def unknown(self) -> list[str]:
        """The groups and cache tensors of which no loss is known. They stay as the run has them: a choice without a
        loss would be free.
        """
        cache = self.shape.cache if len(self.losses.caches) > 1 else ()
        return [name for name in (*(g.name for g in self.shape.groups), *cache) if name not in self.losses.parts]

    def finest(self) -> Mix:
        """The mix with FP8 weights everywhere that loses least."""
        forms = {
            group.name: next(form for form in reversed(self._forms(group)) if form != "bf16")
            for group in self.shape.groups
        }
        return Mix(forms, self.losses.roundings[-1], self.losses.caches[0])

    def frontier(self) -> list[Mix]:
        """The cheapest mix of each loss, those that lose most first."""
        frontier: list[Mix] = []
        least = inf
        for _, loss, mix in sorted(self._priced(along_the_hull), key=lambda point: point[:2]):
            if loss < least:
                frontier.append(mix)
                least = loss
        return frontier

    def _priced(self, choose: Callable[[Items], Iterable[Chosen]]) -> Iterator[tuple[float, float, Mix]]:
        """Yield price, loss and mix of what `choose` returns of the options for groups and layers, for each choice for
        the whole model; not where nothing would be FP8.
        """
        for rounding in self.losses.roundings:
            groups = {group.name: self._choices(group, rounding) for group in self.shape.groups}
            for kv_cache in self.losses.caches:
                for chosen in choose(groups | self._layers(kv_cache)):
                    if (mix := self._mix(rounding, kv_cache, chosen)) is not None:
                        yield price_of(chosen) + self._model_price(rounding, kv_cache), loss_of(chosen), mix

    def _layers(self, kv_cache: KvCache) -> dict[str, Sequence[Choice]]:
        """Offer each layer a cache in codes, as `kv_cache` has it, and one that stays in BF16; none where the whole
        cache stays in BF16.
        """
        parts = CACHE_PARTS[kv_cache]
        run_mix = self.run_mix
        layers: dict[str, Sequence[Choice]] = {}
        for module, tensors in self.shape.cached.items() if parts else ():
            coded = [tensor for tensor in tensors if tensor[-1] in parts]
            offered = {CODED: coded, IN_BF16: []}
            if not all(tensor in self.losses.parts or run_mix.codes(tensor) for tensor in coded):
                del offered[CODED]
            choices = []
            for name, in_codes in offered.items():
                held = sum(self.shape.tensor_bytes(tensor, tensor in in_codes) for tensor in tensors)
                changed = run_mix.kv_cache == kv_cache and run_mix.leaves_in_bf16(module) != (name == IN_BF16)
                price = self.price.combine(self.price.positions * held, 0) + CHANGED * changed
                choices.append(Choice(name, sum(map(self.losses.tensor, in_codes)), price))
            layers[module] = choices
        return layers

    def _choices(self, group: Group, rounding: RoundingName) -> Sequence[Choice]:
        return [
            Choice(
                form,
                self.losses.group(group.name, form, rounding),
                self.price.combine(group.bytes_of(form), group.operations_of(form))
                + CHANGED * (form != self.run_mix.forms[group.name]),
            )
            for form in self._forms(group)
        ]

    def _forms(self, group: Group) -> list[GroupForm]:
        """List the forms that `group` may take: one of those that lose nothing but the rounding of weights; its form in
        the run where no loss of it is known.
        """
        if group.name not in self.losses.parts:
            return [self.run_mix.forms[group.name]]
        predicted = (*self.losses.on_codes, "weights_alone", "bf16")
        possible = [form for form in FORMS if form in predicted and form in group.forms]
        exact = [form for form in EXACT if form in possible]
        taken = self.run_mix.forms[group.name] if self.run_mix.forms[group.name] in exact else next(iter(exact), None)
        return [form for form in possible if form not in EXACT or form == taken]

    def _model_price(self, rounding: RoundingName, kv_cache: KvCache) -> float:
        """Return the price of the choices for the whole model: a cache that stays in BF16 throughout, and changes of
        rounding and cache.
        """
        changed = (rounding != self.run_mix.rounding) + (kv_cache != self.run_mix.kv_cache)
        in_bf16 = sum(self.shape.tensor_bytes(name, False) for name in self.shape.cache) if kv_cache == "off" else 0
        return self.price.combine(self.price.positions * in_bf16, 0) + CHANGED * changed

    def _mix(self, rounding: RoundingName, kv_cache: KvCache, chosen: Mapping[str, Choice]) -> Mix | None:
        """The mix of these choices; None where nothing of it would be FP8."""
        forms = {group.name: form for group in self.shape.groups for form in FORMS if chosen[group.name].name == form}
        if set(forms.values()) == {"bf16"}:
            return None
        in_bf16 = tuple(module for module in self.shape.cached if module in chosen and chosen[module].name == IN_BF16)
        if in_bf16 and len(in_bf16) == len(self.shape.cached):
            return Mix(forms, rounding, "off")
        return Mix(forms, rounding, kv_cache, in_bf16)


def same(one: Mix, other: Mix) -> bool:
    """Tell whether two mixes are the same."""
    return not changes(one, other)
