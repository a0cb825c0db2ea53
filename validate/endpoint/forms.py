"""Ask a server for a prompt's log-probabilities, in the first of these forms that it answers.

1. `prompt_logprobs` of `/v1/completions` (vLLM, `fp8q serve`): every position of a prompt, by token ids.
2. `echo` with `logprobs` (OpenAI's own, SGLang): every position, by the tokens' texts.
3. `logprobs` of one generated token behind beginnings of the prompt: `PREFIXES` positions of a request. The loss of
   the text's own token is known where that is among the likeliest.
4. As 3, of texts, for a server that takes no token ids.
5. The text of one greedy token behind beginnings, without log-probabilities: flips alone.
6. As 5, by Triton's `generate`: of texts, one a request.

A text is sent where it is read as the same tokens again by the run's tokenizer, special tokens in front included. A
token's text may belong to several tokens: positions whose likeliest token has such a text are left out. Texts that the
run does not find likely there are listed as unknown tokens, since what a server gives them it does not give to others.
A server answers a form when the answer has its lists in the types of `schema`, and in the lengths that belong to the
prompt: fewer are an error, since something else was read then, and so are log-probabilities that no model can have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from ...core.errors import InputError
from ...serve.loop.text import Vocabulary
from ..accuracy.log_probabilities import check_logprobs, within_bounds
from ..accuracy.top_logits import TopTokens
from .answers import NO_TOKEN, LikelyTokens, Position, answers_of
from .client import Client, RefusedError
from .prompts import Prompt, evenly
from .schema import AnsweredCompletion, AnsweredLogprobs, Generated, UnansweredError, read_answer

#: Log-probabilities of a position that are asked for, the first number that is answered; and the fewest that will do.
ASKED = (20, 5)
LEAST = 5
#: Beginnings of a prompt whose next token is asked for.
PREFIXES = 8
#: Statuses of a server that does not know a form; others are faults.
UNKNOWN = (400, 404, 405, 413, 422, 501)
#: A token that is named by its id in the place of its text, as `fp8q serve` and vLLM do where asked.
BY_ID = re.compile(r"token_id:([0-9]{1,9})")
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


@dataclass
class Endpoint:
    """A model of a server, with the run's `vocabulary` and likeliest tokens, by which its answers are read.

    `triton`: it is asked through Triton's `generate`, not through OpenAI's API. `owner`: how messages call the model
    that it is compared with.
    """

    client: Client
    model: str
    tops: TopTokens
    vocabulary: Vocabulary
    triton: bool = False
    owner: str = "the run"
    _texts: dict[int, str] = field(default_factory=dict)

    def text(self, token: int) -> str:
        """The text of one token by itself."""
        if token not in self._texts:
            self._texts[token] = self.vocabulary.token_text(token)
        return self._texts[token]

    def tokens_of(self, row: int) -> dict[str, int]:
        """The tokens that some runtime finds likely at `row`, by their texts; none where two have the same text."""
        tokens = {int(token) for top in self.tops.runtimes.values() for token in top.tokens[row]}
        named: dict[str, list[int]] = {}
        for token in tokens:
            named.setdefault(self.text(token), []).append(token)
        return {text: ids[0] for text, ids in named.items() if len(ids) == 1}

    def readable(self, row: int) -> bool:
        """Tell whether the texts of the runtimes' likeliest tokens at `row` are those of one token alone."""
        known = {*self.tokens_of(row).values()}
        return all(int(top.tokens[row, 0]) in known for top in self.tops.runtimes.values())

    def post(self, fields: Mapping[str, Any], chat: bool = False) -> Any:
        """Ask for one greedy token, and `fields`; raises UnansweredError where the server does not know these."""
        path = CHATS if chat else f"/v2/models/{quote(self.model, safe='')}/generate" if self.triton else COMPLETIONS
        model = {} if self.triton else {"model": self.model}
        try:
            return self.client.post(path, {**model, "max_tokens": 1, "temperature": 0, **fields})
        except RefusedError as error:
            if error.status not in UNKNOWN:
                raise
            raise UnansweredError(str(error)) from None

    def complete(self, fields: Mapping[str, Any], chat: bool = False) -> AnsweredCompletion:
        """The completions or, where it is a `chat`, the chat that `fields` are answered with; raises UnansweredError
        also for an answer of other types.
        """
        return read_answer(AnsweredCompletion, self.post(fields, chat))

    def likely(self, logprobs: Mapping[int, float] | Mapping[str, float], of: str) -> None:
        """Raise InputError for log-probabilities of a position's likeliest tokens that the model cannot have; `of`: the
        field that they stand in.
        """
        check_possible(self.client, [*logprobs.values()], of, self.tops.vocabulary)
        for token in logprobs:
            named = BY_ID.fullmatch(token) if isinstance(token, str) else None
            number = int(named[1]) if named else token
            if isinstance(number, int) and number >= self.tops.vocabulary:
                raise InputError(
                    self.client.url,
                    f"gives a log-probability of token {number} ({of}), and {self.owner}'s model has "
                    f"{self.tops.vocabulary:,} tokens",
                    "it is another model, or has another tokenizer",
                )


