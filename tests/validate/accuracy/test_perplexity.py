"""Scores of known distributions, by hand, and gates on them."""

from collections.abc import Callable
from math import nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loaded_runtimes import compare_runtimes

from fp8q.calibrate.text.evaluation import Protocol, cut
from fp8q.core.errors import GateError, InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import TWO, VerdictLimits
from fp8q.stages.shared.gates import check_numbers, check_verdict
from fp8q.validate.accuracy.decision import decide
from fp8q.validate.accuracy.document import Accuracy, RuntimeAccuracy

IDS = np.arange(10, dtype=np.int64)
ONE = VerdictLimits(max_ppl_increase=0.01)


def test_perplexity_kl_and_agreement_of_two_known_distributions() -> None:
    """A uniform runtime against one that gives token 0 half of the probability, over four tokens."""
    evaluation = cut(np.zeros(8, np.int64), "text", 4, 4)
    skewed = torch.log(torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]))

    def uniform(ids: np.ndarray) -> torch.Tensor:
        return torch.zeros(*ids.shape, 4)

    accuracy, nll = compare_runtimes(
        evaluation, {"other": lambda ids: skewed.expand(*ids.shape, 4), "bf16": uniform}, 4, SILENT
    )
    assert accuracy.runtimes["bf16"].perplexity == pytest.approx(4)
    assert accuracy.runtimes["bf16"].kl_mean_nats is None
    other = accuracy.runtimes["other"]
    assert other.perplexity == pytest.approx(2)
    assert other.perplexity_increase == pytest.approx(-0.5)
    assert other.kl_mean_nats == pytest.approx(0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.25 * 6), abs=1e-6)
    assert other.top1_agreement == 1.0
    assert other.divergences is not None
    assert other.divergences.keys() == {"bf16||this", "this||bf16"}
    there, back = other.divergences["bf16||this"], other.divergences["this||bf16"]
    assert (there.mean, back.mean) == pytest.approx(
        (other.kl_mean_nats, 0.5 * np.log(2) + 0.5 * np.log(2 / 3)), abs=1e-6
    )
    assert (back.p50, back.p90, back.p99, back.max) == pytest.approx((back.mean,) * 4, abs=1e-6)  # all tokens are alike
    assert np.isnan(nll["other"][:, 0]).all()
    np.testing.assert_allclose(nll["other"][:, 1:], np.log(2), rtol=1e-6)


def test_with_fp32_each_runtime_has_both_directions_to_it_and_so_has_bf16() -> None:
    evaluation = cut(np.zeros(8, np.int64), "text", 4, 4)
    tables = {name: torch.log(torch.tensor([p, 1 - p])) for name, p in (("bf16", 0.5), ("fp32", 0.25), ("x", 0.75))}

    def forward(name: str) -> Callable[[np.ndarray], torch.Tensor]:
        return lambda ids: tables[name].expand(*ids.shape, 2)

    accuracy, _ = compare_runtimes(evaluation, {name: forward(name) for name in tables}, 2, SILENT)

    def kl(p: float, q: float) -> float:
        return float(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))

    found = {name: runtime.divergences or {} for name, runtime in accuracy.runtimes.items()}
    assert {name: each.mean for name, each in found["bf16"].items()} == pytest.approx(
        {"fp32||this": kl(0.25, 0.5), "this||fp32": kl(0.5, 0.25)}, abs=1e-6
    )
    assert {name: each.mean for name, each in found["x"].items()} == pytest.approx(
        {
            "bf16||this": kl(0.5, 0.75),
            "this||bf16": kl(0.75, 0.5),
            "fp32||this": kl(0.25, 0.75),
            "this||fp32": kl(0.75, 0.25),
        },
        abs=1e-6,
    )


