"""Judge answers by their distances: the validated model, another arithmetic of it, another model, another prompt.

For small deviations KL is half a squared length, so distances have angles. Seen from a runtime c that was validated,
the answers a and a runtime b of another arithmetic share

    s(a) = (D(c, b) + D(c, a) - D(b, a)) / 2,

the product of their deviations from c. Another implementation c' of what was validated (ONNX Runtime beside the
reference, an engine) shares s(c') with b by rounding alone: what c itself is off, and how BF16 rounds in any program.
So the answers have the share

    e = (s(a) - s(c')) / (D(c, b) - s(c'))

of b's own error. It is 0 for an implementation of what was validated, however it rounds; for one of b's arithmetic it
is the part of b's error that all its implementations have. Of one term that is about half: a last bit of BF16 moves
every sixteenth activation into the next code, so that vLLM and the reference, both of one term, are as far from each
other as one term is from two, and nearness alone tells nothing.

The answers are another arithmetic's where e is clearly (in its interval) more than `SHARE`, and what was validated
where it is clearly less than `NONE` for every b; in between that cannot be told. Both are held against a size too: the
answers are at most `FURTHER` times as far from c as its own other runtime is, or as b is; else it is an arithmetic that
the run has no runtime of. And it is another model beyond `FAR` times the largest distance between any two of the run's
runtimes, with another likeliest token in a tenth of the positions.

The runtime `bf16` of a model whose weights lose little is little but rounding, of which a server of BF16 shares some
part, which nobody knows; `fp32` is BF16's arithmetic without it, where e is 0 or 1, and takes its place.

A run with one validated runtime does not say what rounding shares. Then s(c') counts as 0, which is too little, so b is
excluded below `SHARE`, what was validated from half of b's error on, and its size is the distance from every b.

Where only likeliest tokens are known, flips take the place of KL, mostly at positions where the runtimes differ, and
the nearest runtime is the verdict. They cannot tell an unknown arithmetic from a known one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...options import NOT_SERVED, ONE_TERM_ALONE
from ..accuracy.bootstrap import Bootstrap, MeanInterval
from ..accuracy.document import Estimate
from ..accuracy.top_divergence import Values
from ..accuracy.top_logits import KeptTokens
from .answers import LikelyTokens
from .distance import Distances, distances, own_distances
from .document import BF16, VALIDATED, RuntimeDistance, Verdict

#: See above: shares of an error, of them `HALF` with one validated runtime; of distances; and of positions.
NONE, SHARE, HALF = 0.1, 0.25, 0.5
FURTHER, FAR, MANY_FLIPS = 2.0, 10.0, 0.1
#: What the distance must fall to without a BOS, for that to be the reason.
CLEARLY = 0.25
#: Flips of the nearest runtime beyond which it is another model, where nothing else is known: at half of these
#: positions the runtimes themselves differ.
MOST_ALIKE = 0.5
#: What the arithmetic of a runtime is called that the run is not served by.
NAMES = dict.fromkeys(("bf16", "fp32", "original", "onnxruntime-bf16"), BF16) | {"onnxruntime-int8": "INT8"}
NAMES[ONE_TERM_ALONE] = "one term where two were validated"


@dataclass(frozen=True)
class Judged:
    """A verdict, its sentence, the arithmetics that fit, and the distances it is by, the nearest runtime first."""

    verdict: Verdict
    sentence: str
    arithmetics: list[str]
    runtimes: list[RuntimeDistance]
    perplexity: Estimate | None


def judge(kept: KeptTokens, answers: LikelyTokens, windows: npt.NDArray[np.int64]) -> Judged:
    """Judge `answers`; `windows` int64 [positions]: the window of each row of `kept`."""
    found, by_kl = distances(kept, answers), answers.with_logprobs
    of_runs = own_distances(kept, answers.rows)
    bootstrap = Bootstrap(windows[answers.rows])
    field = Field(
        {name: each.compared(by_kl) for name, each in found.items()},
        {(r, c): of_runs[c][r].compared(by_kl) for r in found for c in found if r != c},
        bootstrap,
    )
    verdict, sentence, arithmetics = _verdict(field, found[field.order[0]], by_kl)
    if not by_kl:
        sentence += (
            "; this is by likeliest tokens alone, mostly where the run's runtimes differ in them: an arithmetic that "
            "the run does not have cannot be told from these"
        )
    rows = [_row(name, found[name], kept, answers, bootstrap) for name in field.order]
    return Judged(verdict, sentence, arithmetics, rows, _perplexity(answers, bootstrap))


def arithmetic_of(runtime: str) -> str:
    """The arithmetic that a runtime computes in, as the verdict calls it."""
    return NAMES.get(runtime, VALIDATED)


@dataclass(frozen=True)
class Field:
    """The distances of the answers `to` each runtime, and `between` runtimes (r, c), D(r, c), at every position."""

    to: Mapping[str, Values]
    between: Mapping[tuple[str, str], Values]
    bootstrap: Bootstrap

    @property
    def order(self) -> list[str]:
        """The runtimes, the nearest first."""
        return sorted(self.to, key=lambda name: float(np.nanmean(self.to[name])))

    @property
    def own(self) -> list[str]:
        """The runtimes of what was validated, the nearest first."""
        return [name for name in self.order if arithmetic_of(name) == VALIDATED]

    def nearer(self, runtime: str, other: str) -> bool:
        """Tell whether the answers are clearly nearer to `runtime` than to `other`."""
        return self.bootstrap.interval(self.to[other] - self.to[runtime]).low > 0

    def share(self, other: str) -> MeanInterval | None:
        """The share that the answers have of the error of `other`, a runtime of another arithmetic; None where it has
        no error beyond rounding.
        """
        found = list[tuple[float, Values, Values]]()
        for c in self.own:
            way = self.between[c, other]
            shared = (way + self.to[c] - self.to[other]) / 2
            again = [(way + self.between[c, each] - self.between[other, each]) / 2 for each in self.own if each != c]
            rounding = np.mean(again, axis=0) if again else np.zeros_like(way)
            found.append((float(np.nanmean(rounding)), shared - rounding, way - rounding))
        _, beyond, whole = min(found, key=lambda each: each[0])
        error = float(np.nanmean(whole))
        return self.bootstrap.interval(beyond / error) if error > 0 else None

    def as_near_as_validated(self) -> bool:
        """Tell whether the answers are as near to what was validated as an implementation of it is."""
        nearest, others = self.own[0], [name for name in self.to if arithmetic_of(name) != VALIDATED]
        if again := [self.between[nearest, each] for each in self.own[1:]]:
            return self._within(self.to[nearest], max(again, key=lambda each: float(np.nanmean(each))))
        return all(self._within(self.to[each], self.between[each, nearest]) for each in others)

    def as_near_as(self, other: str) -> bool:
        """Tell whether the answers are as near to what was validated as `other`, of another arithmetic, is."""
        return any(self._within(self.to[c], self.between[c, other]) for c in self.own)

    def _within(self, distance: Values, limit: Values) -> bool:
        return not self.bootstrap.interval(distance - FURTHER * limit).low > 0


@dataclass(frozen=True)
class Fits:
    """Runtimes whose arithmetic the answers have, the nearest first, and those of which that cannot be told."""

    sure: list[str]
    open: list[str]


def _fits(field: Field) -> Fits:
    own = field.own
    if not own:
        return Fits(field.order[:1], [])
    none, limit = (NONE, SHARE) if len(own) > 1 else (SHARE, HALF)
    validated, sure, unclear = field.as_near_as_validated(), list[str](), list[str]()
    hidden = {*own, "bf16"} if "fp32" in field.to else {*own}
    for name in (each for each in field.order if each not in hidden):
        share, near = field.share(name), field.as_near_as(name)
        if near and share and share.low > SHARE:
            sure.append(name)
        elif near and (share is None or share.high > (SHARE if name == "fp32" else none)):
            unclear.append(name)
        validated = validated and not (share and share.low > limit)
    return Fits([*([own[0]] if validated else []), *sure], unclear)


def _verdict(field: Field, nearest: Distances, by_kl: bool) -> tuple[Verdict, str, list[str]]:
    order = field.order
    distance, flips = float(np.nanmean(field.to[order[0]])), float(nearest.flips.mean())
    spread = max((float(np.nanmean(each)) for each in field.between.values()), default=0.0)
    where = f"{_told(distance, by_kl)} from {order[0]}, the nearest"
    if flips > MANY_FLIPS and (distance > FAR * spread if by_kl else distance > MOST_ALIKE):
        return "other-model", f"another model: {where}, and {flips:.0%} of likeliest tokens are others", []
    fits = _fits(field) if by_kl else Fits(_nearest(field), [])
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
    where = f"{_told(float(np.nanmean(field.to[first])), by_kl)} from {first}"
    if len(kinds) > 1:
        bf16 = NAMES["bf16"] in kinds and "fp32" not in field.to
        remedy = "with the runtime fp32 beside bf16" if bf16 and by_kl else "on a longer text"
        said = (
            f"{', or '.join(kinds)}: {where}, and these positions do not tell which; send more --windows, or validate "
        )
        return "undecided", said + remedy, kinds
    if kinds != [VALIDATED]:
        return "other-arithmetic", f"the model, but in {kinds[0]}: {where}", kinds
    return "validated", f"the validated model: {where}", kinds


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