def check_possible(client: Client, logprobs: Sequence[float], of: str, vocabulary: int | None = None) -> None:
    """Raise InputError for log-probabilities of one position that no model of `vocabulary` tokens can have; `of`: the
    field that they stand in.
    """
    try:
        check_logprobs(np.array([logprobs], np.float64), vocabulary)
    except ValueError as error:
        raise InputError(
            client.url, f"gives {of} that no model can: {error}", "see the server's log, or ask another server"
        ) from None


@dataclass(frozen=True)
class Question:
    """A form of request: its `name`, and the function that asks for a prompt's positions with so many
    log-probabilities.

    `numbers`: of log-probabilities, in the order they are tried. `all_positions`: every position of a prompt is
    answered.
    """

    name: str
    ask: Callable[[Endpoint, Prompt, int], LikelyTokens]
    numbers: Sequence[int] = ASKED
    all_positions: bool = False


def ask_prompt_logprobs(server: Endpoint, prompt: Prompt, number: int) -> LikelyTokens:
    """Ask in the form 1."""
    answer = server.complete({"prompt": list(prompt.ids), "prompt_logprobs": number})
    (choice,) = answer.in_order(1)
    table = of_length(choice.prompt_logprobs, len(prompt.ids), "prompt_logprobs")
    answered = []
    for row, position in zip(prompt.rows.tolist(), prompt.positions.tolist(), strict=True):
        best = {int(token): entry.logprob for token, entry in (table[position] or {}).items()}
        server.likely(best, "prompt_logprobs")
        if prompt.ids[position] not in best:
            raise InputError(
                server.client.url,
                f"read the token {server.text(next(iter(best), 0))!r} where {server.text(prompt.ids[position])!r} was "
                "sent",
                "it has another tokenizer, or sets other tokens before a prompt",
            )
        answered.append(answered_position(row, best, best[prompt.ids[position]]))
    return answers_of(enough(answered, server, number), len(prompt.ids), answer.counted)


