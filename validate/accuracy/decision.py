"""Is FP8 good enough? One decision, which `fp8q validate`, its gate, the report and the model card show alike.

The FP8 runtime whose perplexity rises most decides, among those that serve the model and ran every window, with every
adapter. Its increase over BF16 is compared with a limit: the user's `--max-ppl-increase`, or the default. So
"worse" is only what exceeds the limit, and the gate fails for nothing else. The paired 95 % interval says how sure that
is, and does not decide: a limit is on the increase, and more text narrows the interval without moving what is true.

The default limit is 1 %: MLPerf Inference accepts a model at 99 % of the reference's accuracy in its default category
(github.com/mlcommons/inference_policies, "Benchmarks").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from ...core.columns import increase, nats
from ...options import LEAST_WINDOWS, NOT_SERVED
from .bootstrap import increase_interval, paired
from .document import Accuracy, Verdict

#: The largest increase of perplexity that is acceptable where none was asked for.
DEFAULT_LIMIT = 0.01
#: A change of perplexity that no user notices; it is far below the difference between texts.
SAME = 1e-3
#: The runtimes of the float model: in BF16, whose losses are paired with the others', and in FP32.
BF16, FP32 = "bf16", "fp32"
Losses = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Candidate:
    """A runtime that serves the model: its increase over BF16, and the interval of it, None where that is not known for
    the reason `why_none`.
    """

    name: str
    rise: float
    interval: tuple[float, float] | None = None
    why_none: str = ""


def decide(accuracy: Accuracy, nll: Losses, limit: float | None = None) -> Verdict:
    """Judge an evaluation by the `limit` of the increase, a fraction; None is the default.

    `nll`: runtime -> float32 [windows, context], nats, NaN where not scored.
    """
    most = DEFAULT_LIMIT if limit is None else limit
    if broken := _broken(accuracy):
        return Verdict(
            kind="broken", sentence=f"Broken: the perplexity of {broken[0]} is {broken[1]}", limit=most,
            limit_is_default=limit is None, runtime=broken[0],
        )  # fmt: skip
    compared = candidates(accuracy, nll)
    if not compared:
        return Verdict(
            kind="unknown", sentence="Not known yet: FP8 was not held against BF16 on any text", limit=most,
            limit_is_default=limit is None,
        )  # fmt: skip
    over = [candidate for candidate in compared if not candidate.rise <= most]
    # an adapter's losses are not kept, so that it has no interval: it decides where it exceeds the limit
    deciding = [candidate for candidate in compared if " with " not in candidate.name]
    worst = max(over or deciding, key=lambda candidate: candidate.rise)
    known = worst.interval is not None
    kind, word = ("worse", "Worse") if over else ("acceptable", "Acceptable") if known else ("unknown", "Not known")
    return Verdict.model_validate(
        {
            "kind": kind,
            "sentence": f"{word}: {increase(worst.rise)} perplexity (limit {percent(most)})",
            "detail": " ".join(_details(worst, compared, accuracy, most, limit is None)),
            "limit": most,
            "limit_is_default": limit is None,
            "runtime": worst.name,
            "perplexity_increase": worst.rise,
        }
    )


def percent(fraction: float) -> str:
    """Format a limit: 0.01 -> `1 %`."""
    return f"{100 * fraction:.4g} %"


def _broken(accuracy: Accuracy) -> tuple[str, float] | None:
    """The first runtime that serves the model, and its perplexity, which is no finite number."""
    for suffix, evaluated in accuracy.with_adapters():
        for name, runtime in evaluated.runtimes.items():
            if name not in NOT_SERVED and not runtime.sampled and not isfinite(runtime.perplexity):
                return f"{name}{suffix}", runtime.perplexity
    return None


def candidates(accuracy: Accuracy, nll: Losses) -> list[Candidate]:
    """List the runtimes that serve the model, ran every window and were compared with BF16; with each adapter too."""
    served = []
    for suffix, evaluated in accuracy.with_adapters():
        for name, runtime in evaluated.runtimes.items():
            if name in NOT_SERVED or runtime.sampled or runtime.perplexity_increase is None:
                continue
            interval, why_none = None, "nothing says how sure that is"
            if not suffix and {BF16, name} <= nll.keys():
                low, high = increase_interval(nll[BF16], nll[name])
                interval = None if low is None or high is None else (low, high)
                why_none = too_short(len(paired(nll[BF16], nll[name])))
            served.append(Candidate(f"{name}{suffix}", runtime.perplexity_increase, interval, why_none))
    return served


def too_short(windows: int) -> str:
    """State that so few `windows` give no interval."""
    return f"too short for an interval: {windows:,} window{'' if windows == 1 else 's'}; give {LEAST_WINDOWS}"


def interval_text(bounds: tuple[float, float]) -> str:
    """The ends of an interval of relative changes: `−0.02 to +0.31 %`."""
    return f"{increase(bounds[0]).removesuffix(' %')} to {increase(bounds[1])}"


def _details(worst: Candidate, compared: list[Candidate], accuracy: Accuracy, most: float, default: bool) -> list[str]:
    """Sentences on the limit's origin, the interval, and the yardstick of FP32."""
    which = f"{worst.name}, the worst of {len(compared)} FP8 runtimes" if len(compared) > 1 else worst.name
    sentences = [f"Of {which}."]
    if worst.interval:
        sentences.append(f"95 % interval {interval_text(worst.interval)}{_remark(worst, most)}.")
    else:
        sentences.append(f"{worst.why_none[0].upper()}{worst.why_none[1:]}.")
    runtimes = accuracy.runtimes
    bf16_kl = runtimes[BF16].kl_fp32_nats if BF16 in runtimes else None
    fp8_kl = runtimes[worst.name].kl_fp32_nats if worst.name in runtimes else None
    if bf16_kl is not None and fp8_kl is not None and fp8_kl <= bf16_kl:
        sentences.append(f"FP8 is no farther from FP32 than BF16 is: KL {nats(fp8_kl)} nats against {nats(bf16_kl)}.")
    if default:
        sentences.append("The limit is fp8q’s default; --max-ppl-increase sets yours.")
    return sentences


def _remark(worst: Candidate, most: float) -> str:
    """Write a remark on an interval, after a comma; empty where there is none."""
    assert worst.interval is not None, "the caller looked"
    low, high = worst.interval
    if worst.rise <= most < high:
        return ", which reaches over the limit: more text would settle it"
    if low <= most < worst.rise:
        return ", which reaches under the limit: more text would settle it"
    if max(abs(low), abs(high)) <= SAME:
        return ", within a tenth of a percent of BF16"
    if low <= 0 <= high:
        return ": this text cannot tell FP8 from BF16"
    return ": lower by chance" if high < 0 else ""


def noise_floor(accuracy: Accuracy) -> str:
    """State the effect of arithmetic and text alone, with which an increase is to be compared: BF16's distance from
    FP32, and the increase on either half of the windows. Empty where neither was measured.
    """
    runtimes, clauses = accuracy.runtimes, []
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
    return f"Noise floor: {'; '.join(clauses)}." if clauses else ""
