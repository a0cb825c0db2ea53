"""Search for the cheapest mix whose measured loss is within an aim.

`fp8q tune` and `fp8q run` search alike. Losses are predicted, the mix that seems cheapest by them is measured, and what
was measured corrects the prediction of the next. They differ in where losses come from, in what measures a mix, and in
how near to the aim is near enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .choices import Mix
from .solve import Correction, Problem, same


@dataclass
class Search:
    """The state of a search: the problem, the measured KL in nats a token of the mixes that were `tried`, and of
    `anchors`, which correct predictions and are not chosen.

    `measure` returns the KL of a mix. A mix that uses the share `close` of what is aimed at is not made cheaper;
    `rounds`: the most mixes that are measured for one aim.
    """

    problem: Problem
    measure: Callable[[Mix], float]
    close: float
    rounds: int
    anchors: list[tuple[Mix, float]] = field(default_factory=list)
    tried: list[tuple[Mix, float]] = field(default_factory=list)

    def anchor(self, *mixes: Mix) -> None:
        """Correct predictions by `mixes`."""
        self.anchors += [(mix, self.measure(mix)) for mix in mixes]

    def attempt(self, mix: Mix) -> float:
        """Measure `mix`, which may be chosen from now on; return its KL."""
        kl_nats = self.measure(mix)
        self.tried.append((mix, kl_nats))
        return kl_nats

    def measured(self, mix: Mix) -> float | None:
        """Return the measured KL of `mix`, if any."""
        return next((kl for other, kl in self._points if same(mix, other)), None)

    def expected(self, mix: Mix) -> float:
        """Return the KL of `mix` that is measured, or else expected by the measured ones."""
        known = self.measured(mix)
        if known is None:
            return self.correction().to_measured(self.problem.losses.total(mix))
        return known

    def correction(self) -> Correction:
        """The correction of predictions by all that was measured."""
        return Correction((self.problem.losses.total(mix), kl) for mix, kl in self._points)

    def within(self, aim: float) -> tuple[Mix, float]:
        """Measure mixes until one is close to `aim`; return the cheapest of those tried whose KL is at most `aim`, or
        else the one that loses least, with its KL.
        """
        for _ in range(self.rounds):
            if (mix := self.next_mix(aim)) is None:
                break
            self.attempt(mix)
        within = [(mix, kl) for mix, kl in self.tried if kl <= aim]
        if within:
            return min(within, key=lambda pair: self.price(pair[0]))
        return min(self.tried, key=lambda pair: pair[1])

    def next_mix(self, aim: float) -> Mix | None:
        """The mix to measure next for a KL of at most `aim`; None where that would tell nothing new."""
        finest = self.problem.finest()
        if self.measured(finest) is None:
            return finest
        if any(self.close * aim <= kl <= aim for _, kl in self.tried):
            return None
        mix = self.problem.cheapest(self.correction().to_predicted(aim)) or self.problem.best()
        return None if any(same(mix, other) for other, _ in self.tried) else mix

    def price(self, mix: Mix) -> float:
        """Return the price of `mix`."""
        return self.problem.price.of_cost(self.problem.shape.cost(mix))

    @property
    def _points(self) -> list[tuple[Mix, float]]:
        return self.anchors + self.tried