def ask_echo(server: Endpoint, prompt: Prompt, number: int) -> LikelyTokens:
    """Ask in the form 2."""
    answer = server.complete({"prompt": list(prompt.ids), "echo": True, "logprobs": number})
    (choice,) = answer.in_order(1)
    logprobs = choice.logprobs or AnsweredLogprobs()
    if logprobs.tokens is not None and len(logprobs.tokens) <= 1 < len(prompt.ids):
        raise UnansweredError("lists the token behind the prompt alone")  # TensorRT-LLM, llama.cpp
    tokens = of_length(logprobs.tokens, len(prompt.ids), "logprobs.tokens", 1)
    token_logprobs = of_length(logprobs.token_logprobs, len(prompt.ids), "logprobs.token_logprobs", 1)
    tops = of_length(logprobs.top_logprobs, len(prompt.ids), "logprobs.top_logprobs", 1)
    answered = []
    for row, position in zip(prompt.rows.tolist(), prompt.positions.tolist(), strict=True):
        text = str(tokens[position])
        sent = prompt.ids[position]
        value = token_logprobs[position]
        if text not in (server.text(sent), f"token_id:{sent}"):
            raise InputError(
                server.client.url,
                f"echoes the token {text[:40]!r} where {server.text(sent)!r} was sent",
                "it has another tokenizer, or sets other tokens before a prompt",
            )
        if value is None:
            raise UnansweredError(f"no logprobs.token_logprobs of token {position + 1}")
        check_possible(server.client, [value], "logprobs.token_logprobs")
        if not server.readable(row):
            continue
        answered.append(answered_position(row, by_text(server, row, tops[position]) | {sent: value}, value))
    return answers_of(enough(answered, server, number), len(prompt.ids), answer.counted)


def ask_next(server: Endpoint, prompt: Prompt, number: int, as_text: bool = False) -> LikelyTokens:
    """Ask in the form 3, or 4."""
    readable = [index for index, row in enumerate(prompt.rows.tolist()) if server.readable(row)]
    begun = beginnings(server, prompt, evenly(readable, PREFIXES), as_text)
    if not begun:
        return answers_of([], 0, 0)
    answer = server.complete({"prompt": [beginning.prompt for beginning in begun], "logprobs": number})
    answered = []
    for index, choice in zip([beginning.index for beginning in begun], answer.in_order(len(begun)), strict=True):
        tops = of_length((choice.logprobs or AnsweredLogprobs()).top_logprobs, 1, "logprobs.top_logprobs")
        row = int(prompt.rows[index])
        text_token = prompt.ids[prompt.positions[index]]
        best = by_text(server, row, tops[0])
        answered.append(answered_position(row, best, best.get(text_token, np.nan)))
    return answers_of(enough(answered, server, number), sum(beginning.tokens for beginning in begun), answer.counted)


def ask_greedy(server: Endpoint, prompt: Prompt, number: int) -> LikelyTokens:
    """Ask in the form 5."""
    begun = beginnings(server, prompt, telling(server, prompt))
    answer = server.complete({"prompt": [beginning.prompt for beginning in begun]})
    texts = [choice.text for choice in answer.in_order(len(begun))]
    answered = [
        likeliest(server, int(prompt.rows[beginning.index]), text) for beginning, text in zip(begun, texts, strict=True)
    ]
    return answers_of(
        [position for position in answered if position], sum(position.tokens for position in begun), answer.counted
    )


def ask_generate(server: Endpoint, prompt: Prompt, number: int) -> LikelyTokens:
    """Ask in the form 6."""
    answered: list[Position] = []
    sent = 0
    total = 0
    for beginning in beginnings(server, prompt, telling(server, prompt), as_text=True):
        answer = read_answer(Generated, server.post({"text_input": beginning.prompt, "return_num_input_tokens": True}))
        sent = sent + beginning.tokens
        total = total + (answer.num_input_tokens or beginning.tokens)
        position = likeliest(server, int(prompt.rows[beginning.index]), answer.text_output)
        answered += [position] if position else []
    return answers_of(answered, sent, total)


#: In the order they are tried; Triton has its own.
FORMS = (
    Question("prompt_logprobs", ask_prompt_logprobs, all_positions=True),
    Question("echo", ask_echo, all_positions=True),
    Question("logprobs", ask_next),
    Question("logprobs of texts", partial(ask_next, as_text=True)),
    Question("text", ask_greedy, (0,)),
)
TRITON = (Question("generate", ask_generate, (0,)),)


@dataclass(frozen=True)
class Beginning:
    """The beginning of a prompt behind which the next token is asked for: the `index` of the position among the
    prompt's, its `prompt` as ids or text, and its number of `tokens`.
    """

    index: int
    prompt: list[int] | str
    tokens: int


