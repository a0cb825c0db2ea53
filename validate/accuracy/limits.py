"""The limits that a verdict on accuracy holds a model against: rise of perplexity, KL from BF16, and flips.

Each measure misses what another sees. Perplexity depends on one token's probability, and a loss at some tokens cancels
a gain at others, so that on little text it falls while KL triples. The mean KL has a heavy tail: one token of 2,048
can be a tenth of it. Flips, the tokens of which another is the likeliest, are what a reader sees, and do not say by how
much.

The default limits are one limit in three units (docs/decisions/0077):

- Perplexity: 1 %, as MLPerf Inference has it (`DEFAULT_RISE`).
- KL: ln(1.01) = 0.00995 nats. A text that the model itself writes is drawn from BF16's distribution, and on it the
  log-perplexity of FP8 exceeds BF16's by just the KL. A larger limit of perplexity is one of KL too.
- Flips: 8 %. Trained models flip 0.5 to 0.65 × √KL of their tokens, 6 % at that KL.

What BF16 itself does is accepted unasked: where FP32 ran, the limits are at least 10 times BF16's own KL from it, and
√10 times its own flips, since KL grows with the square of a deviation and flips with the deviation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, inf, log1p, log10, sqrt

from ...options import VerdictLimits
from .document import Measure, RuntimeAccuracy, Verdict

#: The largest increase of perplexity that is acceptable where none was asked for: MLPerf Inference accepts a model at
#: 99 % of the reference's accuracy in its default category (github.com/mlcommons/inference_policies, "Benchmarks").
DEFAULT_RISE = 0.01
#: The KL in nats a token of that increase.
LEAST_KL = log1p(DEFAULT_RISE)
#: The largest share of flips at that KL: a quarter more than trained models have there.
LEAST_FLIPS = 0.08
#: Times BF16's own KL from FP32 that are acceptable.
TIMES = 10
#: The runtimes of the float model: in BF16, whose losses are paired with the others', and in FP32.
BF16 = "bf16"
FP32 = "fp32"


@dataclass(frozen=True)
class Limits:
    """The largest acceptable increase of perplexity, KL from BF16 in nats a token, and share of flips.

    `by_bf16`: BF16's own distance from FP32 set one of them.
    """

    rise: float
    kl_nats: float
    flips: float
    by_bf16: bool = False


@dataclass(frozen=True)
class RuntimeLoss:
    """The increase of perplexity of a runtime over BF16's, its KL from BF16 in nats a token, and its share of flips;
    None where that was not measured.
    """

    rise: float | None
    kl_nats: float | None = None
    flips: float | None = None


def limits_for(runtimes: Mapping[str, RuntimeAccuracy], asked: VerdictLimits) -> Limits:
    """Return the limits that were `asked` for, and the defaults of the others, with the yardstick in `runtimes`."""
    rise = DEFAULT_RISE if asked.max_ppl_increase is None else asked.max_ppl_increase
    bf16 = runtimes.get(BF16)
    fp32 = runtimes.get(FP32)
    bf16_kl = TIMES * (bf16.kl_fp32_nats or 0.0) if bf16 else 0.0
    bf16_flips = sqrt(TIMES) * (1 - fp32.top1_agreement) if fp32 and fp32.top1_agreement is not None else 0.0
    least_kl = log1p(max(rise, DEFAULT_RISE))
    kl = max(least_kl, bf16_kl) if asked.max_kl is None else asked.max_kl
    least_flips = LEAST_FLIPS * sqrt(max(kl / LEAST_KL, 1.0))
    flips = min(1.0, max(least_flips, bf16_flips)) if asked.max_flips is None else asked.max_flips
    by_bf16 = (asked.max_kl is None and bf16_kl > least_kl) or (asked.max_flips is None and bf16_flips > least_flips)
    return Limits(rise, kl, flips, by_bf16)


def exceeded(loss: RuntimeLoss, limits: Limits) -> list[Measure]:
    """List the measures that are beyond their limits; a number that is none is beyond."""
    pairs: dict[Measure, tuple[float | None, float]] = {
        "perplexity": (loss.rise, limits.rise), "kl": (loss.kl_nats, limits.kl_nats),
        "flips": (loss.flips, limits.flips),
    }  # fmt: skip
    return [measure for measure, (value, limit) in pairs.items() if value is not None and not value <= limit]


def used(loss: RuntimeLoss, limits: Limits) -> float:
    """Return the share of the limits that a loss uses, by the measure that uses most: above 1 where one is exceeded.

    Each share grows in proportion to KL: that of perplexity in nats, that of flips squared.
    """
    rise = log1p(loss.rise) if loss.rise is not None and loss.rise > -1 else 0.0
    shares = (
        _share(rise, log1p(limits.rise)), _share(loss.kl_nats or 0.0, limits.kl_nats),
        _share((loss.flips or 0.0) ** 2, limits.flips**2),
    )  # fmt: skip
    return max(shares)


def _share(value: float, limit: float) -> float:
    if limit:
        return value / limit
    return inf if value > 0 else 0.0


def loss_and_limits(verdict: Verdict) -> tuple[RuntimeLoss, Limits] | None:
    """Return the loss that a verdict is on and its limits; None of a file of an older version, and of no comparison."""
    if verdict.kl_limit_nats is None or verdict.flips_limit is None or verdict.perplexity_increase is None:
        return None
    loss = RuntimeLoss(verdict.perplexity_increase, verdict.kl_nats, verdict.flips)
    return loss, Limits(verdict.limit, verdict.kl_limit_nats, verdict.flips_limit)


def tune_budget(verdict: Verdict) -> str:
    """Return the budget of `fp8q tune` that meets the limits of a verdict: its limit of perplexity, or the KL at which
    all measures are within, where KL or flips are beyond theirs.
    """
    known = loss_and_limits(verdict)
    if known is None or not {"kl", "flips"}.intersection(verdict.exceeded) or verdict.kl_nats is None:
        return f"--max-ppl-increase {100 * verdict.limit:g}%"
    return f"--max-kl {_rounded_down(verdict.kl_nats / used(*known)):g}"


def _rounded_down(value: float) -> float:
    """`value` with three significant digits, and no more than it is; 0 for 0."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(value)) - 2)
    return floor(value / unit * (1 + 1e-9)) * unit
