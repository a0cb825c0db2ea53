"""Is FP8 good enough? One decision, which `fp8q validate`, its gate, the report and the model card show alike.

The FP8 runtime that uses most of the limits decides, among those that serve the model and ran every window, with every
adapter. Its increase of perplexity, its KL from BF16 and its flips are each compared with a limit (`limits`): the
user's, or the default. So "worse" is only what exceeds a limit, and the gate fails for nothing else. The 95 % intervals
say how sure that is, and do not decide: a limit is on the loss, and more text narrows the interval without moving what
is true.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from ...core.columns import increase, nats
from ...options import LEAST_WINDOWS, NOT_SERVED, ONE_TERM_ALONE, VerdictLimits
from .bootstrap import Bootstrap, increase_interval, paired
from .document import Accuracy, Kind, Measure, RuntimeAccuracy, Verdict
from .limits import BF16, Limits, RuntimeLoss, exceeded, limits_for, used
from .share_interval import share_interval

#: A change of perplexity that no user notices; it is far below the difference between texts.
SAME = 1e-3
#: Digits that no two doubles share, of those that differ.
MOST_DIGITS = 18
Losses = Mapping[str, npt.NDArray[np.float32]]
Interval = tuple[float, float]
OVER = "which reaches over the limit: more text would settle it"
UNDER = "which reaches under the limit: more text would settle it"


@dataclass(frozen=True)
class Candidate:
    """A runtime that serves the model: its loss, and the 95 % intervals of its increase, KL and flips, each None where
    that is not known; `why_none` says why that of the increase is not. `least`: the KL is at least so much.
    """

    name: str
    loss: RuntimeLoss
    interval: Interval | None = None
    kl_interval: Interval | None = None
    flips_interval: Interval | None = None
    why_none: str = ""
    least: bool = False


def decide(
    accuracy: Accuracy, nll: Losses, asked: VerdictLimits = VerdictLimits(), kl: Losses | None = None
) -> Verdict:
    """Judge an evaluation by the limits that were `asked` for, and the defaults of the others.

    `nll`, and `kl` from BF16: runtime -> float32 [windows, context], nats, NaN where not scored.
    """
    limits = limits_for(accuracy.runtimes, asked)
    verdict = Verdict(
        kind="unknown", sentence="Not known yet: FP8 was not held against BF16 on any text", limit=limits.rise,
        kl_limit_nats=limits.kl_nats, flips_limit=limits.flips, limit_is_default=asked.asked is None,
    )  # fmt: skip
    if broken := _broken(accuracy):
        sentence = f"Broken: the perplexity of {broken[0]} is {broken[1]}"
        return verdict.model_copy(update={"kind": "broken", "sentence": sentence, "runtime": broken[0]})
    compared = candidates(accuracy, nll, kl or {})
    if not compared:
        return verdict
    over = [candidate for candidate in compared if exceeded(candidate.loss, limits)]
    # an adapter's losses are not kept, so that it has no interval: it decides where it exceeds a limit
    deciding = [candidate for candidate in compared if " with " not in candidate.name]
    worst = max(over or deciding, key=lambda candidate: used(candidate.loss, limits))
    kind: Kind = "worse" if over else "acceptable" if worst.interval else "unknown"
    return verdict.model_copy(
        update={
            "kind": kind,
            "sentence": f"{WORDS[kind]}: {loss_in_words(worst.loss, limits, worst.least)}",
            "detail": " ".join(_details(worst, compared, accuracy, limits, asked)),
            "exceeded": exceeded(worst.loss, limits),
            "runtime": worst.name,
            "perplexity_increase": worst.loss.rise,
            "kl_nats": worst.loss.kl_nats,
            "flips": worst.loss.flips,
        }
    )


WORDS: Mapping[Kind, str] = {"worse": "Worse", "acceptable": "Acceptable", "unknown": "Not known"}


def limits_of(verdict: Verdict | None) -> VerdictLimits:
    """Return the limits that the verdict of an older version was asked to hold: that of perplexity, or none."""
    return VerdictLimits(max_ppl_increase=verdict.limit if verdict and not verdict.limit_is_default else None)


def percent(fraction: float) -> str:
    """Format a limit: 0.01 -> `1 %`."""
    return f"{100 * fraction:.4g} %"


def of_100(share: float) -> str:
    """Format a limit as so many of 100: 0.114 -> `11`, 0.036 -> `3.6`, 0.08 -> `8`, 0 -> `0`."""
    if share >= 0.0995:
        return f"{100 * share:.0f}"
    return f"{100 * share:.2g}"


def measured_of_100(share: float) -> str:
    """Format a measured share as so many of 100, with two digits: 0.114 -> `11`, 0.04 -> `4.0`, 0 -> `0`. So an
    interval is as fine as the value in it: 3.5 of 100 in 3.0 to 4.0.
    """
    if 0 < share < 0.0995:
        return f"{100 * share:#.2g}"
    return f"{100 * share:.0f}"


def beside_limit(text: str, number: float, limit: float, shown: str) -> str:
    """Return the `text` of a `number`; the number with more digits where that would read as on the other side of a
    `limit`, which is `shown` so: `8.04` of 100, and not `8.0`, is more than 8.
    """
    digits = 3
    while (_number(text) > _number(shown)) != (number > limit) and digits < MOST_DIGITS:
        text = f"{number:.{digits}g}"
        digits = digits + 1
    return text


def _number(text: str) -> float:
    return float(text.replace("−", "-").rstrip(" %"))


def loss_in_words(loss: RuntimeLoss, limits: Limits, least: bool = False) -> str:
    """Describe a loss beside its limits, what is beyond first; `least`: the KL is at least so much."""
    rise = loss.rise or 0.0
    most = percent(limits.rise)
    rises = beside_limit(increase(rise), 100 * rise, 100 * limits.rise, most).removesuffix(" %")
    signed = rises if rises.startswith(("+", "−")) else f"+{rises}"
    words: dict[Measure, str] = {"perplexity": f"{signed} % perplexity (limit {most})"}
    if loss.kl_nats is not None:
        most = nats(limits.kl_nats)
        kl = beside_limit(nats(loss.kl_nats), loss.kl_nats, limits.kl_nats, most)
        words["kl"] = f"KL {'at least ' if least else ''}{kl} nats (limit {most})"
    if loss.flips is not None:
        most = of_100(limits.flips)
        differ = beside_limit(measured_of_100(loss.flips), 100 * loss.flips, 100 * limits.flips, most)
        words["flips"] = f"{differ} of 100 next tokens differ (limit {most})"
    beyond = exceeded(loss, limits)
    return ", ".join(words[measure] for measure in sorted(words, key=lambda measure: measure not in beyond))


def _broken(accuracy: Accuracy) -> tuple[str, float] | None:
    """The first runtime that serves the model, and its perplexity, which is no finite number."""
    for suffix, evaluated in accuracy.with_adapters():
        for name, runtime in evaluated.runtimes.items():
            if name not in NOT_SERVED and not runtime.sampled and not isfinite(runtime.perplexity):
                return f"{name}{suffix}", runtime.perplexity
    return None


def candidates(accuracy: Accuracy, nll: Losses, kl: Losses) -> list[Candidate]:
    """List the runtimes that serve the model, ran every window and were compared with BF16; with each adapter too."""
    served = []
    for suffix, evaluated in accuracy.with_adapters():
        for name, runtime in evaluated.runtimes.items():
            if name in NOT_SERVED or runtime.sampled or runtime.perplexity_increase is None:
                continue
            loss, least, tokens = _loss(runtime, accuracy.protocol.tokens)
            interval = None
            why_none = "nothing says how sure that is"
            kl_interval = flips_interval = None
            if not suffix and {BF16, name} <= nll.keys():
                low, high = increase_interval(nll[BF16], nll[name])
                interval = None if low is None or high is None else (low, high)
                why_none = too_short(len(paired(nll[BF16], nll[name])))
            if interval and not suffix:
                kl_interval = _kl_interval(runtime, kl.get(name))
                flips_interval = None if loss.flips is None else share_interval(round(loss.flips * tokens), tokens)
            served.append(Candidate(f"{name}{suffix}", loss, interval, kl_interval, flips_interval, why_none, least))
    return served


def _loss(runtime: RuntimeAccuracy, tokens: int) -> tuple[RuntimeLoss, bool, int]:
    """The loss of a runtime; whether its KL is only a lower bound, as where BF16 ran on another host; and the number of
    tokens that its flips are of.
    """
    agreement = runtime.top1_agreement
    kl = runtime.kl_mean_nats
    stored = runtime.stored
    least = kl is None and stored is not None and BF16 in stored.runtimes
    if least:
        assert stored is not None, "just seen"
        kl = stored.runtimes[BF16].kl_nats.mean
        agreement = stored.runtimes[BF16].top1_agreement
        tokens = stored.positions
    return RuntimeLoss(runtime.perplexity_increase, kl, None if agreement is None else 1 - agreement), least, tokens


def _kl_interval(runtime: RuntimeAccuracy, values: npt.NDArray[np.float32] | None) -> Interval | None:
    """The 95 % interval of the mean KL, over windows."""
    if values is not None and np.isfinite(values).any():
        finite = np.isfinite(values)
        _, low, high = Bootstrap(np.nonzero(finite)[0]).interval(values[finite].astype(np.float64))
        return low, high
    if runtime.kl_mean_nats is None and runtime.stored and BF16 in runtime.stored.runtimes:
        stored = runtime.stored.runtimes[BF16].kl_nats
        return stored.low, stored.high
    return None


def too_short(windows: int) -> str:
    """State that so few `windows` give no interval."""
    return f"too short for an interval: {windows:,} window{'' if windows == 1 else 's'}; give {LEAST_WINDOWS}"


def interval_text(bounds: Interval) -> str:
    """The ends of an interval of relative changes: `−0.02 to +0.31 %`."""
    return f"{increase(bounds[0]).removesuffix(' %')} to {increase(bounds[1])}"


def _details(
    worst: Candidate, compared: list[Candidate], accuracy: Accuracy, limits: Limits, asked: VerdictLimits
) -> list[str]:
    """Sentences on the intervals, the yardstick of FP32, and the limits' origin."""
    which = f"{worst.name}, the worst of {len(compared)} FP8 runtimes" if len(compared) > 1 else worst.name
    sentences = [f"Of {which}.", *_intervals(worst, limits)]
    runtimes = accuracy.runtimes
    bf16_kl = runtimes[BF16].kl_fp32_nats if BF16 in runtimes else None
    fp8_kl = runtimes[worst.name].kl_fp32_nats if worst.name in runtimes else None
    if bf16_kl is not None and fp8_kl is not None and fp8_kl <= bf16_kl:
        sentences.append(f"FP8 is no farther from FP32 than BF16 is: KL {nats(fp8_kl)} nats against {nats(bf16_kl)}.")
    if limits.by_bf16:
        sentences.append("BF16's own distance from FP32 widens the limits of KL and flips.")
    if (one := one_code(accuracy, limits)) is not None:
        sentences.append(f"In one code, as vLLM without the plugin and transformers compute it: {one}.")
    if asked.asked is None:
        sentences.append("The limits are fp8q’s defaults; --max-ppl-increase, --max-kl and --max-flips set yours.")
    return sentences


