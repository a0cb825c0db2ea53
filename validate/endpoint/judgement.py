"""Judge answers by their distances from the run's runtimes: the validated model, another arithmetic, another model, or
another prompt.

Three distances give the share that the answers have of the error of a runtime in another arithmetic (`Field.share`).
The answers are that arithmetic's where the share is clearly, in its whole interval, more than `SHARE`, and the
validated model's where it is clearly less than `NONE` for every such runtime; in between that cannot be told.

Size counts too, of KL, flips and loss (`excesses`), any of which suffices to exclude: the validated model is at most
`FURTHER` times as far as a second runtime of its arithmetic, and the model in any arithmetic at most `FAR` times the
largest distance between two of the run's runtimes. `docs/compare.md` has the derivation and the limits' reasons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import expm1, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...options import NOT_SERVED, ONE_TERM_ALONE
from ..accuracy.bootstrap import Bootstrap, MeanInterval
from ..accuracy.document import Estimate
from ..accuracy.top_divergence import Values
from ..accuracy.top_logits import KeptTokens
from .answers import LikelyTokens
from .distance import Distances, distances, flip_shares, own_distances
from .document import BF16, VALIDATED, Noticed, RuntimeDistance, Verdict

#: Limits of the share of an error (`HALF`: with one validated runtime), and of distances, as factors.
NONE, SHARE, HALF = 0.1, 0.25, 0.5
FURTHER, FAR = 2.0, 10.0
#: What the distance must fall to without a BOS, for that to be the reason.
CLEARLY = 0.25
#: In the place of an arithmetic: these positions do not exclude it.
ANOTHER = "another model"
#: What the arithmetic of a runtime is called that the run is not served by.
NAMES = dict.fromkeys(("bf16", "fp32", "original", "onnxruntime-bf16"), BF16) | {"onnxruntime-int8": "INT8"}
NAMES[ONE_TERM_ALONE] = "one term where two were validated"
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


def judge(kept: KeptTokens, answers: LikelyTokens, windows: npt.NDArray[np.int64]) -> Judged:
    """Judge `answers`; `windows` int64 [positions]: the window of each row of `kept`."""
    found, of_runs = distances(kept, answers), own_distances(kept, answers)
    first = np.stack([top.tokens[answers.rows, 0] for top in kept.runtimes.values()])
    field = Field(
        found,
        {(r, c): of_runs[c][r] for r in found for c in found if r != c},
        flip_shares(kept),
        len(kept.nll[next(iter(found))]),
        None if answers.with_logprobs else (first == first[0]).all(axis=0),
        bootstrap := Bootstrap(windows[answers.rows]),
    )
    verdict, sentence, arithmetics = _verdict(field)
    power = noticed(field.excesses_of(field.own[0])) if VALIDATED in arithmetics else None
    if power and ANOTHER not in arithmetics:
        sentence += f"; further than {power} would not pass"
    if not field.by_kl:
        sentence += (
            "; this is by likeliest tokens alone, mostly where the run's runtimes differ in them: an arithmetic that "
            "the run does not have cannot be told from these"
        )
    rows = [_row(name, found[name], kept, answers, bootstrap) for name in field.order]
    return Judged(verdict, sentence, arithmetics, rows, _perplexity(answers, bootstrap), power)


def arithmetic_of(runtime: str) -> str:
    """The arithmetic that a runtime computes in, as the verdict calls it."""
    return NAMES.get(runtime, VALIDATED)


@dataclass(frozen=True)
class Field:
    """The distances of the answers `to` each runtime, and `between` runtimes (r, c), of r from c, at every answered
    position; `shares`: the flips between these, of all `kept` positions.

    `agreed`: where only likeliest tokens are known, the positions at which all runtimes have the same; else None.
    """

    to: Mapping[str, Distances]
    between: Mapping[tuple[str, str], Distances]
    shares: Mapping[tuple[str, str], float]
    kept: int
    agreed: npt.NDArray[np.bool_] | None
    bootstrap: Bootstrap

    @property
    def by_kl(self) -> bool:
        """Tell whether there are log-probabilities."""
        return self.agreed is None

    def size(self, found: Distances) -> float:
        """The mean of what is compared, KL or flips."""
        return float(np.nanmean(found.compared(self.by_kl)))

    @property
    def order(self) -> list[str]:
        """The runtimes, the nearest first."""
        return sorted(self.to, key=lambda name: self.size(self.to[name]))

    @property
    def own(self) -> list[str]:
        """The runtimes of what was validated, the nearest first."""
        return [name for name in self.order if arithmetic_of(name) == VALIDATED]

    def nearer(self, runtime: str, other: str) -> bool:
        """Tell whether the answers are clearly nearer to `runtime` than to `other`."""
        to, of = (self.to[name].compared(self.by_kl) for name in (other, runtime))
        return self.bootstrap.interval(to - of).low > 0

    def share(self, other: str) -> MeanInterval | None:
        """The share that the answers have of the error of `other`, a runtime of another arithmetic; None where it has
        no error beyond rounding.
        """
        found = list[tuple[float, Values, Values]]()
        for c in self.own:
            way = self.between[c, other].kl
            shared = (way + self.to[c].kl - self.to[other].kl) / 2
            again = [
                (way + self.between[c, each].kl - self.between[other, each].kl) / 2 for each in self.own if each != c
            ]
            rounding = np.mean(again, axis=0) if again else np.zeros_like(way)
            found.append((float(np.nanmean(rounding)), shared - rounding, way - rounding))
        _, beyond, error = min(found, key=lambda each: each[0])
        size = float(np.nanmean(error))
        return self.bootstrap.interval(beyond / size) if size > 0 else None

    def excesses_of(self, nearest: str) -> list[Excess]:
        """By how much the answers are further from a runtime than an implementation of its arithmetic may be."""
        pairs = [(nearest, each) for each in self.own if each != nearest]
        others = [(each, nearest) for each in self.to if arithmetic_of(each) != VALIDATED]
        if not pairs and others:
            pairs = [min(others, key=lambda pair: self.size(self.between[pair]))]
        return self._excesses(nearest, pairs, FURTHER)

    def far_excesses(self) -> list[Excess]:
        """By how much the answers are further from the nearest runtime than any arithmetic of the model may be."""
        return self._excesses(self.order[0], [*self.between], FAR)

    def _excesses(self, runtime: str, pairs: list[tuple[str, str]], factor: float) -> list[Excess]:
        if not pairs:
            return []
        found, shares = [self.between[pair] for pair in pairs], [self.shares[pair] for pair in pairs]
        noise = noise_of(found, shares, self.kept, self.bootstrap)
        return excesses(self.to[runtime], noise, factor, self.agreed, self.bootstrap)

    def as_near_as(self, other: str) -> bool:
        """Tell whether the answers are as near to what was validated as `other`, of another arithmetic, is."""
        limits = {c: FURTHER * self.between[c, other].kl for c in self.own}
        return any(not self.bootstrap.interval(self.to[c].kl - limits[c]).low > 0 for c in self.own)


@dataclass(frozen=True)
class Fits:
    """Runtimes whose arithmetic the answers have, the nearest first, and those of which that cannot be told."""

    sure: list[str]
    open: list[str]


def _fits(field: Field) -> Fits:
    own = field.own
    if not own:
        return Fits(field.order[:1], [])
    near = not any(each.sure for each in field.excesses_of(field.own[0]))
    if not field.by_kl:
        return Fits([name for name in _nearest(field) if near or arithmetic_of(name) != VALIDATED], [])
    none, limit = (NONE, SHARE) if len(own) > 1 else (SHARE, HALF)
    validated, sure, unclear = near, list[str](), list[str]()
    hidden = {*own, "bf16"} if "fp32" in field.to else {*own}
    for name in (each for each in field.order if each not in hidden):
        share, near = field.share(name), field.as_near_as(name)
        if near and share and share.low > SHARE:
            sure.append(name)
        elif near and (share is None or share.high > (SHARE if name == "fp32" else none)):
            unclear.append(name)
        validated = validated and not (share and share.low > limit)
    return Fits([*([own[0]] if validated else []), *sure], unclear)


def _verdict(field: Field) -> tuple[Verdict, str, list[str]]:
    nearest = field.order[0]
    where = f"{_told(field.size(field.to[nearest]), field.by_kl)} from {nearest}, the nearest"
    far = field.far_excesses()
    if any(each.sure for each in far):
        alike = not any(each.measure == "flips" and each.sure for each in field.excesses_of(nearest))
        return "other-model", _told_far(field.to[nearest], far, where, alike), []
    fits = _fits(field)
    if not fits.sure and not fits.open:
        return (
            "other-arithmetic",
            (
                "the model in an arithmetic that the run does not have (a cache in another type, other scales, other "
                f"kernels): {where}, and of no runtime's error"
            ),
            [],
        )
    kinds = list(dict.fromkeys(arithmetic_of(name) for name in [*fits.sure, *fits.open]))
    first = (fits.sure or fits.open)[0]
    where = f"{_told(field.size(field.to[first]), field.by_kl)} from {first}"
    if VALIDATED in kinds and (not far or any(each.possible for each in far)):
        return "undecided", _told_open(kinds, where, bool(far)), [*kinds, ANOTHER]
    if len(kinds) > 1:
        bf16 = NAMES["bf16"] in kinds and "fp32" not in field.to
        remedy = "with the runtime fp32 beside bf16" if bf16 and field.by_kl else "on a longer text"
        said = (
            f"{', or '.join(kinds)}: {where}, and these positions do not tell which; send more --windows, or validate "
        )
        return "undecided", said + remedy, kinds
    if kinds != [VALIDATED]:
        return "other-arithmetic", f"the model, but in {kinds[0]}: {where}", kinds
    return "validated", f"the validated model: {where}", kinds


def _told_far(found: Distances, far: list[Excess], where: str, alike: bool) -> str:
    """Tell which measures exclude the model, and where its likeliest tokens are `alike`, why that may be."""
    limits = ", ".join(f"{each.measure} (at most {each.limit:.2g})" for each in far if each.sure)
    said = f"another model: {where}, and {found.flips.mean():.0%} of likeliest tokens are others; excluded by {limits}"
    return f"{said}; not by flips, so that it may be the model at another temperature or softcap" if alike else said


def _told_open(kinds: list[str], where: str, limited: bool) -> str:
    """Tell why another model is not excluded."""
    if limited:
        return f"{', or '.join(kinds)}, or {ANOTHER}: {where}, and so few positions do not tell; send more --windows"
    return (
        f"{', or '.join(kinds)}, or {ANOTHER}: {where}, and a run of one runtime does not tell how far another "
        "implementation may be; validate with a second runtime"
    )


def _nearest(field: Field) -> list[str]:
    """The nearest runtime, and those of other arithmetics that are not clearly further."""
    first = field.order[0]
    return [name for name in field.order if name == first or not field.nearer(first, name)]


def _told(distance: float, by_kl: bool) -> str:
    return f"{distance:.3g} nats of KL" if by_kl else f"{distance:.1%} of likeliest tokens"


def _row(name: str, found: Distances, kept: KeptTokens, answers: LikelyTokens, bootstrap: Bootstrap) -> RuntimeDistance:
    known = np.isfinite(answers.nll)
    kl, complete = np.isfinite(found.kl).any(), bool(known.all()) and len(known) > 0
    return RuntimeDistance(
        runtime=name,
        validated=name not in NOT_SERVED,
        kl_nats=_estimate(bootstrap.interval(found.kl)) if kl else None,
        rest=float(np.nanmean(found.rest)) if kl else None,
        flips=_estimate(bootstrap.interval(found.flips)),
        loss_difference_nats=float(np.abs(found.loss[known]).mean()) if known.any() else None,
        perplexity=float(np.exp(kept.nll[name][answers.rows].mean(dtype=np.float64))) if complete else None,
    )


def _perplexity(answers: LikelyTokens, bootstrap: Bootstrap) -> Estimate | None:
    if not len(answers.nll) or not np.isfinite(answers.nll).all():
        return None
    return _estimate(MeanInterval(*(float(np.exp(each)) for each in bootstrap.interval(answers.nll))))


def _estimate(found: MeanInterval) -> Estimate:
    return Estimate(**found._asdict())


def judge_prompt(judged: Judged, answers: LikelyTokens, without: Judged | None) -> Judged:
    """Judge whether the prompt, and not the model, is another one: by the tokens that the server counts, or since it is
    much nearer `without` the tokens that the text's windows begin with.
    """
    reason = None
    if answers.counted not in (0, answers.sent):
        reason = (
            f"the server read {answers.counted:,} tokens where {answers.sent:,} were sent: it sets a BOS or a chat "
            "template before a prompt, or leaves one out"
        )
    elif without and _kl(without) < CLEARLY * _kl(judged):
        reason = (
            f"the server sets a BOS itself: without the one that was sent it is {_kl(without):.3g} nats from "
            f"{without.runtimes[0].runtime}, with it {_kl(judged):.3g}"
        )
    return judged if reason is None else replace(judged, verdict="other-prompt", sentence=reason)


def judge_reading(judged: Judged, told: str | None) -> Judged:
    """Judge a server that reads texts or chats otherwise than the run, as `told`: what users send is another prompt."""
    if told is None or judged.verdict == "other-prompt":
        return judged
    if judged.verdict in ("validated", "undecided"):
        return replace(judged, verdict="other-prompt", sentence=f"{told}; by the run's tokens, {judged.sentence}")
    return replace(judged, sentence=f"{judged.sentence}; and {told}")


def _kl(judged: Judged) -> float:
    nearest = judged.runtimes[0].kl_nats
    return nearest.mean if nearest else float("inf")