def test_a_run_with_second_codes_is_tuned_for_the_server_that_multiplies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scales.json").touch()
    monkeypatch.setattr(Run, "without_graph", lambda self: "it was left out")
    protocol, bf16 = cut(IDS, "text", 4, 4).protocol, RuntimeAccuracy(perplexity=2.0, nll_nats=0.7)
    far = Accuracy(protocol=protocol, runtimes={"bf16": bf16, "reference": bf16.model_copy(update=FAR)})
    worse = far.model_copy(update={"verdict": decide(far, {}, ONE)})
    for modules, server in ((["a"], "vllm-plugin"), ([], "vllm")):
        scales = SimpleNamespace(forms=dict.fromkeys(modules, TWO))
        monkeypatch.setattr("fp8q.stages.shared.gates.load_scales", lambda run, scales=scales: scales)
        with pytest.raises(GateError, match=f" --for {server} --max-kl 0.00995` finds the cheapest mix"):
            check_verdict(Run(tmp_path), worse, ONE)


#: A runtime's loss that is beyond the limit of KL alone.
FAR = {"perplexity_increase": 0.0, "kl_mean_nats": 0.02}


def test_a_gate_fails_on_what_is_no_number_and_needs_something_to_compare() -> None:
    protocol = cut(IDS, "text", 4, 4).protocol
    bf16, broken = (
        RuntimeAccuracy(perplexity=2.0, nll_nats=0.7),
        RuntimeAccuracy(perplexity=float("nan"), nll_nats=float("nan"), perplexity_increase=float("nan")),
    )
    lost = Accuracy(protocol=protocol, runtimes={"bf16": bf16, "reference": broken})
    with pytest.raises(
        GateError, match="^reference: perplexity is not a number, more than --max-ppl-increase 1%; `fp8q tune run "
    ):
        check_verdict(Run(Path("run")), lost.model_copy(update={"verdict": decide(lost, {}, ONE)}), ONE)
    far = Accuracy(protocol=protocol, runtimes={"bf16": bf16, "reference": bf16.model_copy(update=FAR)})
    by_default = decide(far, {}, ONE)
    with pytest.raises(GateError) as raised:
        check_verdict(Run(Path("run")), far.model_copy(update={"verdict": by_default}), ONE)
    assert str(raised.value).startswith(
        "reference: KL from BF16 is 0.02 nats a token, more than the limit 0.00995 (--max-kl); `fp8q tune run "
    )
    with pytest.raises(
        InputError,
        match=(
            "^--max-ppl-increase 1%: needs bf16 and an FP8 runtime to compare, and the runtimes are reference; add "
            "what is missing to --runtimes$"
        ),
    ):
        check_verdict(Run(Path("run")), Accuracy(protocol=protocol, runtimes={"reference": bf16}), ONE)


def test_runtimes_are_the_same_however_many_windows_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = cut(np.random.default_rng(0).integers(0, 7, 60), "text", 6, 3)
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    runtimes = {"bf16": lambda ids: table[ids], "other": lambda ids: table[ids] * 1.1}
    together = compare_runtimes(evaluation, runtimes, 7, SILENT)
    monkeypatch.setattr("fp8q.validate.accuracy.compare.LOGITS_BYTES", 1)
    alone = compare_runtimes(evaluation, runtimes, 7, SILENT)
    assert alone[0] == together[0]
    np.testing.assert_array_equal(alone[1]["other"], together[1]["other"])


def test_a_perplexity_that_is_no_number_is_no_success() -> None:
    protocol = Protocol(dataset="text", sha256="0", tokens=1, context=2, stride=2)
    good, bad = RuntimeAccuracy(perplexity=2.0, nll_nats=0.7), RuntimeAccuracy(perplexity=nan, nll_nats=nan)
    check_numbers(Accuracy(protocol=protocol, runtimes={"bf16": good, "reference": good}))
    with pytest.raises(InputError) as blamed:
        check_numbers(Accuracy(protocol=protocol, runtimes={"reference": bad, "bf16": bad}))
    assert str(blamed.value) == (
        "bf16: perplexity is nan on text: the model gives no finite numbers before anything is quantized; check its "
        "config.json and its weights"
    )
    with pytest.raises(GateError) as lost:
        check_numbers(Accuracy(protocol=protocol, runtimes={"bf16": good, "reference": bad}))
    assert str(lost.value) == (
        "reference: perplexity is nan on text, and BF16's is a number; `fp8q inspect` shows what stands out, keep "
        "modules in BF16 with --skip"
    )
