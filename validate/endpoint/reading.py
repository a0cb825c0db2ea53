"""Ask a server how it reads texts and a chat: begun with another BOS or template, a prompt is another one.

Log-probabilities are asked for by token ids, which a server takes as they are. Users send texts and chats. The server's
tokenizer sets the BOS before a text, and its template the words around what was said; both are files beside the
weights, and nothing fails where they are not those of the run. So the beginnings of a few windows are sent as texts,
and one as a chat, and the tokens that the server reads are held against the run's own. They are known

- by their ids, which vLLM and SGLang return (`return_token_ids`);
- else by their number (`usage.prompt_tokens`), and of texts by the log-probabilities of the next token, which have to
  be those behind the run's ids. Two of a server's answers to one prompt differ by no more than the answers do from the
  nearest runtime, so the bound is that distance at 99 % of positions.

A chat's BOS is the one that its template writes, or none: neither transformers nor vLLM nor `fp8q serve` has the
tokenizer put another in front of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import InputError
from ...serve.loop.text import Vocabulary
from ..accuracy.top_logits import TopLogits, TopTokens
from .answers import LikelyTokens
from .client import RefusedError
from .forms import Endpoint
from .prompts import evenly
from .schema import AnsweredCompletion, AnsweredLogprobs, UnansweredError

#: Texts that are sent, and their lengths in tokens, the first that is read as the same tokens again.
TEXTS = 4
LENGTHS = (16, 12, 8, 6, 20, 10)
#: Log-probabilities of the next token.
NEXT = 5
#: Share of positions at which the answers differ less from the nearest runtime than the bound.
NEARLY_ALL = 0.99


@dataclass(frozen=True)
class ReferenceReading:
    """A `text` of the evaluation, and its token ids as the run's tokenizer reads it, BOS included."""

    text: str
    ids: tuple[int, ...]


def reference_readings(tops: TopTokens, vocabulary: Vocabulary) -> list[ReferenceReading]:
    """Return beginnings of windows that the run's tokenizer reads as the same tokens again: at most `TEXTS`."""
    readings: list[ReferenceReading] = []
    for window in tops.ids[evenly(range(len(tops.ids)), 4 * TEXTS)]:
        for length in LENGTHS:
            begun = window[:length].tolist()
            text = str(vocabulary.tokenizer.decode(begun, skip_special_tokens=True))
            ids = vocabulary.encode(text) if text.strip() else []
            text_ids = [token for token in begun if token != vocabulary.begin]
            if text_ids and ids[-len(text_ids) :] == text_ids:
                readings.append(ReferenceReading(text, tuple(ids)))
                break
    return readings[:TEXTS]


def other_reading(
    server: Endpoint, readings: Sequence[ReferenceReading], render: Callable[[str], str] | None, bound: float
) -> str | None:
    """Tell in a sentence how the server reads texts or a chat otherwise than the run; None where it does not, or where
    it takes neither.

    `render`: the run's chat template for one message of a user; None where it has none. `bound`: in nats, of the
    next token's log-probability.
    """
    if server.triton or not readings:
        return None
    try:
        difference = _other_texts(server, readings, bound)
        if difference or render is None:
            return difference
        return _other_chat(server, readings[0].text, render)
    except RefusedError:  # a server that answered all prompts takes no texts, or no chats
        return None


def bound_of(answers: LikelyTokens, nearest: TopLogits) -> float:
    """The distance in nats that the likeliest token's log-probability has from the `nearest` runtime's at 99 % of
    positions; infinity where no log-probability is known.
    """
    same = (nearest.tokens[answers.rows, 0] == answers.tokens[:, 0]) & np.isfinite(answers.logprobs[:, 0])
    if not same.any():
        return float("inf")
    distance = np.abs(nearest.logprobs[answers.rows, 0] - answers.logprobs[:, 0])[same]
    return float(np.quantile(distance, NEARLY_ALL))


