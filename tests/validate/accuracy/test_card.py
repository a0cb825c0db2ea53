"""The table of a model card, with numbers worked by hand."""

import numpy as np

from fp8q.calibrate.text.evaluation import Protocol, cut, evenly_spaced
from fp8q.options import VerdictLimits
from fp8q.validate.accuracy.card import card_table, repeating_command
from fp8q.validate.accuracy.document import Accuracy, RuntimeAccuracy, Verdict

PROTOCOL = Protocol(dataset="text.txt", sha256="ab" * 32, tokens=40, of_tokens=100, context=8, stride=4)


def accuracy(runtime: str | None = "reference", kl: float | None = 0.25) -> Accuracy:
    return Accuracy(
        protocol=PROTOCOL,
        runtimes={
            "bf16": RuntimeAccuracy(perplexity=10.0, nll_nats=2.3, kl_fp32_nats=0.002),
            "reference": RuntimeAccuracy(
                perplexity=10.1, nll_nats=2.31, perplexity_increase=0.01, kl_mean_nats=kl, kl_p99_nats=1.5,
                top1_agreement=0.95,
            ),
        },
        verdict=Verdict(kind="acceptable", sentence="", limit=0.01, runtime=runtime),
    )  # fmt: skip


def test_the_table_has_perplexity_kl_flips_and_the_noise_floor() -> None:
    losses = {"bf16": np.full((40, 5), 2.0, np.float32), "reference": np.full((40, 5), 2.0 + np.log(1.01), np.float32)}
    table = card_table(accuracy(), losses, {"reference": np.full((40, 5), 0.25, np.float32)})
    assert table is not None
    assert table.split("\n") == [
        "| FP8 (reference) against BF16 | |",
        "|---|---|",
        "| perplexity | 10.0000 in BF16, 10.1000, +1.00 % (+1.00 to +1.00 %, 95 %) |",
        "| KL(BF16 ‖ FP8), nats a token | mean 0.25 (0.25 to 0.25, 95 % over windows), 99th percentile 1.5 |",
        "| flips: tokens of which another is the likeliest | 5.00 % (0.61 to 16.92 %, 95 %) |",
        "| noise floor: KL(FP32 ‖ BF16) | 0.002 |",
    ]


def test_what_was_not_measured_is_left_out() -> None:
    table = card_table(accuracy(kl=None), {}, {})
    assert table is not None
    assert "| perplexity | 10.0000 in BF16, 10.1000, +1.00 % |" in table
    assert "KL(BF16" not in table


def test_without_a_runtime_that_decided_there_is_no_table() -> None:
    assert card_table(accuracy(runtime=None), {}, {}) is None


def test_too_few_windows_have_no_interval() -> None:
    """The verdict above the table says that nine windows give none."""
    losses = np.full((9, 5), 0.25, np.float32)
    table = card_table(accuracy(), {"bf16": losses, "reference": losses}, {"reference": losses})
    assert table is not None
    assert "| mean 0.25, 99th percentile 1.5 |" in table
    assert "| 10.0000 in BF16, 10.1000, +1.00 % |" in table


def test_the_command_repeats_protocol_and_limits_on_the_run() -> None:
    assert repeating_command(accuracy(), 10, VerdictLimits(), own_text=True) == (
        "fp8q validate RUN --runtimes bf16,reference --context 8 --stride 4 --max-tokens 40"
    )
    served = accuracy().model_copy(
        update={"protocol": PROTOCOL.model_copy(update={"prompt": 4, "stride": 8, "of_tokens": None, "overlap": 0.5})}
    )
    asked = VerdictLimits(max_ppl_increase=0.05, max_kl=0.01, max_flips=0.08)
    assert repeating_command(served, 10, asked, own_text=False) == (
        "fp8q validate RUN --data TEXT --runtimes bf16,reference --context 8 --as-served 4 --max-tokens 40 "
        "--allow-overlap --max-ppl-increase 5% --max-kl 0.01 --max-flips 8%"
    )


def test_the_most_tokens_of_the_command_choose_the_same_windows() -> None:
    """Documents begin in the first and the last of nine windows, whose BOS is not scored: these two score 15 tokens of
    85, of which 15 would be one window, and 2 · 85 / 9 = 18.9 are two.
    """
    ids = np.ones(91, np.int64)
    ids[[0, 3, 6, 82, 85, 88]] = 0
    every = cut(ids, "text", 11, 10, (0,))
    two = evenly_spaced(every, 20)
    assert (len(two.ids), two.protocol.tokens, two.protocol.of_tokens) == (2, 15, 85)
    assert len(evenly_spaced(every, 15).ids) == 1
    scored = accuracy().model_copy(update={"protocol": two.protocol})
    command = repeating_command(scored, len(two.ids), VerdictLimits(), own_text=True)
    assert command == "fp8q validate RUN --runtimes bf16,reference --context 11 --max-tokens 19"
    assert np.array_equal(evenly_spaced(every, 19).ids, two.ids)