def one_code(accuracy: Accuracy, limits: Limits) -> str | None:
    """Judge the run with one code where it has two: what servers compute that know no second ones. None where it was
    not measured.
    """
    runtime = accuracy.runtimes.get(ONE_TERM_ALONE)
    if runtime is None or runtime.sampled or runtime.perplexity_increase is None:
        return None
    loss, least, _ = _loss(runtime, accuracy.protocol.tokens)
    kind: Kind = "worse" if exceeded(loss, limits) else "acceptable"
    return f"{WORDS[kind].lower()}, {loss_in_words(loss, limits, least)}"


def verdict_limits(verdict: Verdict) -> Limits | None:
    """The limits that a verdict is by; None of one of an older version, which has that of perplexity alone."""
    if verdict.kl_limit_nats is None or verdict.flips_limit is None:
        return None
    return Limits(verdict.limit, verdict.kl_limit_nats, verdict.flips_limit, by_bf16=False)


def _intervals(worst: Candidate, limits: Limits) -> list[str]:
    """Sentences on the intervals of the increase, of KL and of flips."""
    loss = worst.loss
    if worst.interval is None:
        return [f"{worst.why_none[0].upper()}{worst.why_none[1:]}."]
    sentences = [
        f"95 % interval {interval_text(worst.interval)}{_remark(worst.interval, loss.rise or 0.0, limits.rise)}."
    ]
    others = []
    if worst.kl_interval and loss.kl_nats is not None:
        low, high = worst.kl_interval
        others.append(f"KL {nats(low)} to {nats(high)} nats{_reaches(worst.kl_interval, loss.kl_nats, limits.kl_nats)}")
    if worst.flips_interval and loss.flips is not None:
        low, high = worst.flips_interval
        reaches = _reaches(worst.flips_interval, loss.flips, limits.flips)
        others.append(f"{measured_of_100(low)} to {measured_of_100(high)} of 100 tokens{reaches}")
    return [*sentences, *([f"{'; '.join(others)}."] if others else [])]


