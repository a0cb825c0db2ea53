"""Judge answers by their distances: the validated model, another arithmetic of it, another model, another prompt.

Two implementations of one arithmetic differ, and how much depends on the arithmetic: a sum in another order moves a
BF16 number by its last bit, and every sixteenth such step moves an activation into the next FP8 code. Two terms hardly
feel that. One term does: vLLM and the reference, both of one term, are as far from each other as one term is from two.
So nearness alone does not tell an arithmetic. Its error does, by size and direction. The answers fit a runtime c when,
for every runtime r of another arithmetic,

    D(r, answers) <= (1 + TOLERANCE) · D(r, c),

unless that is clearly so (in 97.5 % of draws of the windows) not, and when from the nearest such r the answers lie
where c lies: of the way from r to c they have gone at least `DIRECTION`,

    (D(r, answers) + D(r, c) - D(c, answers)) / (2 D(r, c)) >= DIRECTION,

which is the projection of one deviation on the other, since KL is half a squared length for small deviations. Of
several that fit, the nearest is the verdict, if it is clearly nearer than those of other arithmetics; else the verdict
is open. Where none fits, it is another arithmetic of the model, or another model, when it is beyond `FAR` times the
largest distance between any two of the run's runtimes and has another likeliest token in a tenth of the positions.

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
from .document import RuntimeDistance, Verdict

#: See above. `MANY_FLIPS`: of positions.
TOLERANCE, DIRECTION, FAR, MANY_FLIPS = 0.15, 0.25, 10.0, 0.1
#: What the distance must fall to without a BOS, for that to be the reason.
CLEARLY = 0.25
#: Flips of the nearest runtime beyond which it is another model, where nothing else is known: at half of these
#: positions the runtimes themselves differ.
MOST_ALIKE = 0.5
#: What the arithmetic of a runtime is called that the run is not served by.
NAMES = {"bf16": "BF16", "fp32": "BF16", "original": "BF16", "onnxruntime-bf16": "BF16", "onnxruntime-int8": "INT8"}
NAMES[ONE_TERM_ALONE] = "one term where two were validated"
VALIDATED = "as validated"


@dataclass(frozen=True)
class Judged:
    """A verdict, its sentence, and the distances that it is by, the nearest runtime first."""

    verdict: Verdict
    sentence: str
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
    verdict, sentence = _verdict(field, found[field.order[0]], by_kl)
    if not by_kl:
        sentence += (
            "; this is by likeliest tokens alone, mostly where the run's runtimes differ in them: an arithmetic that "
            "the run does not have cannot be told from these"
        )
    rows = [_row(name, found[name], kept, answers, bootstrap) for name in field.order]
    return Judged(verdict, sentence, rows, _perplexity(answers, bootstrap))


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

    def others(self, runtime: str) -> list[str]:
        """The runtimes of other arithmetics."""
        return [name for name in self.to if arithmetic_of(name) != arithmetic_of(runtime)]

    def nearer(self, runtime: str, other: str) -> bool:
        """Tell whether the answers are clearly nearer to `runtime` than to `other`."""
        return self.bootstrap.interval(self.to[other] - self.to[runtime]).low > 0

    def fits(self, runtime: str) -> bool:
        """Tell whether the answers may be an implementation of `runtime`'s arithmetic, by size and direction."""
        others = self.others(runtime)
        if not others:
            return True
        for r in others:
            beyond = self.to[r] - (1 + TOLERANCE) * self.between[r, runtime]
            if self.bootstrap.interval(beyond).low > 0:
                return False
        r = min(others, key=lambda name: float(np.nanmean(self.between[name, runtime])))
        way = float(np.nanmean(self.between[r, runtime]))
        gone = float(np.nanmean(self.to[r] + self.between[r, runtime] - self.to[runtime])) / (2 * way) if way else 1.0
        return gone >= DIRECTION


def _verdict(field: Field, nearest: Distances, by_kl: bool) -> tuple[Verdict, str]:
    order = field.order
    distance, flips = float(np.nanmean(field.to[order[0]])), float(nearest.flips.mean())
    spread = max((float(np.nanmean(each)) for each in field.between.values()), default=0.0)
    if flips > MANY_FLIPS and (distance > FAR * spread if by_kl else distance > MOST_ALIKE):
        where = f"{_told(distance, by_kl)} from {order[0]}, the nearest"
        return "other-model", f"another model: {where}, and {flips:.0%} of likeliest tokens are others"
    fitting = [name for name in order if field.fits(name)] if by_kl else order
    if not fitting:
        return "other-arithmetic", (
            "the model in an arithmetic that the run does not have (a cache in another type, other scales, other "
            f"kernels): {_told(distance, by_kl)} from {order[0]}, the nearest, and of no runtime's error"
        )
    first = fitting[0]
    arithmetic, where = arithmetic_of(first), f"{_told(float(np.nanmean(field.to[first])), by_kl)} from {first}"
    tied = [name for name in fitting if name in field.others(first) and not field.nearer(first, name)]
    if tied:
        return "undecided", f"{arithmetic}, or {arithmetic_of(tied[0])}: {where}, and not clearly nearer than {tied[0]}"
    if arithmetic != VALIDATED:
        return "other-arithmetic", f"the model, but in {arithmetic}: {where}"
    return "validated", f"the validated model: {where}"


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


def _kl(judged: Judged) -> float:
    nearest = judged.runtimes[0].kl_nats
    return nearest.mean if nearest else float("inf")
