"""Servers of a table of bigrams: each form of asking gives its numbers, and what servers do to prompts is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import processors

from fp8q.core.errors import BackendError, Fp8qError, InputError
from fp8q.core.reporter import SILENT
from fp8q.serve.loop.text import Vocabulary
from fp8q.validate.accuracy.top_logits import TopTokens
from fp8q.validate.endpoint.asking import Asked, ask_all, find_server, without_prefix
from fp8q.validate.endpoint.client import Client
from fp8q.validate.endpoint.distance import distances
from fp8q.validate.endpoint.judgement import Judged, judge, judge_prompt
from fp8q.validate.endpoint.prompts import prompts_of
from fp8q.validate.endpoint.reading import ReferenceReading, other_reading, reference_readings

from .stand_in import BOS, CONTEXT, TOKENS, WINDOWS, StandIn, kept_tokens, serving, table, vocabulary

BF16 = table(1)
TWO_TERMS = table(2, 0.03, BF16)
ONE_TERM = table(3, 0.1, TWO_TERMS)
RUNTIMES = {
    "bf16": BF16, "reference": TWO_TERMS, "onnxruntime": table(4, 0.01, TWO_TERMS), "one-term": ONE_TERM,
}  # fmt: skip
KEPT = kept_tokens(RUNTIMES)
NEW = table(5, 0.01, TWO_TERMS)
#: Another implementation of one term: half of its error is the one's, by power, and half its own.
OTHER_ONE_TERM = table(7, 0.07, table(3, 0.07, TWO_TERMS))
#: Runtimes that differ often in the likeliest token.
COARSE = kept_tokens({"bf16": BF16, "reference": TWO_TERMS, "one-term": table(3, 0.4, TWO_TERMS)})
#: The power of a verdict that passes.
POWER = r"further than \S+ nats of KL, \S+% flips or \S+% of perplexity would not pass"
EVERY = ("prompt_logprobs", "echo", "logprobs", "text")


def asked_of(
    server: StandIn, folder: Path, kept: TopTokens = KEPT, tail: int | None = None, timeout_s: float = 5
) -> Asked:
    """All answers of a server."""
    endpoint, longest = find_server(Client(server.url, timeout_s, server.key), None, kept, vocabulary())
    return ask_all(endpoint, prompts_of(kept, tail, None, longest), folder, tail, SILENT)


def judged_of(server: StandIn, folder: Path, kept: TopTokens = KEPT) -> Judged:
    found = asked_of(server, folder, kept)
    return judge_prompt(judge(kept, found.answers, np.nonzero(kept.positions)[0]), found.answers, None)


@pytest.mark.parametrize(("forms", "named", "positions"), [
    (EVERY, "prompt_logprobs", WINDOWS * (CONTEXT - 2)),
    (EVERY[1:], "echo", WINDOWS * (CONTEXT - 2)),
    (EVERY[2:], "logprobs", WINDOWS * 8),
])  # fmt: skip
def test_every_form_gives_the_servers_own_probabilities(
    forms: tuple[str, ...], named: str, positions: int, tmp_path: Path
) -> None:
    with serving(StandIn(NEW, forms)) as server:
        found = asked_of(server, tmp_path)
    assert (found.form, len(found.answers.rows)) == (named, positions)
    assert found.answers.sent == found.answers.counted
    before = KEPT.ids[:, 1:-1].ravel()[found.answers.rows]
    rows, (index, place) = NEW[before], np.nonzero(np.isfinite(found.answers.logprobs))
    np.testing.assert_allclose(found.answers.logprobs[index, place], rows[index, found.answers.tokens[index, place]])
    own = KEPT.ids[:, 2:].ravel()[found.answers.rows]
    known = np.isfinite(found.answers.nll)
    assert known.all() or named == "logprobs"
    np.testing.assert_allclose(found.answers.nll[known], -rows[known, own[known]])


@pytest.mark.parametrize("echoes", ["last", "fails"])
def test_a_server_that_echoes_no_prompt_is_asked_in_the_next_form(
    echoes: Literal["last", "fails"], tmp_path: Path
) -> None:
    """TensorRT-LLM's lists the token behind the prompt alone, or answers with a fault where the prompt is ids."""
    with serving(StandIn(NEW, EVERY[1:], echoes=echoes)) as server:
        found = asked_of(server, tmp_path)
    assert (found.form, len(found.answers.rows)) == ("logprobs", WINDOWS * 8)


READINGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "right": ({"template": "t5"}, None),
    "right, by its ids": ({"template": "t5", "returns_ids": True}, None),
    "a BOS": (
        {"bos": "t3"},
        "another tokenizer or BOS: it reads 4 texts as 68 tokens, which the run's tokenizer reads as 64",
    ),
    "a BOS, by its ids": (
        {"bos": "t3", "returns_ids": True},
        "another tokenizer or BOS: it reads a text with 't3' as token 1 of 17, where the run has 't0'",
    ),
    "a template": (
        {"template": "t5 t6"},
        "another chat template: it reads a chat as 18 tokens, which is 17 by the run's template",
    ),
    "a template, by its ids": (
        {"template": "t6", "returns_ids": True},
        "another chat template: it reads a chat with 't6' as token 1 of 17, where the run has 't5'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READINGS)
def test_what_a_server_reads_of_texts_and_chats_is_held_against_the_runs_own(case: str, tmp_path: Path) -> None:
    fields, told = READINGS[case]
    with serving(StandIn(NEW, **fields)) as server:
        endpoint, _ = find_server(Client(server.url, 5), None, KEPT, vocabulary())
        readings = reference_readings(KEPT, vocabulary())
        assert other_reading(endpoint, readings, lambda text: f"t5 {text}", 0.01) == told


@pytest.mark.parametrize("returns_ids", [True, False])
def test_a_chat_gets_no_bos_but_its_templates(returns_ids: bool) -> None:
    """The run's tokenizer puts `t0` in front of a text, and so does this server in front of what the template wrote."""
    opening = vocabulary()
    opening.tokenizer.post_processor = processors.TemplateProcessing(single="t0 $A", special_tokens=[("t0", BOS)])
    answers = {}
    for template in ("t5", "t0 t5"):
        with serving(StandIn(NEW, template=template, returns_ids=returns_ids)) as server:
            endpoint, _ = find_server(Client(server.url, 5), None, KEPT, opening)
            readings = reference_readings(KEPT, opening)
            answers[template] = other_reading(endpoint, readings, lambda text: f"t5 {text}", 0.01)
    assert answers == {
        "t5": None,
        "t0 t5": "another chat template: it reads a chat with 't0' as token 1 of 18, where the run has 't5'"
        if returns_ids
        else "another chat template: it reads a chat as 18 tokens, which is 17 by the run's template",
    }


def test_another_tokenizer_of_as_many_tokens_is_told_by_what_comes_next(tmp_path: Path) -> None:
    with serving(StandIn(NEW, second_bos=table(9))) as server:
        endpoint, _ = find_server(Client(server.url, 5), None, KEPT, vocabulary())
        readings = [ReferenceReading("t3 t9", (3, 8)), ReferenceReading("t4 t9", (4, 9))]
        told = other_reading(endpoint, readings, None, 0.01)
    assert told is not None
    distance = abs(NEW[8].max() - NEW[9][NEW[8].argmax()]) / 2 if NEW[8].argmax() in np.argsort(-NEW[9])[:5] else np.inf
    assert told == (
        f"another tokenizer or BOS: behind texts the next token's log-probability is {distance:.2g} nats from the one "
        "behind the run's tokens of them"
    )


def test_a_server_of_texts_is_sent_texts(tmp_path: Path) -> None:
    """This tokenizer sets no BOS before a text, and the prompts begin with `t0` as a word."""
    with serving(StandIn(NEW, EVERY[2:], as_ids=False)) as server:
        found = asked_of(server, tmp_path)
    assert found.form == "logprobs of texts"
    assert all(isinstance(each, str) for fields in server.asked[-WINDOWS:] for each in fields["prompt"])
    assert len(found.answers.rows) == WINDOWS * 8


def test_where_only_text_comes_back_half_of_the_positions_are_those_that_tell(tmp_path: Path) -> None:
    def differing(rows: np.ndarray) -> float:
        likeliest = np.stack([top.tokens[rows, 0] for top in COARSE.runtimes.values()])
        return float((likeliest != likeliest[0]).any(axis=0).mean())

    with serving(StandIn(table(3, 0.4, TWO_TERMS), ("text",))) as server:
        found = asked_of(server, tmp_path, COARSE)
    assert found.form == "text"
    assert not found.answers.with_logprobs
    assert differing(found.answers.rows) > 1.5 * differing(np.arange(int(COARSE.positions.sum())))
    assert distances(COARSE, found.answers)["one-term"].flips.sum() == 0


def test_nothing_but_the_evaluation_text_is_sent(tmp_path: Path) -> None:
    with serving(StandIn(NEW)) as server:
        asked_of(server, tmp_path)
    assert [each["prompt"] for each in server.asked[1:]] == KEPT.ids[1:].tolist()
    assert {*server.asked[0]} == {"model", "max_tokens", "temperature", "prompt", "prompt_logprobs"}


def test_a_killed_call_goes_on_and_another_model_is_asked_anew(tmp_path: Path) -> None:
    with serving(StandIn(NEW)) as server:
        asked_of(server, tmp_path)
        (tmp_path / "5.npz").unlink()
        first = len(server.asked)
        again = asked_of(server, tmp_path)
        assert len(server.asked) - first == 2  # the first prompt, to see who answers, and the one that is missing
        server.model = table(9)
        other = asked_of(server, tmp_path)
    assert len(server.asked) - first == 2 + WINDOWS
    assert not np.allclose(other.answers.nll, again.answers.nll)


@pytest.mark.parametrize(("model", "verdict", "words"), [
    (NEW, "validated", rf"the validated model: \S+ nats of KL from reference; {POWER}"),
    (table(6, 0.01, BF16), "other-arithmetic", r"the model, but in BF16: \S+ nats of KL from bf16"),
    (OTHER_ONE_TERM, "other-arithmetic",
     r"the model, but in one term where two were validated: \S+ nats of KL from one-term"),
    (table(8, 0.3, TWO_TERMS), "other-arithmetic", r"the model in an arithmetic that the run does not have .*"),
    # as large an error as one term's in another direction, and one term's own direction four times as far
    (table(8, 0.1, TWO_TERMS), "other-arithmetic", r"the model in an arithmetic that the run does not have .*"),
    (table(3, 0.2, TWO_TERMS), "other-arithmetic", r"the model in an arithmetic that the run does not have .*"),
    (table(9), "other-model", (
        r"another model: \S+ nats of KL from \S+, the nearest, and 100% of likeliest tokens are others; excluded by KL "
        r"\(at most \S+\), flips \(at most \S+\)"
    )),
])  # fmt: skip
def test_models_are_told_apart(model: np.ndarray, verdict: str, words: str, tmp_path: Path) -> None:
    with serving(StandIn(model)) as server:
        found = judged_of(server, tmp_path)
    assert found.verdict == verdict
    assert re.fullmatch(words, found.sentence), found.sentence


#: Two tokens, of which one is the likeliest where the other is likely too.
ONE, OTHER = KEPT.runtimes["reference"].tokens[0, :2].tolist()


class OneTextForTwo(Vocabulary):
    """Two tokens have one text."""

    def token_text(self, token: int) -> str:
        return super().token_text(ONE if token == OTHER else token)


@pytest.mark.parametrize("forms", [EVERY[2:], EVERY[3:]], ids=["logprobs", "text"])
def test_positions_whose_likeliest_token_has_no_text_of_its_own_are_left_out(
    forms: tuple[str, ...], tmp_path: Path
) -> None:
    """They would be flips of a server that is right."""
    own = vocabulary()
    doubled = OneTextForTwo(own.tokenizer, BOS, frozenset(), 64)
    with serving(StandIn(NEW, forms)) as server:
        endpoint, _ = find_server(Client(server.url, 5), None, KEPT, doubled)
        found = ask_all(endpoint, prompts_of(KEPT, None, None, None), tmp_path, None, SILENT).answers
    tops = np.stack([top.tokens for top in KEPT.runtimes.values()])
    doubtful = np.isin(tops[:, :, 0], [ONE, OTHER]).any(axis=0) & np.all(
        [(tops == each).any(axis=(0, 2)) for each in (ONE, OTHER)], 0
    )
    assert doubtful.any()
    assert not doubtful[found.rows].any()
    assert judge(KEPT, found, np.nonzero(KEPT.positions)[0]).runtimes[0].flips.mean < 0.01


@pytest.mark.parametrize("forms", [EVERY, EVERY[1:], EVERY[2:], EVERY[3:]], ids=lambda forms: str(forms[0]))
@pytest.mark.parametrize(
    "model", [table(1, 0.0, -BF16), np.roll(BF16, 10, axis=1), table(9), table(0, 0.0, 0 * BF16)],
    ids=["sign", "rolled", "random", "flat"],
)  # fmt: skip
def test_models_that_share_few_likely_tokens_are_others_in_every_form(
    model: np.ndarray, forms: tuple[str, ...], tmp_path: Path
) -> None:
    kept = kept_tokens({name: RUNTIMES[name] for name in ("bf16", "reference", "onnxruntime")})
    with serving(StandIn(model, forms, most=8)) as server:
        found = judged_of(server, tmp_path, kept)
    assert found.verdict == "other-model", found.sentence


@pytest.mark.parametrize(("model", "verdict"), [
    (NEW, "validated"), (table(3, 1.0, TWO_TERMS), "other-arithmetic"), (table(9), "other-model"),
])  # fmt: skip
def test_likeliest_tokens_alone_tell_what_flips_them(model: np.ndarray, verdict: str, tmp_path: Path) -> None:
    """BF16 and two terms have the same ones nearly everywhere, and are told apart no more."""
    kept = kept_tokens({name: RUNTIMES[name] for name in ("reference",)} | {"one-term": table(3, 0.4, TWO_TERMS)})
    with serving(StandIn(model, ("text",))) as server:
        found = judged_of(server, tmp_path, kept)
    assert found.verdict == verdict
    assert found.sentence.endswith("an arithmetic that the run does not have cannot be told from these")


def test_two_arithmetics_that_are_alike_are_not_told_apart(tmp_path: Path) -> None:
    kept = kept_tokens({"bf16": BF16, "reference": BF16})
    with serving(StandIn(BF16)) as server:
        judged = judged_of(server, tmp_path, kept)
    assert judged.verdict == "undecided"
    assert judged.arithmetics == ["as validated", "BF16"]
    words = (
        r"as validated, or BF16: \S+ nats of KL from reference, and these positions do not tell which: "
        r"whichever it is, no more is lost than was validated; "
    ) + POWER
    assert re.fullmatch(words, judged.sentence)


def test_tokens_before_a_prompt_are_told_by_their_number(tmp_path: Path) -> None:
    with serving(StandIn(table(9), EVERY[2:], before=[BOS])) as server:
        found = judged_of(server, tmp_path)
    assert found.verdict == "other-prompt"
    assert re.fullmatch(
        r"the server read 8\d\d tokens where 7\d\d were sent: it sets a BOS or a chat template before a prompt, or "
        r"leaves one out",
        found.sentence,
    ), found.sentence


def test_a_second_bos_is_told_by_how_near_the_answers_are_without_the_first(tmp_path: Path) -> None:
    stand_in = StandIn(TWO_TERMS, EVERY[2:], before=[BOS], second_bos=table(9), counts=False)
    windows = np.nonzero(KEPT.positions)[0]
    with serving(stand_in) as server:
        found = asked_of(server, tmp_path)
        endpoint, _ = find_server(Client(server.url, 5), None, KEPT, vocabulary())
        (folder := tmp_path / "again").mkdir()
        shorter = without_prefix(prompts_of(KEPT, None, None, None), 1, 4)
        again = ask_all(endpoint, shorter, folder, None, SILENT)
    judged = judge_prompt(judge(KEPT, found.answers, windows), found.answers, judge(KEPT, again.answers, windows))
    assert judged.verdict == "other-prompt"
    assert judged.sentence.startswith("the server sets a BOS itself: without the one that was sent it is ")


def test_without_the_bos_what_has_a_past_is_asked_for_again() -> None:
    """The position behind a BOS is the first of a prompt without it, and has no log-probability."""
    behind_bos = np.broadcast_to(np.arange(CONTEXT) >= 1, KEPT.positions.shape)
    prompts = prompts_of(TopTokens(KEPT.windows, KEPT.ids, behind_bos, {}, {}), None, None, None)
    shorter = without_prefix(prompts, 1, 4)
    assert [each.ids for each in shorter] == [tuple(ids[1:]) for ids in KEPT.ids[:4].tolist()]
    assert shorter[1].positions.tolist() == [*range(1, CONTEXT - 1)]
    assert shorter[1].rows.tolist() == [*range(CONTEXT, 2 * (CONTEXT - 1))]


OTHER_TOKENS = r"it has another tokenizer, or sets other tokens before a prompt"
REFUSALS: dict[str, tuple[dict[str, Any], type[Fp8qError], str]] = {
    "another tokenizer": (
        {"other": 1}, InputError, rf"URL: read the token 't\d+' where 't\d+' was sent; {OTHER_TOKENS}",
    ),
    "another tokenizer, echoed": (
        {"other": 1, "forms": EVERY[1:]}, InputError,
        rf"URL: echoes the token 't\d+' where 't\d+' was sent; {OTHER_TOKENS}",
    ),
    "a short context": (
        {"positions": 3}, InputError,
        (r"the server takes 2 tokens of a prompt, and the run's positions begin behind 2; give the server a longer "
        r"context, or validate with a shorter one: `fp8q validate RUN --context N`"),
    ),
    "a prompt cut short": (
        {"cuts": 9}, InputError,
        (r"the server gives prompt_logprobs of 9 tokens where 16 were sent: it cuts prompts short, or sets other "
        r"tokens before them; serve the model with a longer context, without a template"),
    ),
    "few log-probabilities": (
        {"most": 2}, InputError,
        (r"URL: gives 3 log-probabilities of a token where 20 were asked for, too few to compare; let it give 5 or "
        r"more \(vLLM: --max-logprobs 20\)"),
    ),
    "no completions": (
        {"forms": ()}, InputError,
        (r"URL: answers no completion of m \(prompt_logprobs: HTTP 400: .*\); compare needs /v1/completions, since a "
        r"chat's template would stand before the text"),
    ),
    "several models": ({"names": ("a", "b")}, InputError, r"URL: serves a, b; name one with --served"),
    "busy": (
        {"statuses": [503] * 5}, BackendError,
        r"URL: failed \(HTTP 503: not now\); see the server's log, and ask again",
    ),
    "a fault": (
        {"statuses": [500]}, BackendError, r"URL: failed \(HTTP 500: not now\); see the server's log, and ask again",
    ),
    "slow": (
        {"slow_s": 1.5}, BackendError,
        r"URL: did not answer within 0.5 seconds; give it longer with --timeout, or ask less with --windows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_compared_is_told_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8q.validate.endpoint.client.BACKOFF_S", 0.01)
    fields, error, words = REFUSALS[case]
    with serving(StandIn(**{"model": NEW, **fields})) as server, pytest.raises(error) as refused:
        asked_of(server, tmp_path, timeout_s=0.5)
    assert re.fullmatch(words.replace("URL", re.escape(server.url)), str(refused.value)), str(refused.value)


def test_a_server_that_is_busy_for_a_moment_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.validate.endpoint.client.BACKOFF_S", 0.01)
    with serving(StandIn(NEW, statuses=[503, 429])) as server:
        assert len(asked_of(server, tmp_path).answers.rows) == WINDOWS * (CONTEXT - 2)


def test_a_server_that_is_down_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.validate.endpoint.client.BACKOFF_S", 0.01)
    with serving(StandIn(NEW)) as server:
        pass
    with pytest.raises(BackendError) as refused:
        asked_of(server, tmp_path)
    assert str(refused.value) == f"{server.url}: no server answers there; start it, or give its address with --url"


def test_the_key_is_sent_and_asked_for(tmp_path: Path) -> None:
    with serving(StandIn(NEW, key="secret")) as server:
        asked_of(server, tmp_path)
        with pytest.raises(InputError) as refused:
            find_server(Client(server.url, 5), None, KEPT, vocabulary())
    assert str(refused.value) == f"{server.url}: wants a key (HTTP 401: no key); set OPENAI_API_KEY"


@pytest.mark.parametrize(("url", "words"), [
    ("127.0.0.1:8000", "--url 127.0.0.1:8000: is no address of a server; give one such as http://127.0.0.1:8000"),
    ("http://me:secret@host", ("--url host: holds a password, which would be shown and written; leave it out, and set "
     "OPENAI_API_KEY")),
])  # fmt: skip
def test_an_address_is_checked_before_anything_is_sent(url: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        Client(url, 5)
    assert str(refused.value) == words


def test_with_a_tail_the_first_positions_behind_the_prompt_are_compared() -> None:
    kept = TopTokens(KEPT.windows, KEPT.ids, KEPT.positions & (np.arange(CONTEXT) >= 6), {}, {})
    prompts = prompts_of(kept, 4, None, None)
    assert {tuple(each.positions.tolist()) for each in prompts} == {(6, 7)}
    assert {len(each.ids) for each in prompts} == {8}
    assert prompts[2].rows.tolist() == [2 * (CONTEXT - 6), 2 * (CONTEXT - 6) + 1]


def test_a_tail_of_one_position_is_asked_for_by_beginnings(tmp_path: Path) -> None:
    with serving(StandIn(NEW)) as server:
        assert asked_of(server, tmp_path, tail=1).form == "logprobs"
    assert TOKENS > CONTEXT