def beginnings(server: Endpoint, prompt: Prompt, indices: Sequence[int], as_text: bool = False) -> list[Beginning]:
    """The beginnings before those positions; of texts only those that are read as the same tokens again."""
    readable = []
    for index in indices:
        ids = list(prompt.ids[: prompt.positions[index]])
        text = str(server.vocabulary.tokenizer.decode(ids, skip_special_tokens=True)) if as_text else ""
        if not as_text:
            readable.append(Beginning(index, ids, len(ids)))
        elif server.vocabulary.encode(text) == ids:
            readable.append(Beginning(index, text, len(ids)))
    return readable


def telling(server: Endpoint, prompt: Prompt) -> list[int]:
    """Positions whose likeliest token tells most: those at which the run's runtimes differ in it, and others evenly.

    Half of `PREFIXES` are of each kind, where there are so many.
    """
    tops = np.stack([top.tokens[prompt.rows, 0] for top in server.tops.runtimes.values()])
    readable = [index for index, row in enumerate(prompt.rows.tolist()) if server.readable(row)]
    differ = evenly([index for index in readable if (tops[:, index] != tops[0, index]).any()], PREFIXES // 2)
    return sorted({*differ, *evenly(readable, PREFIXES - len(differ))})


def likeliest(server: Endpoint, row: int, text: str | None) -> Position | None:
    """The position whose likeliest token has that text; None where the text is empty, as that of half a character."""
    if text is None:
        raise UnansweredError("no text")
    token = server.tokens_of(row).get(text, NO_TOKEN)
    if text:
        return Position(row, [(token, np.nan)], np.nan)
    return None


def by_text(server: Endpoint, row: int, top: Mapping[str, float] | None) -> dict[int, float]:
    """The tokens of log-probabilities by text: those that some runtime of the run finds likely there too; for others
    `NO_TOKEN` and the numbers below it.
    """
    if top is None:
        raise UnansweredError("a position without logprobs.top_logprobs")
    server.likely(top, "logprobs.top_logprobs")
    known = server.tokens_of(row)
    tokens: dict[int, float] = {}
    for index, (text, value) in enumerate(top.items()):
        named = BY_ID.fullmatch(text)
        token = int(named[1]) if named else known.get(text, NO_TOKEN - index)
        if named or token not in tokens:
            tokens[token] = value
    return tokens


def answered_position(row: int, best: Mapping[int, float], text_logprob: float) -> Position:
    """A position with its likeliest tokens, and the log-probability of the text's own; NaN where that is unknown."""
    bounded = [(token, within_bounds(value)) for token, value in best.items()]
    return Position(row, bounded, text_logprob if np.isnan(text_logprob) else -within_bounds(text_logprob))


Item = TypeVar("Item")


def of_length(table: list[Item] | None, length: int, name: str, more: int = 0) -> list[Item]:
    """Return a list of the prompt's length; raises UnansweredError where it is missing, InputError for another
    length.
    """
    if not table:
        raise UnansweredError(f"no {name}")
    if not length <= len(table) <= length + more:
        raise InputError(
            "",
            f"the server gives {name} of {len(table):,} tokens where {length:,} were sent: it cuts prompts short, or "
            "sets other tokens before them",
            "serve the model with a longer context, without a template",
        )
    return table


def enough(positions: list[Position], server: Endpoint, number: int) -> list[Position]:
    """Return positions that have so many log-probabilities as can be compared; raises InputError."""
    most = max((len(position.best) for position in positions), default=0)
    least = min(LEAST, number, len(server.tops.runtimes) and next(iter(server.tops.runtimes.values())).tokens.shape[1])
    if most < least:
        raise InputError(
            server.client.url,
            f"gives {most} log-probabilities of a token where {number} were asked for, too few to compare",
            f"let it give {least} or more (vLLM: --max-logprobs 20)",
        )
    return positions
