"""Find the cheapest mix within a budget, by predicted losses that joint measurements correct.

Predicted losses add up; measured together they are not quite the sum. The ratio of the two changes little from a mix to
a like one, so it is interpolated, in logarithms, between the mixes that were measured, and the mix that is chosen is
measured before it is believed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...options import KvCache
from ...quantize.scales.decisions import CACHE_PARTS
from .choices import FORMS, Form, Group, Mix, Price, RoundingName, Shape, changes
from .frontier import Choice, Items, cheapest, loss_of, price_of, steps
from .gradients import CODES, variant

#: The price of a change: of equal mixes the one that changes least is taken.
CHANGED = 1e-9
#: The choices for the cache of a layer: codes, or the compute type.
CODED, WIDE = "coded", "wide"
#: Forms that cost the same, and lose nothing but the rounding of weights: a group is offered one of them.
EXACT: tuple[Form, ...] = ("two_terms", "weights_alone")
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
    on_codes: tuple[Form, ...]

    def group(self, name: str, form: Form, rounding: str) -> float:
        """Return the loss of a group in a form; 0 in BF16, or where no token reached it."""
        return 0.0 if form == "bf16" or name not in self.parts else self.parts[name][variant(rounding, form)]

    def tensor(self, name: str) -> float:
        """Return the loss of a cache tensor in codes; 0 where no token reached it."""
        return self.parts[name][CODES] if name in self.parts else 0.0

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
        """The cheapest mix that is predicted to lose at most `budget`; None where there is none."""
        priced: list[tuple[float, Mix]] = []
        for rounding, kv_cache, items in self._model_choices():
            chosen = cheapest(items, budget)
            if chosen is not None and (mix := self._mix(rounding, kv_cache, chosen)) is not None:
                priced.append((price_of(chosen) + self._model_price(rounding, kv_cache), mix))
        return min(priced, key=lambda pair: pair[0])[1] if priced else None

    def best(self) -> Mix:
        """Return the mix that loses least: all but one group in BF16, since a run without FP8 is none; groups of
        unknown loss stay as they are.
        """
        losses = self.losses
        finest = {name: form for name, form in self.finest().forms.items() if name in losses.parts}
        rounding = min(losses.roundings, key=lambda method: min(losses.group(*item, method) for item in finest.items()))
        left = min(finest, key=lambda name: losses.group(name, finest[name], rounding))
        wide = {group.name for group in self.shape.groups if "bf16" in group.forms and group.name != left}
        forms: dict[str, Form] = {name: "bf16" if name in wide else form for name, form in finest.items()}
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
        points: list[tuple[float, float, Mix]] = []
        for rounding, kv_cache, items in self._model_choices():
            chosen, further = steps(items)
            for name, choice in [("", None), *further]:
                chosen |= {name: choice} if choice else {}
                if (mix := self._mix(rounding, kv_cache, chosen)) is not None:
                    price = price_of(chosen) + self._model_price(rounding, kv_cache)
                    points.append((price, loss_of(chosen), mix))
        frontier: list[tuple[float, float, Mix]] = []
        for point in sorted(points, key=lambda entry: entry[:2]):
            if not frontier or point[1] < frontier[-1][1]:
                frontier.append(point)
        return [mix for _, _, mix in frontier]

    def _model_choices(self) -> Iterable[tuple[RoundingName, KvCache, Items]]:
        """The choices for the whole model, with the options for each group under each of them."""
        for rounding in self.losses.roundings:
            items = {group.name: self._choices(group, rounding) for group in self.shape.groups}
            for kv_cache in self.losses.caches:
                yield rounding, kv_cache, items | self._layers(kv_cache)

    def _layers(self, kv_cache: KvCache) -> dict[str, Sequence[Choice]]:
        """Offer each layer a cache in codes, as `kv_cache` has it, and one that stays in BF16; none where the whole
        cache stays in BF16.
        """
        parts, run_mix = CACHE_PARTS[kv_cache], self.run_mix

        def choice(name: str, module: str, tensors: Sequence[str]) -> Choice:
            coded = [tensor for tensor in tensors if name == CODED and tensor[-1] in parts]
            held = sum(self.shape.tensor_bytes(tensor, tensor in coded) for tensor in tensors)
            changed = run_mix.kv_cache == kv_cache and (module in run_mix.wide_cache) != (name == WIDE)
            price = self.price.combine(self.price.positions * held, 0) + CHANGED * changed
            return Choice(name, sum(map(self.losses.tensor, coded)), price)

        def offered(tensors: Sequence[str]) -> Sequence[str]:
            untold = [tensor for tensor in tensors if tensor[-1] in parts and tensor not in self.losses.parts]
            return (CODED, WIDE) if all(map(run_mix.codes, untold)) else (WIDE,)

        return {
            module: [choice(name, module, tensors) for name in offered(tensors)]
            for module, tensors in (self.shape.cached if parts else {}).items()
        }

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

    def _forms(self, group: Group) -> list[Form]:
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
        wide = sum(self.shape.tensor_bytes(name, False) for name in self.shape.cache) if kv_cache == "off" else 0
        return self.price.combine(self.price.positions * wide, 0) + CHANGED * changed

    def _mix(self, rounding: RoundingName, kv_cache: KvCache, chosen: Mapping[str, Choice]) -> Mix | None:
        """The mix of these choices; None where nothing of it would be FP8."""
        forms = {group.name: form for group in self.shape.groups for form in FORMS if chosen[group.name].name == form}
        if set(forms.values()) == {"bf16"}:
            return None
        wide = tuple(module for module in self.shape.cached if module in chosen and chosen[module].name == WIDE)
        if wide and len(wide) == len(self.shape.cached):
            return Mix(forms, rounding, "off")
        return Mix(forms, rounding, kv_cache, wide)


def same(one: Mix, other: Mix) -> bool:
    """Tell whether two mixes are the same."""
    return not changes(one, other)
