"""The table of a model card, with numbers worked by hand."""

import numpy as np

from fp8q.validate.accuracy.card import card_table, repeating_command
from fp8q.validate.accuracy.document import Accuracy, Protocol, RuntimeAccuracy, Verdict

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


def test_the_command_repeats_the_protocol() -> None:
    assert repeating_command(accuracy()) == (
        "fp8q compare ORIGINAL --model DIRECTORY --data TEXT --out OUT --context 8 --max-tokens 40"
    )