def _reaches(interval: Interval, value: float, limit: float) -> str:
    """Tell, after a comma, that an interval reaches over a limit that the value keeps, or under one that it exceeds."""
    low, high = interval
    if value <= limit < high:
        return f", {OVER}"
    return f", {UNDER}" if low <= limit < value else ""


def _remark(interval: Interval, rise: float, limit: float) -> str:
    """Write a remark on the interval of an increase, after a comma or colon; empty where there is none."""
    low, high = interval
    if reaches := _reaches(interval, rise, limit):
        return reaches
    if max(abs(low), abs(high)) <= SAME:
        return ", within a tenth of a percent of BF16"
    if low <= 0 <= high:
        return ": this text cannot tell FP8 from BF16"
    return ": lower by chance" if high < 0 else ""


def noise_floor(accuracy: Accuracy) -> str:
    """State the effect of arithmetic and text alone, with which an increase is to be compared: BF16's distance from
    FP32, and the increase on either half of the windows. Empty where neither was measured.
    """
    runtimes = accuracy.runtimes
    clauses = []
    bf16 = runtimes.get(BF16)
    if bf16 and bf16.kl_fp32_nats is not None:
        over = f" and {increase(bf16.perplexity_over_fp32)} perplexity" if bf16.perplexity_over_fp32 is not None else ""
        clauses.append(f"BF16 itself is {nats(bf16.kl_fp32_nats)} nats (KL){over} from FP32")
    elif bf16:
        clauses.append("BF16's distance from FP32 was not measured (add fp32 to --runtimes)")
    halves = {
        name: runtime.increase_halves
        for name, runtime in runtimes.items()
        if runtime.increase_halves and name not in NOT_SERVED
    }
    if halves:
        rises = [f"{increase(first)} and {increase(second)} ({name})" for name, (first, second) in halves.items()]
        clauses.append(f"on either half of the windows the increase is {', '.join(rises)}")
    if clauses:
        return f"Noise floor: {'; '.join(clauses)}."
    return ""
