"""Judge answers by their distances from the run's runtimes: the validated model, another arithmetic, another model, or
another prompt.

KL, flips and loss (`excesses`) each suffice to exclude: the validated model is at most `FURTHER` times as far as a
second runtime of its arithmetic, and the model in any arithmetic at most `FAR` times the largest distance between two
of the run's runtimes. Of the arithmetics that this leaves the answers are in that of the nearest runtime, or of any
that is not clearly further. `docs/decisions/0060` and `0099` have the limits' reasons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import expm1, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...options import RUNTIMES
from ..accuracy.bootstrap import Bootstrap, MeanInterval
from ..accuracy.document import Estimate
from ..accuracy.top_divergence import Values
from ..accuracy.top_logits import TopTokens
from .answers import LikelyTokens
from .distance import Distances, distances, flip_shares, runtime_distances
from .document import BF16, VALIDATED, Noticed, RuntimeDistance, Verdict

#: The least share of a runtime's error in answers of its arithmetic, and limits of distances, as factors.
SHARE = 0.25
FURTHER = 2.0
FAR = 10.0
#: The factor that the distance must fall to without a BOS, for the BOS to be the reason.
CLEARLY = 0.25
#: Stands among the arithmetics where these positions do not exclude another model.
ANOTHER = "another model"
#: The runtime of the original in BF16.
ORIGINAL = "bf16"
#: The arithmetics that lose no more than was validated, and what is said where the answers are in one of them.
AS_GOOD = {VALIDATED, BF16}
NO_MORE_LOST = "whichever it is, no more is lost than was validated"
#: The remedy where all windows were sent and nothing else is known.
LONGER_TEXT = "validate on a longer text"
#: The runtimes of servers' own arithmetics (`server_arithmetics`): an FP8 cache that is written by 1.0 in place of the
#: run's scales, and inputs that are not coded.
UNIT_CACHE = "cache-by-1"
WEIGHTS_ALONE = "weights-alone"
#: The names of the arithmetics of runtimes that do not serve the run.
ARITHMETICS = {
    UNIT_CACHE: "an FP8 cache written by 1.0, so that its cache scales look unused",
    WEIGHTS_ALONE: "FP8 weights and inputs in BF16, as vLLM computes on a CPU with AMX",
    **{name: runtime.arithmetic for name, runtime in RUNTIMES.items() if runtime.arithmetic},
}
#: The least KL and loss, in nats: the run's log-probabilities are of single precision.
SINGLE = 1e-6
#: The least share of n positions that none of them excludes, times n.
RULE_OF_THREE = 3.0


class Excess(NamedTuple):
    """The excess of a measure over its limit, with its interval, and that limit; negative where the measure is less."""

    measure: str
    interval: MeanInterval
    limit: float

    @property
    def sure(self) -> bool:
        """Tell whether the measure exceeds its limit in the whole interval."""
        return self.interval.low > 0

    @property
    def possible(self) -> bool:
        """Tell whether the measure exceeds its limit in a part of the interval."""
        return self.interval.high > 0

    @property
    def noticed(self) -> float:
        """The least value whose whole interval would have been above the limit, were it as wide."""
        return self.limit + self.interval.mean - self.interval.low


@dataclass(frozen=True)
class Noise:
    """The largest distances between some runtimes of the run: `kl` float64 [n] in nats of the pair that is furthest
    apart, `flips` as a share of all positions, `loss` in nats, the far end of an interval.
    """

    kl: Values
    flips: float
    loss: float


def noise_of(pairs: Sequence[Distances], shares: Sequence[float], positions: int, bootstrap: Bootstrap) -> Noise:
    """Return the noise of `pairs` of runtimes at the answered positions; `shares`: their flips, of all `positions`."""
    losses = [bootstrap.interval(pair.loss) for pair in pairs]
    return Noise(
        kl=np.maximum(max((pair.kl for pair in pairs), key=lambda kl: float(np.nanmean(kl))), SINGLE),
        flips=max(*shares, RULE_OF_THREE / positions),
        loss=max(SINGLE, *(max(abs(interval.low), abs(interval.high)) for interval in losses)),
    )


def excesses(
    distance: Distances, noise: Noise, factor: float, agreed: npt.NDArray[np.bool_] | None, bootstrap: Bootstrap
) -> list[Excess]:
    """Compute the excess of each measure of `distance` over `factor` times `noise`; unknown measures are left out.

    `agreed` bool [n]: the positions at which all runtimes have one likeliest token, where only such tokens are known;
    else None.
    """
    share = sqrt(factor) * noise.flips
    flips = distance.flips if agreed is None else np.where(agreed, distance.flips, np.nan)
    measures = [Excess("flips", bootstrap.interval(flips - share), share)]
    if agreed is None:
        kl = bootstrap.interval(distance.kl - factor * noise.kl)
        measures.insert(0, Excess("KL", kl, factor * float(np.nanmean(noise.kl))))
        measures.append(
            Excess("loss", _beyond(bootstrap.interval(distance.loss), factor * noise.loss), factor * noise.loss)
        )
    return [excess for excess in measures if np.isfinite(excess.interval.mean) and np.isfinite(excess.limit)]


def _beyond(interval: MeanInterval, limit: float) -> MeanInterval:
    """Return the interval of the absolute value of a quantity with that `interval`, less `limit`."""
    ends = sorted((abs(interval.low), abs(interval.high)))
    least = 0.0 if interval.low <= 0 <= interval.high else ends[0]
    return MeanInterval(abs(interval.mean) - limit, least - limit, ends[1] - limit)


def noticed(measures: Sequence[Excess]) -> Noticed:
    """The least differences that would have been more than the limits."""
    least = {excess.measure: excess.noticed for excess in measures}
    loss = least.get("loss")
    return Noticed(kl_nats=least.get("KL"), flips=least.get("flips"), perplexity=None if loss is None else expm1(loss))


@dataclass(frozen=True)
class Judged:
    """A verdict, its sentence, the arithmetics that fit, and the distances it is by, the nearest runtime first; and the
    differences that would not have passed, where it is by limits.
    """

    verdict: Verdict
    sentence: str
    arithmetics: list[str]
    runtimes: list[RuntimeDistance]
    perplexity: Estimate | None
    noticed: Noticed | None = None


def judge(tops: TopTokens, answers: LikelyTokens, windows: npt.NDArray[np.int64], more: str = LONGER_TEXT) -> Judged:
    """Judge `answers`; `windows` int64 [positions]: the window of each row of `tops`. `more`: the remedy where all of
    these windows were sent, and do not tell (`more.more_positions`).
    """
    to_runtimes = distances(tops, answers)
    between = runtime_distances(tops, answers)
    first = np.stack([top.tokens[answers.rows, 0] for top in tops.runtimes.values()])
    field = Field(
        to_runtimes,
        {(r, c): between[c][r] for r in to_runtimes for c in to_runtimes if r != c},
        flip_shares(tops),
        len(tops.nll[next(iter(to_runtimes))]),
        None if answers.with_logprobs else (first == first[0]).all(axis=0),
        bootstrap := Bootstrap(windows[answers.rows]),
        more if len(np.unique(windows[answers.rows])) == len(np.unique(windows)) else "send more --windows",
    )
    verdict, sentence, arithmetics = _verdict(field)
    power = noticed(field.excesses_of(field.validated[0])) if VALIDATED in arithmetics else None
    if power and ANOTHER not in arithmetics:
        sentence += f"; further than {power} would not pass"
    if not field.by_kl:
        sentence += (
            "; this is by likeliest tokens alone, mostly where the run's runtimes differ in them: an arithmetic that "
            "the run does not have cannot be told from these"
        )
    rows = [_row(name, to_runtimes[name], tops, answers, bootstrap) for name in field.order]
    return Judged(verdict, sentence, arithmetics, rows, _perplexity(answers, bootstrap), power)


def arithmetic_of(runtime: str) -> str:
    """Name the arithmetic that a runtime computes in, as the verdict does."""
    return ARITHMETICS.get(runtime, VALIDATED)


@dataclass(frozen=True)
class Field:
    """The distances of the answers `to` each runtime, and `between` runtimes (r, c), of r from c, at every answered
    position; `shares`: the flips between these, of all `positions`.

    `agreed`: where only likeliest tokens are known, the positions at which all runtimes have the same; else None.
    `more`: the remedy where these positions are too few to tell.
    """

    to: Mapping[str, Distances]
    between: Mapping[tuple[str, str], Distances]
    shares: Mapping[tuple[str, str], float]
    positions: int
    agreed: npt.NDArray[np.bool_] | None
    bootstrap: Bootstrap
    more: str

    @property
    def by_kl(self) -> bool:
        """Tell whether there are log-probabilities."""
        return self.agreed is None

    def size(self, pair: Distances) -> float:
        """Return the mean KL, or of flips where log-probabilities are unknown."""
        return float(np.nanmean(pair.compared(self.by_kl)))

    @property
    def order(self) -> list[str]:
        """The runtimes, the nearest first."""
        return sorted(self.to, key=lambda name: self.size(self.to[name]))

    @property
    def validated(self) -> list[str]:
        """The runtimes of the validated arithmetic, the nearest first."""
        return [name for name in self.order if arithmetic_of(name) == VALIDATED]

    def nearer(self, runtime: str, other: str) -> bool:
        """Tell whether the answers are clearly nearer to `runtime` than to `other`."""
        to, of = (self.to[name].compared(self.by_kl) for name in (other, runtime))
        return self.bootstrap.interval(to - of).low > 0

    def nearer_to_original(self) -> str | None:
        """Say that the answers are clearly, in the whole interval, nearer by KL to the original in BF16 than every
        validated runtime is, and not clearly further by flips or loss: then no more is lost than was validated. None
        where they are not.
        """
        if ORIGINAL not in self.to or not self.by_kl or not self.validated:
            return None
        to = self.to[ORIGINAL]
        interval = self.bootstrap.interval
        nearest = min(self.validated, key=lambda name: self.size(self.between[name, ORIGINAL]))
        theirs = self.between[nearest, ORIGINAL]
        further = (interval(to.flips - theirs.flips).low, interval(to.loss - theirs.loss).low)
        if not interval(to.kl - theirs.kl).high < 0 or any(low > 0 for low in further):
            return None
        return (
            f"nearer to BF16 than what was validated ({_distance_text(self.size(to), True)} from {ORIGINAL}, where "
            f"{nearest} is {self.size(theirs):.3g} away)"
        )

    def may_be(self, other: str) -> bool:
        """Tell whether the answers may be in the arithmetic of `other`, which was not validated: neither clearly more
        than `FURTHER` times as far from what was validated as it is, nor clearly with less than `SHARE` of its error.
        """
        validated = self.validated[0]
        interval = self.bootstrap.interval
        error, distance, rest = (
            pair.compared(self.by_kl) for pair in (self.between[validated, other], self.to[validated], self.to[other])
        )
        shared = (error + distance - rest) / 2
        return not interval(distance - FURTHER * error).low > 0 and not interval(shared - SHARE * error).high < 0

    def fits(self) -> list[str]:
        """The runtimes whose arithmetic the answers may have, none clearly further than the nearest; those of the
        validated arithmetic first, and then the nearest.
        """
        if not self.validated:
            return self.order[:1]
        near = not any(excess.sure for excess in self.excesses_of(self.validated[0]))
        possible = [name for name in self.order if (near if name in self.validated else self.may_be(name))]
        alike = [name for name in possible if name == possible[0] or not self.nearer(possible[0], name)]
        return sorted(alike, key=lambda name: name not in self.validated)

    def excesses_of(self, nearest: str) -> list[Excess]:
        """Compute the excesses of the distances from a runtime over those that an implementation of its arithmetic may
        have.
        """
        pairs = [(nearest, name) for name in self.validated if name != nearest]
        others = [(name, nearest) for name in self.to if arithmetic_of(name) != VALIDATED]
        if not pairs and others:
            pairs = [min(others, key=lambda pair: self.size(self.between[pair]))]
        return self._excesses(nearest, pairs, FURTHER)

    def far_excesses(self) -> list[Excess]:
        """Compute the excesses of the distances from the nearest runtime over those that any arithmetic of the model
        may have.
        """
        return self._excesses(self.order[0], [*self.between], FAR)

    def _excesses(self, runtime: str, pairs: list[tuple[str, str]], factor: float) -> list[Excess]:
        if not pairs:
            return []
        between = [self.between[pair] for pair in pairs]
        shares = [self.shares[pair] for pair in pairs]
        noise = noise_of(between, shares, self.positions, self.bootstrap)
        return excesses(self.to[runtime], noise, factor, self.agreed, self.bootstrap)


def _verdict(field: Field) -> tuple[Verdict, str, list[str]]:
    nearest = field.order[0]
    where = f"{_distance_text(field.size(field.to[nearest]), field.by_kl)} from {nearest}, the nearest"
    far = field.far_excesses()
    if any(excess.sure for excess in far):
        alike = not any(excess.measure == "flips" and excess.sure for excess in field.excesses_of(nearest))
        return "other-model", _far_sentence(field.to[nearest], far, where, alike), []
    fits = field.fits()
    if not fits:
        unknown = "in an arithmetic that the run does not have (a cache in another type, other scales, other kernels)"
        return "other-arithmetic", f"the model {unknown}: {where}", []
    kinds = list(dict.fromkeys(arithmetic_of(name) for name in fits))
    where = f"{_distance_text(field.size(field.to[fits[0]]), field.by_kl)} from {fits[0]}"
    if VALIDATED in kinds and (not far or any(excess.possible for excess in far)):
        nearer = field.nearer_to_original()
        if nearer is None or not {*kinds} <= AS_GOOD:
            return "undecided", _open_sentence(kinds, where, field.more if far else None), [*kinds, ANOTHER]
        return "undecided", f"{', or '.join(kinds)}: {where}, and {nearer}: {NO_MORE_LOST}", kinds
    if len(kinds) > 1:
        said = f"{', or '.join(kinds)}: {where}, and these positions do not tell which"
        if {*kinds} <= AS_GOOD:
            return "undecided", f"{said}: {NO_MORE_LOST}", kinds
        return "undecided", f"{said}; {field.more}", kinds
    if kinds != [VALIDATED]:
        return "other-arithmetic", f"the model, but in {kinds[0]}: {where}", kinds
    return "validated", f"the validated model: {where}", kinds


def _far_sentence(nearest: Distances, far: list[Excess], where: str, alike: bool) -> str:
    """State the measures that exclude the model, and a possible cause where its likeliest tokens are `alike`."""
    limits = ", ".join(f"{excess.measure} (at most {excess.limit:.2g})" for excess in far if excess.sure)
    sentence = (
        f"another model: {where}, and {nearest.flips.mean():.0%} of likeliest tokens are others; excluded by {limits}"
    )
    if alike:
        return f"{sentence}; not by flips, so that it may be the model at another temperature or softcap"
    return sentence


def _open_sentence(kinds: list[str], where: str, more: str | None) -> str:
    """State why another model is not excluded; `more`: the remedy, None where there is no limit to exclude it by."""
    if more is not None:
        return f"{', or '.join(kinds)}, or {ANOTHER}: {where}, and so few positions do not tell; {more}"
    return (
        f"{', or '.join(kinds)}, or {ANOTHER}: {where}, and a run of one runtime does not tell how far another "
        "implementation may be; validate with a second runtime"
    )


def _distance_text(distance: float, by_kl: bool) -> str:
    if by_kl:
        return f"{distance:.3g} nats of KL"
    return f"{distance:.1%} of likeliest tokens"


def _row(
    name: str, to_runtime: Distances, tops: TopTokens, answers: LikelyTokens, bootstrap: Bootstrap
) -> RuntimeDistance:
    known = np.isfinite(answers.nll)
    kl = np.isfinite(to_runtime.kl).any()
    complete = bool(known.all()) and len(known) > 0
    return RuntimeDistance(
        runtime=name,
        validated=arithmetic_of(name) == VALIDATED,
        kl_nats=bootstrap.interval(to_runtime.kl).estimate if kl else None,
        rest=float(np.nanmean(to_runtime.rest)) if kl else None,
        flips=bootstrap.interval(to_runtime.flips).estimate,
        loss_difference_nats=float(np.abs(to_runtime.loss[known]).mean()) if known.any() else None,
        perplexity=float(np.exp(tops.nll[name][answers.rows].mean(dtype=np.float64))) if complete else None,
    )


def _perplexity(answers: LikelyTokens, bootstrap: Bootstrap) -> Estimate | None:
    if not len(answers.nll) or not np.isfinite(answers.nll).all():
        return None
    return MeanInterval(*(float(np.exp(nll)) for nll in bootstrap.interval(answers.nll))).estimate


def other_count(answers: LikelyTokens) -> str | None:
    """State that the server counts other tokens of the prompts than were sent; None where it does not."""
    if answers.counted in (0, answers.sent):
        return None
    return (
        f"the server read {answers.counted:,} tokens where {answers.sent:,} were sent: it sets a BOS or a chat "
        "template before a prompt, or leaves one out"
    )


def judge_prompt(judged: Judged, answers: LikelyTokens, without: Judged | None) -> Judged:
    """Judge whether the prompt, and not the model, is another one: by the tokens that the server counts, or since it is
    much nearer `without` the tokens that the text's windows begin with.
    """
    reason = other_count(answers)
    if reason is None and without and _kl(without) < CLEARLY * _kl(judged):
        reason = (
            f"the server sets a BOS itself: without the one that was sent it is {_kl(without):.3g} nats from "
            f"{without.runtimes[0].runtime}, with it {_kl(judged):.3g}"
        )
    if reason is None:
        return judged
    return replace(judged, verdict="other-prompt", sentence=reason)


def judge_reading(judged: Judged, difference: str | None) -> Judged:
    """Judge a server that reads texts or chats as other tokens than the run does; `difference` says how."""
    if difference is None or judged.verdict == "other-prompt":
        return judged
    if judged.verdict in ("validated", "undecided"):
        return replace(judged, verdict="other-prompt", sentence=f"{difference}; by the run's tokens, {judged.sentence}")
    return replace(judged, sentence=f"{judged.sentence}; and {difference}")


def _kl(judged: Judged) -> float:
    nearest = judged.runtimes[0].kl_nats
    return nearest.mean if nearest else float("inf")
