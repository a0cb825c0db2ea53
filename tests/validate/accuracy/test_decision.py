"""Limits of perplexity, KL and flips decide whether FP8 is good enough; intervals say how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log1p, nan

import numpy as np
import numpy.typing as npt
import pytest

from fp8q.calibrate.text.evaluation import Protocol
from fp8q.options import VerdictLimits
from fp8q.validate.accuracy.bootstrap import increase_halves
from fp8q.validate.accuracy.decision import decide, measured_of_100, noise_floor
from fp8q.validate.accuracy.document import Accuracy, AgainstStored, Estimate, RuntimeAccuracy, StoredDistance, Verdict
from fp8q.validate.accuracy.limits import RuntimeLoss, limits_for, tune_budget, used

PROTOCOL = Protocol(dataset="text", sha256="0", tokens=40, context=3, stride=2)
BF16 = RuntimeAccuracy(perplexity=10.0, nll_nats=2.3)
DEFAULTS = "The limits are fp8q’s defaults; --max-ppl-increase, --max-kl and --max-flips set yours."


@dataclass(frozen=True)
class Text:
    """Losses of `windows` windows: every second one is dearer by `more`, the others by `less` (relative increases)."""

    less: float
    more: float
    windows: int = 20

    @property
    def nll(self) -> dict[str, npt.NDArray[np.float32]]:
        base = np.full((self.windows, 3), 2.0, np.float32)
        base[:, 0] = nan
        steps = np.where(np.arange(self.windows) % 2, log1p(self.more), log1p(self.less)).astype(np.float32)
        return {"bf16": base, "reference": base + steps[:, None]}

    @property
    def rise(self) -> float:
        return expm1((log1p(self.less) + log1p(self.more)) / 2)


def judged(text: Text, limit: float | None = None) -> tuple[str, str, str]:
    fp8 = RuntimeAccuracy(perplexity=10.1, nll_nats=2.31, perplexity_increase=text.rise)
    accuracy = Accuracy(protocol=PROTOCOL, runtimes={"bf16": BF16, "reference": fp8})
    found = decide(accuracy, text.nll, VerdictLimits(max_ppl_increase=limit))
    assert found.runtime == "reference"
    assert (found.limit, found.limit_is_default) == (limit or 0.01, limit is None)
    return found.kind, found.sentence, found.detail


def test_an_increase_within_the_limit_is_acceptable_however_sure_it_is() -> None:
    assert judged(Text(0.0017, 0.0017)) == (
        "acceptable",
        "Acceptable: +0.17 % perplexity (limit 1 %)",
        "Of reference. 95 % interval +0.17 to +0.17 %. " + DEFAULTS,
    )


@pytest.mark.parametrize(
    ("text", "limit", "kind", "sentence", "remark"),
    [
        (Text(0.0017, 0.0017), 0.001, "worse", "Worse: +0.17 % perplexity (limit 0.1 %)", " +0.17 to +0.17 %."),
        (Text(0.0, 0.02), 0.0099, "worse", "Worse: +1.00 % perplexity (limit 0.99 %)",
         ", which reaches under the limit: more text would settle it."),
        (Text(0.0, 0.0199), 0.01, "acceptable", "Acceptable: +0.99 % perplexity (limit 1 %)",
         ", which reaches over the limit: more text would settle it."),
        (Text(-0.01, 0.01), 0.05, "acceptable", "Acceptable: −0.01 % perplexity (limit 5 %)",
         ": this text cannot tell FP8 from BF16."),
        (Text(0.0001, 0.0001), 0.01, "acceptable", "Acceptable: +0.01 % perplexity (limit 1 %)",
         ", within a tenth of a percent of BF16."),
        (Text(-0.01, -0.01), 0.01, "acceptable", "Acceptable: −1.00 % perplexity (limit 1 %)", ": lower by chance."),
    ],
)  # fmt: skip
def test_the_limit_decides_and_the_interval_says_how_sure_that_is(
    text: Text, limit: float, kind: str, sentence: str, remark: str
) -> None:
    found = judged(text, limit)
    assert found[:2] == (kind, sentence)
    assert found[2].endswith(remark)


def test_a_text_too_short_for_an_interval_is_not_known_but_over_the_limit_it_is_worse() -> None:
    kind, sentence, detail = judged(Text(0.0031, 0.0031, windows=4), 0.01)
    assert (kind, sentence) == ("unknown", "Not known: +0.31 % perplexity (limit 1 %)")
    assert detail == "Of reference. Too short for an interval: 4 windows; give 10."
    assert judged(Text(0.0031, 0.0031, windows=4), 0.001)[0] == "worse"


def test_it_is_of_the_worst_runtime_that_serves_the_model_and_ran_every_window() -> None:
    text = Text(0.002, 0.002)
    runtimes = {
        name: RuntimeAccuracy(perplexity=10.1, nll_nats=2.31, perplexity_increase=rise, tokens=tokens)
        for name, rise, tokens in (
            ("reference", text.rise, None), ("onnxruntime", 0.004, None), ("reference-fp22", 0.4, 9),
            ("onnxruntime-int8", 0.9, None), ("one-term", 0.8, None),
        )
    }  # fmt: skip
    nll = text.nll | {"onnxruntime": text.nll["reference"]}
    found = decide(Accuracy(protocol=PROTOCOL, runtimes={"bf16": BF16, **runtimes}), nll)
    assert (found.kind, found.runtime) == ("acceptable", "onnxruntime")
    assert found.detail.startswith("Of onnxruntime, the worst of 2 FP8 runtimes. ")


def test_an_adapter_decides_where_it_exceeds_the_limit() -> None:
    text = Text(0.002, 0.002)
    fp8 = RuntimeAccuracy(perplexity=10.1, nll_nats=2.31, perplexity_increase=text.rise)
    dearer = fp8.model_copy(update={"perplexity_increase": 0.03})
    accuracy = Accuracy(
        protocol=PROTOCOL,
        runtimes={"bf16": BF16, "reference": fp8},
        adapters={"poems": {"bf16": BF16, "reference": dearer}},
    )
    assert decide(accuracy, text.nll, VerdictLimits(max_ppl_increase=0.05)).runtime == "reference"
    found = decide(accuracy, text.nll, VerdictLimits(max_ppl_increase=0.01))
    assert (found.kind, found.runtime) == ("worse", "reference with poems")


def test_fp8_no_farther_from_fp32_than_bf16_says_so() -> None:
    text = Text(0.0031, 0.0031)
    bf16 = BF16.model_copy(update={"kl_fp32_nats": 6.8e-5})
    fp8 = RuntimeAccuracy(perplexity=10.0, nll_nats=2.3, perplexity_increase=text.rise, kl_fp32_nats=6.7e-5)
    accuracy = Accuracy(protocol=PROTOCOL, runtimes={"bf16": bf16, "reference": fp8})
    assert "FP8 is no farther from FP32 than BF16 is: KL 6.7e-05 nats against 6.8e-05." in (
        decide(accuracy, text.nll).detail
    )


def fp8(kl: float, flips: float, rise: float = 0.0) -> RuntimeAccuracy:
    return RuntimeAccuracy(
        perplexity=10.0, nll_nats=2.3, perplexity_increase=rise, kl_mean_nats=kl, top1_agreement=1 - flips
    )


def of_all(reference: RuntimeAccuracy, asked: VerdictLimits = VerdictLimits(), **others: RuntimeAccuracy) -> Verdict:
    """The verdict on 20 windows of 2 scored tokens."""
    text = Text(reference.perplexity_increase or 0.0, reference.perplexity_increase or 0.0)
    accuracy = Accuracy(protocol=PROTOCOL, runtimes={"bf16": BF16, "reference": reference, **others})
    kl = np.full((20, 3), reference.kl_mean_nats, np.float32)
    kl[:, 0] = nan
    return decide(accuracy, text.nll, asked, {"reference": kl})


def test_a_perplexity_that_falls_is_worse_where_kl_and_flips_are_far_beyond() -> None:
    found = of_all(fp8(0.032, 0.125, rise=-0.003))
    assert found.kind == "worse"
    assert found.exceeded == ["kl", "flips"]
    assert found.sentence == (
        "Worse: KL 0.032 nats (limit 0.00995), 12 of 100 next tokens differ (limit 8), −0.30 % perplexity (limit 1 %)"
    )
    assert (found.kl_nats, found.flips, found.kl_limit_nats) == (0.032, 0.125, log1p(0.01))


def test_a_loss_within_all_limits_is_acceptable_with_the_three_intervals() -> None:
    found = of_all(fp8(0.0037, 0.05, rise=0.0019))
    assert (found.kind, found.exceeded) == ("acceptable", [])
    assert found.sentence == (
        "Acceptable: +0.19 % perplexity (limit 1 %), KL 0.0037 nats (limit 0.00995), 5.0 of 100 next tokens differ "
        "(limit 8)"
    )
    # Clopper and Pearson: 2 of 40 tokens
    assert "95 % interval +0.19 to +0.19 %. KL 0.0037 to 0.0037 nats; 0.61 to 17 of 100 tokens, which reaches over" in (
        found.detail
    )


@pytest.mark.parametrize(
    ("kl", "judged"),
    [
        (0.00655, "acceptable, +0.40 % perplexity (limit 1 %), KL 0.00655 nats (limit 0.00995), {differ}"),
        (0.0238, "worse, KL 0.0238 nats (limit 0.00995), +0.40 % perplexity (limit 1 %), {differ}"),
    ],
)
def test_one_code_is_judged_beside_two_and_decides_nothing(kl: float, judged: str) -> None:
    """What the plugin buys: once it was said only that vLLM computes another model without it."""
    one = {"one-term": fp8(kl, 0.05, rise=0.004)}
    found = of_all(fp8(0.003, 0.03, rise=0.001), VerdictLimits(), **one)
    assert (found.kind, found.runtime) == ("acceptable", "reference")
    assert found.detail.endswith(
        ". In one code, as vLLM without the plugin and transformers compute it: "
        f"{judged.format(differ='5.0 of 100 next tokens differ (limit 8)')}. {DEFAULTS}"
    )


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (fp8(0.009952, 0.05, rise=0.001), "Worse: KL 0.009952 nats (limit 0.00995), "),  # not "0.00995 (limit 0.00995)"
        (fp8(0.00995, 0.05, rise=0.001), "KL 0.00995 nats (limit 0.00995), "),
        (fp8(0.001, 0.08004, rise=0.001), "Worse: 8.004 of 100 next tokens differ (limit 8), "),
        (fp8(0.001, 0.08, rise=0.001), "8.0 of 100 next tokens differ (limit 8)"),
        (fp8(0.001, 0.05, rise=0.010004), "Worse: +1.0004 % perplexity (limit 1 %), "),
        (fp8(0.001, 0.05, rise=0.01), "+1.00 % perplexity (limit 1 %), "),
    ],
)
def test_what_exceeds_a_limit_never_reads_as_the_limit(reference: RuntimeAccuracy, said: str) -> None:
    assert said in of_all(reference).sentence


@pytest.mark.parametrize(
    ("flips", "said"), [(0.035, "3.5"), (0.03, "3.0"), (0.04, "4.0"), (0.114, "11"), (0.0996, "10"), (0.0, "0")]
)
def test_an_interval_of_flips_is_as_fine_as_the_value_in_it(flips: float, said: str) -> None:
    """Once 3.5 of 100 in 3 to 4."""
    assert measured_of_100(flips) == said


@pytest.mark.parametrize(
    ("kl", "agreement", "beyond"),
    [(log1p(0.01), 0.92, []), (0.00996, 0.92, ["kl"]), (log1p(0.01), 0.9199, ["flips"])],
)
def test_a_measure_at_its_limit_is_within(kl: float, agreement: float, beyond: list[str]) -> None:
    found = of_all(fp8(kl, 0.0).model_copy(update={"top1_agreement": agreement}))
    assert found.exceeded == beyond
    assert found.kind == ("worse" if beyond else "acceptable")


@pytest.mark.parametrize(
    ("asked", "own_kl", "own_flips", "kl", "flips"),
    [
        (VerdictLimits(), None, None, log1p(0.01), 0.08),
        (VerdictLimits(max_ppl_increase=0.001), None, None, log1p(0.01), 0.08),  # never below the defaults
        (VerdictLimits(max_ppl_increase=expm1(4 * log1p(0.01))), None, None, 4 * log1p(0.01), 0.16),  # √4 times
        (VerdictLimits(max_kl=0.002), None, None, 0.002, 0.08),
        (VerdictLimits(max_kl=4 * log1p(0.01), max_flips=0.03), None, None, 4 * log1p(0.01), 0.03),
        (VerdictLimits(), 1e-4, 0.01, log1p(0.01), 0.08),
        (VerdictLimits(), 4e-3, 0.05, 0.04, 0.08 * (0.04 / log1p(0.01)) ** 0.5),  # 10 times BF16's own KL
        (VerdictLimits(), 1e-4, 0.05, log1p(0.01), 0.05 * 10**0.5),  # √10 times BF16's own flips
        (VerdictLimits(max_kl=0.5, max_flips=0.5), 4e-3, 0.05, 0.5, 0.5),
        (VerdictLimits(max_ppl_increase=1e6), None, None, log1p(1e6), 1.0),
    ],
)
def test_limits_follow_from_that_of_perplexity_and_from_the_distance_of_bf16(
    asked: VerdictLimits, own_kl: float | None, own_flips: float | None, kl: float, flips: float
) -> None:
    bf16 = BF16.model_copy(update={"kl_fp32_nats": own_kl})
    runtimes = {"bf16": bf16}
    if own_flips is not None:
        runtimes["fp32"] = BF16.model_copy(update={"top1_agreement": 1 - own_flips})
    limits = limits_for(runtimes, asked)
    assert (limits.kl_nats, limits.flips) == pytest.approx((kl, flips))


def test_the_runtime_that_uses_most_of_the_limits_decides() -> None:
    # of perplexity 0.5 %, half of the limit; of KL 0.009, nine tenths
    found = of_all(fp8(0.001, 0.01, rise=0.005), onnxruntime=fp8(0.009, 0.02))
    assert found.runtime == "onnxruntime"
    assert found.kl_nats == 0.009


def test_the_share_used_is_of_the_measure_that_uses_most_and_in_proportion_to_kl() -> None:
    limits = limits_for({}, VerdictLimits())
    assert used(RuntimeLoss(0.01), limits) == pytest.approx(1.0)
    assert used(RuntimeLoss(-0.5, 2 * log1p(0.01)), limits) == pytest.approx(2.0)
    assert used(RuntimeLoss(0.0, 0.001, 0.04), limits) == pytest.approx(
        0.25
    )  # half of the flips are a quarter of the KL
    none = limits_for({}, VerdictLimits(max_kl=0))
    assert used(RuntimeLoss(0.0, 0.0), none) == 0.0
    assert used(RuntimeLoss(0.0, 1e-6), none) == float("inf")


def test_the_budget_of_tune_is_the_kl_at_which_all_measures_are_within() -> None:
    assert tune_budget(of_all(fp8(0.001, 0.01, rise=0.02))) == "--max-ppl-increase 1%"
    assert tune_budget(of_all(fp8(0.032, 0.10))) == "--max-kl 0.00995"  # no more than the limit of 0.009950...
    assert tune_budget(of_all(fp8(0.008, 0.16))) == "--max-kl 0.002"  # flips are to halve, and so KL to a quarter
    assert tune_budget(Verdict(kind="worse", sentence="", limit=0.02)) == "--max-ppl-increase 2%"  # an older file's


def test_what_another_host_stored_bounds_the_kl_from_below() -> None:
    distance = StoredDistance(
        nll_increase_nats=Estimate(mean=0.0, low=0.0, high=0.0), kl_nats=Estimate(mean=0.02, low=0.018, high=0.022),
        kl_most_nats=1.0, rest=0.1, top1_agreement=0.95,
    )  # fmt: skip
    stored = AgainstStored(positions=100, top=32, runtimes={"bf16": distance})
    engine = RuntimeAccuracy(perplexity=10.0, nll_nats=2.3, perplexity_increase=0.0, stored=stored)
    text = Text(0.0, 0.0)
    accuracy = Accuracy(protocol=PROTOCOL, runtimes={"bf16": BF16, "tensorrt": engine})
    found = decide(accuracy, {"bf16": text.nll["bf16"], "tensorrt": text.nll["reference"]})
    assert (found.kind, found.exceeded) == ("worse", ["kl"])
    assert found.sentence.startswith("Worse: KL at least 0.02 nats (limit 0.00995), +0.00 % perplexity")
    assert "KL 0.018 to 0.022 nats; 1.6 to 11 of 100 tokens" in found.detail  # 5 of 100, exactly


def test_nothing_compared_is_not_known_and_no_number_is_broken() -> None:
    alone = decide(Accuracy(protocol=PROTOCOL, runtimes={"bf16": BF16}), {})
    assert (alone.kind, alone.runtime) == ("unknown", None)
    broken = RuntimeAccuracy(perplexity=nan, nll_nats=nan, perplexity_increase=nan)
    found = decide(Accuracy(protocol=PROTOCOL, runtimes={"bf16": BF16, "reference": broken}), {})
    assert (found.kind, found.sentence) == ("broken", "Broken: the perplexity of reference is nan")


def test_the_noise_floor_is_of_fp32_and_of_both_halves_of_the_windows() -> None:
    text = Text(0.001, 0.003)
    halves = increase_halves(text.nll["bf16"], text.nll["reference"])
    assert halves == pytest.approx([0.001, 0.003], rel=1e-3)
    assert increase_halves(text.nll["bf16"][:1], text.nll["reference"][:1]) is None
    bf16 = BF16.model_copy(update={"kl_fp32_nats": 1e-4, "perplexity_over_fp32": 0.0002})
    fp8 = RuntimeAccuracy(perplexity=10.0, nll_nats=2.3, increase_halves=halves)
    accuracy = Accuracy(protocol=PROTOCOL, runtimes={"bf16": bf16, "reference": fp8})
    assert noise_floor(accuracy) == (
        "Noise floor: BF16 itself is 0.0001 nats (KL) and +0.02 % perplexity from FP32; on either half of the windows "
        "the increase is +0.10 % and +0.30 % (reference)."
    )
    without = accuracy.model_copy(update={"runtimes": {"bf16": BF16}})
    assert noise_floor(without) == ("Noise floor: BF16's distance from FP32 was not measured (add fp32 to --runtimes).")
    assert noise_floor(accuracy.model_copy(update={"runtimes": {}})) == ""
