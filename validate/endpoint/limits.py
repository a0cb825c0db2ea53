"""Limits on how far answers may be from a run's runtimes, taken from how far these are from each other.

Three measures, each of which suffices to exclude a model:

- KL, in nats: small deviations of logits by δ make a KL of δ² / 2 (in the metric of the probabilities), so a limit of f
  times a KL is one of √f times the deviation;
- flips, the share of positions with another likeliest token: those whose two likeliest are nearer to each other than δ,
  so that their number grows with δ, and the limit that belongs to f times the KL is √f times the flips;
- loss, the difference of the mean losses of the text's own tokens, in nats, with its sign: what perplexity is made of.
  Rounding moves single losses by some δ either way and their mean by little, so it notices what raises them all. Its
  limit is f times the far end of the same interval for the run's own runtimes: their mean difference may be nothing.

A measure is beyond its limit where it is so in its whole interval of 95 % over windows (`bootstrap`), and may be beyond
where it is so in a part. KL is compared position by position, since both distances are large at the same ones. Flips
are held against the share of all kept positions, and none of n against 3 / n, which that excludes at 95 % (the rule of
three, Hanley and Lippman-Hand 1983).

Where only likeliest tokens are known, there are flips alone, and mostly at positions where the runtimes differ. Those
at which all runtimes agree are held against the same limit: an implementation flips fewer of them than of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..accuracy.bootstrap import Bootstrap, MeanInterval
from ..accuracy.top_divergence import Values
from .distance import Distances
from .document import Noticed

#: The least KL and loss, in nats: the run's log-probabilities are of single precision.
SINGLE = 1e-6
#: The least share of n positions that none of them excludes, times n.
RULE_OF_THREE = 3.0


class Excess(NamedTuple):
    """By how much a measure is more than its limit, and that limit; below zero where it is less."""

    measure: str
    interval: MeanInterval
    limit: float

    @property
    def sure(self) -> bool:
        """Tell whether it is more in the whole interval."""
        return self.interval.low > 0

    @property
    def possible(self) -> bool:
        """Tell whether it is more in a part of the interval."""
        return self.interval.high > 0

    @property
    def noticed(self) -> float:
        """The least value that would have been more in the whole interval, were it as wide."""
        return self.limit + self.interval.mean - self.interval.low


@dataclass(frozen=True)
class Noise:
    """The largest distances between some runtimes of the run: `kl` float64 [n] in nats of the pair that is furthest
    apart, `flips` a share of all kept positions, `loss` in nats, the far end of an interval.
    """

    kl: Values
    flips: float
    loss: float


def noise_of(pairs: Sequence[Distances], shares: Sequence[float], kept: int, bootstrap: Bootstrap) -> Noise:
    """The noise of `pairs` of runtimes at the answered positions; `shares`: their flips, of all `kept` positions."""
    losses = [bootstrap.interval(pair.loss) for pair in pairs]
    return Noise(
        kl=np.maximum(max((pair.kl for pair in pairs), key=lambda kl: float(np.nanmean(kl))), SINGLE),
        flips=max(*shares, RULE_OF_THREE / kept),
        loss=max(SINGLE, *(max(abs(each.low), abs(each.high)) for each in losses)),
    )


def excesses(
    found: Distances, noise: Noise, factor: float, agreed: npt.NDArray[np.bool_] | None, bootstrap: Bootstrap
) -> list[Excess]:
    """By how much each measure of `found` is more than `factor` times `noise`; measures that are not known are left
    out.

    `agreed` bool [n]: the positions at which all runtimes have one likeliest token, where only such tokens are known;
    else None.
    """
    share = sqrt(factor) * noise.flips
    flips = found.flips if agreed is None else np.where(agreed, found.flips, np.nan)
    measures = [Excess("flips", bootstrap.interval(flips - share), share)]
    if agreed is None:
        kl = bootstrap.interval(found.kl - factor * noise.kl)
        measures.insert(0, Excess("KL", kl, factor * float(np.nanmean(noise.kl))))
        measures.append(
            Excess("loss", _beyond(bootstrap.interval(found.loss), factor * noise.loss), factor * noise.loss)
        )
    return [each for each in measures if np.isfinite(each.interval.mean) and np.isfinite(each.limit)]


def _beyond(found: MeanInterval, limit: float) -> MeanInterval:
    """The interval of the distance from zero of what lies in `found`, less `limit`."""
    ends = sorted((abs(found.low), abs(found.high)))
    least = 0.0 if found.low <= 0 <= found.high else ends[0]
    return MeanInterval(abs(found.mean) - limit, least - limit, ends[1] - limit)


def noticed(measures: Sequence[Excess]) -> Noticed:
    """The least differences that would have been more than the limits."""
    least = {each.measure: each.noticed for each in measures}
    loss = least.get("loss")
    return Noticed(kl_nats=least.get("KL"), flips=least.get("flips"), perplexity=None if loss is None else expm1(loss))
