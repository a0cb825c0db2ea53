"""One limit decides whether FP8 is good enough; the interval says how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log1p, nan

import numpy as np
import numpy.typing as npt
import pytest

from fp8q.validate.accuracy.bootstrap import increase_halves
from fp8q.validate.accuracy.decision import decide, noise_floor
from fp8q.validate.accuracy.document import Accuracy, Protocol, RuntimeAccuracy

PROTOCOL = Protocol(dataset="text", sha256="0", tokens=40, context=3, stride=2)
BF16 = RuntimeAccuracy(perplexity=10.0, nll_nats=2.3)


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
    found = decide(accuracy, text.nll, limit)
    assert found.runtime == "reference"
    assert (found.limit, found.limit_is_default) == (limit or 0.01, limit is None)
    return found.kind, found.sentence, found.detail


def test_an_increase_within_the_limit_is_acceptable_however_sure_it_is() -> None:
    assert judged(Text(0.0017, 0.0017)) == (
        "acceptable",
        "Acceptable: +0.17 % perplexity (limit 1 %)",
        "Of reference. 95 % interval +0.17 to +0.17 %. The limit is fp8q’s default; --max-ppl-increase sets yours.",
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
    assert decide(accuracy, text.nll, 0.05).runtime == "reference"
    found = decide(accuracy, text.nll, 0.01)
    assert (found.kind, found.runtime) == ("worse", "reference with poems")


def test_fp8_no_farther_from_fp32_than_bf16_says_so() -> None:
    text = Text(0.0031, 0.0031)
    bf16 = BF16.model_copy(update={"kl_fp32_nats": 6.8e-5})
    fp8 = RuntimeAccuracy(perplexity=10.0, nll_nats=2.3, perplexity_increase=text.rise, kl_fp32_nats=6.7e-5)
    accuracy = Accuracy(protocol=PROTOCOL, runtimes={"bf16": bf16, "reference": fp8})
    assert "FP8 is no farther from FP32 than BF16 is: KL 6.7e-05 nats against 6.8e-05." in (
        decide(accuracy, text.nll).detail
    )


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
