"""KL, flips and loss each exclude a model, by limits that follow from a run's own runtimes."""

from __future__ import annotations

from dataclasses import replace
from math import expm1, sqrt

import numpy as np
import pytest

from fp8q import options
from fp8q.validate.accuracy.bootstrap import Bootstrap
from fp8q.validate.accuracy.top_logits import TopLogits, TopTokens
from fp8q.validate.endpoint.answers import LikelyTokens
from fp8q.validate.endpoint.distance import Distances
from fp8q.validate.endpoint.judgement import (
    Field,
    Judged,
    _verdict,
    arithmetic_of,
    excesses,
    judge,
    noise_of,
    noticed,
)

WINDOWS, EACH, TOKENS = 12, 50, 32
ROWS = WINDOWS * EACH
BOOTSTRAP = Bootstrap(np.repeat(np.arange(WINDOWS), EACH))


def distances_of(kl: float, flips: float, loss: float) -> Distances:
    """Equal at every position, but for flips, which are the first of each window."""
    flipped = np.arange(ROWS) % EACH < round(flips * EACH)
    return Distances(np.full(ROWS, kl), np.zeros(ROWS), flipped.astype(np.float64), np.full(ROWS, loss))


NOISE = noise_of([distances_of(0.001, 0.02, -0.003), distances_of(0.002, 0.01, 0.001)], [0.02, 0.01], ROWS, BOOTSTRAP)


@pytest.mark.parametrize(("found", "sure"), [
    (distances_of(0.0039, 0.02, 0.0059), []),
    (distances_of(0.0041, 0.0, 0.0), ["KL"]),
    (distances_of(0.0, 0.06, 0.0), ["flips"]),
    (distances_of(0.0, 0.0, 0.0061), ["loss"]),
    (distances_of(0.0, 0.0, -0.0061), ["loss"]),
])  # fmt: skip
def test_each_measure_is_held_against_the_largest_of_the_runs_own(found: Distances, sure: list[str]) -> None:
    """Twice a KL is √2 times as many flips: limits are 0.004 nats, 2.8 % and 0.006 nats."""
    measures = excesses(found, NOISE, 2.0, None, BOOTSTRAP)
    assert [each.measure for each in measures if each.sure] == sure
    assert [each.limit for each in measures] == pytest.approx([0.004, 0.02 * sqrt(2), 0.006])


def test_the_power_is_the_limit_and_what_an_interval_adds() -> None:
    """Equal values have intervals of no width, and flips of 2 % in 50 positions are one in each window."""
    power = noticed(excesses(distances_of(0.001, 0.02, 0.0), NOISE, 2.0, None, BOOTSTRAP))
    assert [power.kl_nats, power.flips, power.perplexity] == pytest.approx([0.004, 0.02 * sqrt(2), expm1(0.006)])
    assert str(power) == "0.004 nats of KL, 2.8% flips or 0.6% of perplexity"


def test_no_flip_of_the_runs_own_allows_those_that_so_many_positions_do_not_exclude() -> None:
    noise = noise_of([distances_of(0.001, 0.0, 0.0)], [0.0], ROWS, BOOTSTRAP)
    assert noise.flips == 3 / ROWS


def test_of_likeliest_tokens_alone_those_count_at_which_the_runtimes_agree() -> None:
    agreed = np.arange(ROWS) % 2 == 0
    found = distances_of(np.nan, 0.0, np.nan)
    only = Distances(found.kl, found.rest, np.where(agreed, 0.0, 1.0), found.loss)
    (flips,) = excesses(only, NOISE, 2.0, agreed, BOOTSTRAP)
    assert (flips.measure, flips.sure) == ("flips", False)
    assert flips.noticed == pytest.approx(0.02 * sqrt(2))
    assert excesses(only, NOISE, 2.0, ~agreed, BOOTSTRAP)[0].sure


def logits_of(seed: int, noise: float, of: np.ndarray | None = None) -> np.ndarray:
    random = np.random.default_rng(seed).normal(size=(ROWS, TOKENS))
    found: np.ndarray = 3 * random if of is None else of + noise * random
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    return found