def _other_texts(server: Endpoint, readings: Sequence[ReferenceReading], bound: float) -> str | None:
    answer = _posted(server, {"prompt": [reading.text for reading in readings]})
    choices = answer.in_order(len(readings))
    for reading, choice in zip(readings, choices, strict=True):
        if (ids := choice.prompt_token_ids) and ids != list(reading.ids):
            return f"another tokenizer or BOS: {_difference(server, ids, reading.ids, 'a text')}"
    counted = answer.counted
    expected = sum(len(reading.ids) for reading in readings)
    if counted not in (0, expected):
        return (
            f"another tokenizer or BOS: it reads {len(readings)} texts as {counted:,} tokens, which {server.owner}'s "
            f"tokenizer reads as {expected:,}"
        )
    if all(choice.prompt_token_ids for choice in choices):
        return None
    return _other_next(server, readings, bound)


def _other_next(server: Endpoint, readings: Sequence[ReferenceReading], bound: float) -> str | None:
    """Hold the next token's log-probabilities behind texts against those behind the run's ids of them."""
    sent: list[list[Any]] = [[reading.text for reading in readings], [list(reading.ids) for reading in readings]]
    try:
        texts, ids = (_next_of(server, prompts) for prompts in sent)
    except UnansweredError:
        return None
    distances = [
        abs(by_text.get(token, -np.inf) - by_ids[token])
        for by_text, by_ids in zip(texts, ids, strict=True)
        if by_ids and (token := max(by_ids, key=lambda text: by_ids[text])) is not None
    ]
    if not distances or float(np.mean(distances)) <= bound:
        return None
    return (
        "another tokenizer or BOS: behind texts the next token's log-probability is "
        f"{float(np.mean(distances)):.2g} nats from the one behind {server.owner}'s tokens of them"
    )


def _next_of(server: Endpoint, prompts: list[Any]) -> list[dict[str, float]]:
    """The next token's log-probabilities behind each prompt, by the tokens' texts."""
    choices = server.complete({"prompt": prompts, "logprobs": NEXT}).in_order(len(prompts))
    tops = [((choice.logprobs or AnsweredLogprobs()).top_logprobs or [None])[0] for choice in choices]
    known = [top for top in tops if top is not None]
    if len(known) < len(tops):
        raise UnansweredError("no logprobs.top_logprobs")
    for top in known:
        server.likely(top, "logprobs.top_logprobs")
    return known


def _other_chat(server: Endpoint, text: str, render: Callable[[str], str]) -> str | None:
    try:
        rendered = render(text)
        answer = _posted(server, {"messages": [{"role": "user", "content": text}]}, chat=True)
    except (InputError, UnansweredError):  # the template refuses such a chat; the server takes none
        return None
    expected = server.vocabulary.encode(rendered, special_tokens=False)
    if ids := answer.prompt_token_ids:
        if ids == expected:
            return None
        return f"another chat template: {_difference(server, ids, expected, 'a chat')}"
    if answer.counted in (0, len(expected)):
        return None
    return (
        f"another chat template: it reads a chat as {answer.counted:,} tokens, which is {len(expected):,} by "
        f"{server.owner}'s template"
    )


def _posted(server: Endpoint, fields: dict[str, Any], chat: bool = False) -> AnsweredCompletion:
    """The answer to `fields`, with the prompt's token ids where the server knows the field that asks for them."""
    try:
        return server.complete({**fields, "return_token_ids": True}, chat)
    except UnansweredError:
        return server.complete(fields, chat)


def _difference(server: Endpoint, ids: Sequence[int], expected: Sequence[int], what: str) -> str:
    """Tell where the server's `ids` part from the run's `expected`."""
    at = next((i for i, (one, other) in enumerate(zip(ids, expected)) if one != other), min(len(ids), len(expected)))
    texts = [repr(server.text(tokens[at])) if at < len(tokens) else "nothing" for tokens in (ids, expected)]
    return f"it reads {what} with {texts[0]} as token {at + 1} of {len(ids)}, where {server.owner} has {texts[1]}"
