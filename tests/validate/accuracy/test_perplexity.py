"""Windows and scores: what is scored, by hand."""

from collections.abc import Callable
from math import nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loaded_runtimes import compare_runtimes

from fp8q.core.errors import GateError, InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import TWO, VerdictLimits
from fp8q.stages.shared.gates import check_numbers, check_verdict
from fp8q.validate.accuracy.decision import decide
from fp8q.validate.accuracy.document import Accuracy, Protocol, RuntimeAccuracy
from fp8q.validate.accuracy.perplexity import cut, evenly_spaced

IDS = np.arange(10, dtype=np.int64)
ONE = VerdictLimits(max_ppl_increase=0.01)


def test_windows_without_overlap_score_all_but_their_first_token() -> None:
    evaluation = cut(IDS, "text", 4, 4)
    assert evaluation.ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # 8 and 9 fill no window
    assert evaluation.scored.tolist() == [[False, True, True, True]] * 2
    assert evaluation.protocol.tokens == 6


def test_a_stride_scores_each_token_once_with_more_context() -> None:
    evaluation = cut(IDS, "text", 4, 2)
    assert evaluation.ids.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert sorted(evaluation.ids[evaluation.scored].tolist()) == list(range(1, 10))
    assert evaluation.protocol.stride == 2


def test_with_a_prefix_every_token_of_the_text_is_scored_the_first_too() -> None:
    evaluation = cut(np.array([99, *IDS]), "text", 4, 3, (99,))
    assert evaluation.ids.tolist() == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]  # 9 fills no window
    assert evaluation.scored.tolist() == [[False, True, True, True]] * 3
    assert (evaluation.protocol.tokens, evaluation.protocol.prefix, evaluation.protocol.bos) == (9, [99], "auto")
    assert cut(IDS, "text", 4, 3, (99,)).ids.tolist() == evaluation.ids.tolist()  # held out of the middle of a text


def test_with_a_prefix_a_stride_counts_the_text_and_scores_each_token_once() -> None:
    evaluation = cut(np.array([99, *IDS]), "text", 4, 2, (99,))
    assert evaluation.ids.tolist() == [[99, 0, 1, 2], [99, 2, 3, 4], [99, 4, 5, 6], [99, 6, 7, 8]]
    assert evaluation.scored.tolist() == [[False, True, True, True], *[[False, False, True, True]] * 3]
    assert sorted(evaluation.ids[evaluation.scored].tolist()) == list(range(9))


def test_a_prefix_of_two_tokens_leaves_two_less_for_the_text() -> None:
    evaluation = cut(IDS, "text", 4, 1, (99, 98))
    assert evaluation.ids[:2].tolist() == [[99, 98, 0, 1], [99, 98, 1, 2]]
    assert evaluation.scored[:2].tolist() == [[False, False, True, True], [False, False, False, True]]


def test_where_a_document_begins_inside_a_window_the_prefix_is_not_scored() -> None:
    evaluation = cut(np.array([99, 0, 1, 99, 2, 3, 4]), "text", 4, 3, (99,))
    assert evaluation.ids.tolist() == [[99, 0, 1, 99], [99, 2, 3, 4]]
    assert evaluation.scored.tolist() == [[False, True, True, False], [False, True, True, True]]


@given(tokens=st.integers(1, 60), context=st.integers(2, 12), prefix=st.integers(0, 2), data=st.data())
def test_no_token_is_scored_twice_and_none_is_left_out(
    tokens: int, context: int, prefix: int, data: st.DataObject
) -> None:
    front = tuple(range(1000, 1000 + min(prefix, context - 1)))
    tokens += context
    evaluation = cut(np.arange(tokens), "text", context, data.draw(st.integers(1, context - len(front))), front)
    scored = evaluation.ids[evaluation.scored].tolist()
    last = int(evaluation.ids[-1, -1])
    if front or evaluation.protocol.stride < context:
        assert scored == list(range(0 if front else 1, last + 1))
    else:  # the first of each window has no past
        assert scored == [token for token in range(last + 1) if token % context]


@pytest.mark.parametrize(
    ("context", "stride", "message"),
    [
        (4, 4, "--stride 4: must lie between 1 and 3, the context 4 less the 1 that each window begins with"),
        (
            1,
            1,
            "--context 1: a window needs at least 2 tokens, one to read and one to score",
        ),
        (12, 11, "text: has 10 tokens, less than one window of 12; give more text or a smaller --context"),
    ],
)
def test_windows_that_cannot_begin_with_the_prefix_are_refused(context: int, stride: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        cut(IDS, "text", context, stride, (99,))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("context", "stride", "message"),
    [
        (4, 5, "--stride 5: must lie between 1 and the context, 4"),
        (1, 1, "--context 1: a window needs at least 2 tokens, one to read and one to score"),
        (11, 11, "text: has 10 tokens, less than one window of 11; give more text or a smaller --context"),
    ],
)
def test_windows_that_cannot_be_are_refused(context: int, stride: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        cut(IDS, "text", context, stride)
    assert str(error.value) == message


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


def test_a_long_text_is_scored_in_evenly_spaced_windows() -> None:
    whole = cut(np.arange(100), "text", 10, 10)
    assert whole.protocol.tokens == 90
    some = evenly_spaced(whole, 40)
    assert some.ids[:, 0].tolist() == [0, 30, 60, 90]
    assert (some.protocol.tokens, some.protocol.of_tokens) == (36, 90)
    assert some.protocol.description == (
        "36 of the 90 tokens of text, each scored once, in windows of 10 tokens every 10, evenly spaced"
    )
    assert some.protocol.sha256 == whole.protocol.sha256
    assert evenly_spaced(whole, 90) is whole
    assert evenly_spaced(whole, 1).protocol.tokens == 9  # one window at least


def test_windows_that_overlap_stay_below_the_limit() -> None:
    whole = cut(np.arange(100), "text", 10, 5)
    some = evenly_spaced(whole, 40)
    assert some.protocol.tokens == int(some.scored.sum()) <= 40
    assert np.isin(some.ids[:, 0], whole.ids[:, 0]).all()


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