REFERENCE = logits_of(1, 0.0)
OWN = np.argsort(-REFERENCE, axis=1)[:, 3]


def judged(answers: np.ndarray, runtimes: dict[str, np.ndarray], rows: int = ROWS) -> Judged:
    """The verdict on a server of so many `rows`, in which it lists 20 tokens."""
    order = {name: np.argsort(-each, axis=1) for name, each in (runtimes | {"answers": answers}).items()}
    losses = {name: -each[np.arange(ROWS), OWN] for name, each in (runtimes | {"answers": answers}).items()}
    tops = {
        name: TopLogits(
            order[name].astype(np.int32),
            np.take_along_axis(each, order[name], 1).astype(np.float32),
            np.full(ROWS, -np.inf, np.float32),
        )
        for name, each in runtimes.items()
    }
    kept = TopTokens(
        np.arange(WINDOWS), OWN.reshape(WINDOWS, EACH), np.ones((WINDOWS, EACH), np.bool_), tops,
        {name: losses[name].astype(np.float32) for name in runtimes},
    )  # fmt: skip
    listed = order["answers"][:rows, :20]
    logprobs = np.take_along_axis(answers, order["answers"], 1)[:rows, :20]
    found = LikelyTokens(np.arange(rows), listed, logprobs, losses["answers"][:rows], 0, 0)
    return judge(kept, found, np.repeat(np.arange(WINDOWS), EACH))


RUNTIMES = {
    "bf16": logits_of(2, 0.05, REFERENCE), "reference": REFERENCE, "onnxruntime": logits_of(3, 0.03, REFERENCE),
}  # fmt: skip


def test_an_implementation_passes_and_says_its_power() -> None:
    found = judged(logits_of(4, 0.02, REFERENCE), RUNTIMES)
    assert found.verdict == "validated"
    assert found.sentence.endswith(f"; further than {found.noticed} would not pass")


def test_a_server_of_two_codes_is_told_from_one_of_one() -> None:
    one = logits_of(5, 0.3, REFERENCE)
    both = judged(logits_of(4, 0.02, REFERENCE), RUNTIMES | {"one-term": one})
    assert both.verdict == "validated"
    assert both.arithmetics == ["as validated"]
    assert both.runtimes[-1].runtime == "one-term"
    first = judged(logits_of(6, 0.02, one), RUNTIMES | {"one-term": one})
    assert first.verdict == "other-arithmetic"
    assert first.arithmetics == ["one term where two were validated"]


def test_what_flips_no_token_is_another_model_by_kl_and_says_so() -> None:
    cold = REFERENCE / 0.5
    found = judged(cold - np.log(np.exp(cold).sum(axis=1, keepdims=True)), RUNTIMES)
    assert (found.verdict, found.runtimes[0].flips.mean < 0.02) == ("other-model", True)
    assert found.sentence.endswith("; not by flips, so that it may be the model at another temperature or softcap")


def flipped(share: float) -> np.ndarray:
    """The two likeliest tokens are exchanged where they are nearest, which moves KL and loss least."""
    best = np.argsort(-REFERENCE, axis=1)[:, :2]
    rows = np.arange(ROWS)
    gap = REFERENCE[rows, best[:, 0]] - REFERENCE[rows, best[:, 1]]
    some = np.argsort(gap)[: int(share * ROWS)]
    found = REFERENCE.copy()
    found[some[:, None], best[some]] = REFERENCE[some[:, None], best[some][:, ::-1]]
    return found


def test_flips_alone_exclude_what_kl_does_not() -> None:
    found = judged(flipped(0.05), RUNTIMES)
    assert found.runtimes[0].kl_nats is not None
    assert found.runtimes[0].kl_nats.mean < 0.0005
    assert (found.verdict, found.arithmetics) == ("other-arithmetic", [])


def test_a_run_of_one_runtime_lets_nothing_pass() -> None:
    found = judged(REFERENCE, {"reference": REFERENCE})
    assert (found.verdict, found.arithmetics) == ("undecided", ["as validated", "another model"])
    assert found.sentence.endswith(
        "and a run of one runtime does not tell how far another implementation may be; validate with a second runtime"
    )


def test_every_runtime_has_its_arithmetic_and_engines_that_of_their_precision() -> None:
    """An engine in BF16 was once taken for one of what was validated."""
    names: dict[str, list[str]] = {}
    for runtime in options.RUNTIMES:
        names.setdefault(arithmetic_of(runtime), []).append(runtime)
    assert {"reference", "onnxruntime", "tensorrt", "tensorrt-rtx"} <= set(names.pop("as validated"))
    assert names == {
        "BF16": ["bf16", "fp32", "original", "onnxruntime-bf16", "tensorrt-bf16", "tensorrt-rtx-bf16"],
        "INT8": ["onnxruntime-int8", "tensorrt-int8", "tensorrt-rtx-int8"],
        "one term where two were validated": ["one-term"],
    }


def unclear(to_bf16: float) -> Field:
    """Answers between the reference and BF16, whose losses differ by 0.5 nats from window to window either way: so few
    windows may hide ten times the run's own difference.
    """
    swings = np.where(np.arange(ROWS) // EACH % 2, 0.5, -0.5)
    to = {"reference": distances_of(0.0012, 0.0, 0.0), "bf16": distances_of(to_bf16, 0.0, 0.0)}
    to = {name: replace(found, loss=swings) for name, found in to.items()}
    between = distances_of(0.003, 0.02, 0.001)
    pairs = (("reference", "bf16"), ("bf16", "reference"))
    return Field(to, dict.fromkeys(pairs, between), dict.fromkeys(pairs, 0.02), ROWS, None, BOOTSTRAP, "ask me more")


def test_what_is_nearer_to_bf16_than_what_was_validated_loses_no_more_and_passes() -> None:
    """The windows' losses decide nothing, and the answers are nearer to the reference, which is 0.003 from BF16."""
    verdict, sentence, arithmetics = _verdict(unclear(0.002))
    assert (verdict, arithmetics) == ("undecided", ["as validated"])
    assert sentence == (
        "as validated: 0.0012 nats of KL from reference, and nearer to BF16 than what was validated (0.002 "
        "nats of KL from bf16, where reference is 0.003 away): whichever it is, no more is lost than was validated"
    )


@pytest.mark.parametrize(
    ("to_validated", "to_other", "possible"),
    [
        (0.003, 0.001, True),  # shares (0.003 + 0.003 - 0.001) / 2 = 0.0025 of an error of 0.003
        (0.003, 0.006, False),  # as large an error in another direction, of which it shares nothing
        (0.003, 0.0044, True),  # shares 0.0008, more than a quarter
        (0.003, 0.0046, False),  # shares 0.0007, less
        (0.0061, 0.001, False),  # more than twice as far
    ],
)  # fmt: skip
def test_an_arithmetic_is_possible_by_its_size_and_by_a_quarter_of_its_error(
    to_validated: float, to_other: float, possible: bool
) -> None:
    to = {"reference": distances_of(to_validated, 0.0, 0.0), "one-term": distances_of(to_other, 0.0, 0.0)}
    pairs = (("reference", "one-term"), ("one-term", "reference"))
    between = dict.fromkeys(pairs, distances_of(0.003, 0.02, 0.001))
    field = Field(to, between, dict.fromkeys(pairs, 0.02), ROWS, None, BOOTSTRAP, "ask me more")
    assert field.may_be("one-term") is possible


def test_what_is_no_nearer_to_bf16_names_a_remedy_that_there_is() -> None:
    """The windows' losses decide nothing, and the reference is nearer to BF16 than the answers are."""
    verdict, sentence, arithmetics = _verdict(unclear(0.0032))
    assert (verdict, arithmetics) == ("undecided", ["as validated", "another model"])
    assert sentence == (
        "as validated, or another model: 0.0012 nats of KL from reference, and so few positions do not tell; ask "
        "me more"
    )
