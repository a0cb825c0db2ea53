"""Answers in the JSON of OpenAI's two endpoints, whole and in chunks.

A chunk is put together from parts that are made once for each request: with a validating model for each token, JSON
would cost several times what the token's text does (docs/decisions/0013).
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

from ..loop.request import Piece
from ..loop.text import Vocabulary

#: OpenAI's log-probability for a probability of 0; JSON has no infinity.
LOWEST = -9999.0
DONE = b"data: [DONE]\n\n"


@dataclass
class AnswerPart:
    """The pieces of one answer: those since the last chunk, or all."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None if it goes on."""
        return self.pieces[-1].finish_reason


class AnswerForm(Protocol):
    """The form of an endpoint's answers."""

    kind: str
    chunk_kind: str
    prefix: str

    def choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """A whole answer."""

    def opening(self, index: int) -> str | None:
        """The choice of the chunk that comes before all others, if any."""

    def chunk(self, index: int, part: AnswerPart) -> str:
        """The choice of a chunk."""


class Writer:
    """Write the answer to one request as JSON."""

    def __init__(self, form: AnswerForm, model: str):
        """The answer has an id and a time from here on."""
        self.form = form
        self._head = {"id": f"{form.prefix}-{token_hex(12)}", "created": int(time.time()), "model": model}

    def unstreamed(self, answers: Sequence[AnswerPart]) -> bytes:
        """The answer to a request that does not stream."""
        choices = [self.form.choice(index, part) for index, part in enumerate(answers)]
        last = [part.pieces[-1] for part in answers]
        head = {"object": self.form.kind, **self._head}
        return json.dumps(head | {"choices": choices, "usage": usage(last)}).encode()

    def stream(self, with_usage: bool, counting: bool) -> "StreamWriter":
        """Return a writer of chunks; `with_usage`: the last of them counts tokens; `counting`: all do."""
        head = {"object": self.form.chunk_kind, **self._head}
        return StreamWriter(self.form, json.dumps(head)[:-1], with_usage, counting)


class StreamWriter:
    """Writes the events of one stream."""

    def __init__(self, form: AnswerForm, head: str, with_usage: bool, counting: bool):
        """`head`: the JSON that every chunk begins with, its brace open; `counting`: with usage, every chunk has it."""
        self._form = form
        self._before = f'data: {head}, "choices": ['
        self._after = ', "usage": null}\n\n' if with_usage else "}\n\n"
        self._counts = with_usage
        self._counting = with_usage and counting

    def opening(self, index: int) -> str:
        """The event before all others of an answer; empty where there is none."""
        choice = self._form.opening(index)
        if choice is None:
            return ""
        return f"{self._before}{choice}]{self._after}"

    def chunk(self, index: int, part: AnswerPart) -> str:
        """The event with the new pieces of an answer."""
        after = f', "usage": {json.dumps(usage(part.pieces[-1:]))}}}\n\n' if self._counting else self._after
        return f"{self._before}{self._form.chunk(index, part)}]{after}"

    def ending(self, last: Sequence[Piece]) -> bytes:
        """The events after all others."""
        counted = f'{self._before}], "usage": {json.dumps(usage(last))}}}\n\n' if self._counts else ""
        return counted.encode() + DONE


def usage(last: Sequence[Piece]) -> dict[str, int]:
    """Count the tokens of all prompts and answers, from their last pieces."""
    prompt = sum(piece.input_tokens for piece in last)
    answer = sum(piece.output_tokens for piece in last)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _tail(part: AnswerPart) -> str:
    reason = part.finish_reason
    if reason:
        return f'"finish_reason": "{reason}"}}'
    return '"finish_reason": null}'


class CompletionForm:
    """`/v1/completions`; logprobs are parallel lists."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, vocabulary: Vocabulary, logprobs: bool, of_prompt: bool = False,
        echoed: Sequence[str | Sequence[int]] = (), special_tokens: bool = True,
    ):  # fmt: skip
        """`vocabulary` gives the text of single tokens. `of_prompt`: the prompt's tokens are listed too, by id;
        `echoed`: the prompts that answers begin with, which are tokenized with `special_tokens`.
        """
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._of_prompt = of_prompt
        self._echoed = echoed
        self._special_tokens = special_tokens
        self._offsets: dict[int, int] = {}  # where the next token of an answer begins in its text

    def choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """A whole answer."""
        if self._echoed:
            return self._with_prompt(index, part)
        prompt = [piece for piece in part.pieces if piece.of_prompt]
        logprobs = self._listed(index, AnswerPart(part.pieces[len(prompt) :]))
        more = {"prompt_logprobs": [None, *map(self._by_token, prompt)]} if self._of_prompt else {}
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": part.finish_reason} | more

    def _with_prompt(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """A whole answer behind its prompt. The first token has no log-probability, as vLLM and OpenAI have it."""
        prompt = self._echoed[index]
        vocabulary = self._vocabulary
        ids = vocabulary.encode(prompt, self._special_tokens) if isinstance(prompt, str) else prompt
        if isinstance(prompt, str):
            text = prompt
            offsets = vocabulary.offsets_in(prompt, ids)
        else:
            text, (*offsets, end) = vocabulary.text(ids), vocabulary.offsets(ids)
            if not vocabulary.text([*ids, *(piece.token for piece in part.pieces)]).startswith(text):
                text = text[:end]  # it ends within a character, which the answer has
        self._offsets[index] = len(text)
        logprobs = self._listed(index, part)
        if logprobs:
            logprobs["text_offset"] = offsets + logprobs["text_offset"][len(ids) - 1 :]
            for name, value in (
                ("tokens", vocabulary.token_text(ids[0])),
                ("token_logprobs", None),
                ("top_logprobs", None),
            ):
                logprobs[name].insert(0, value)
        return {"index": index, "text": text + part.text, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def _by_token(self, piece: Piece) -> dict[str, dict[str, Any]]:
        """A token of the prompt and the best ones in its place, by id, as vLLM has them."""
        text = self._vocabulary.token_text
        listed = (piece.token, piece.logprob)
        return {
            str(token): {"logprob": _finite(logprob), "decoded_token": text(token)}
            for token, logprob in (listed, *piece.best)
        }

    def opening(self, index: int) -> str | None:
        """Nothing comes before the text."""
        return None

    def chunk(self, index: int, part: AnswerPart) -> str:
        """The choice of a chunk."""
        logprobs = json.dumps(self._listed(index, part)) if self._logprobs else "null"
        return f'{{"index": {index}, "text": {json.dumps(part.text)}, "logprobs": {logprobs}, {_tail(part)}'

    def _listed(self, index: int, part: AnswerPart) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        names = [self._names(piece) for piece in part.pieces]
        offsets = []
        offset = self._offsets.get(index, 0)
        for piece in part.pieces:
            offsets.append(offset)
            offset += len(piece.added)
        self._offsets[index] = offset
        return {
            "tokens": [named[piece.token] for named, piece in zip(names, part.pieces, strict=True)],
            "token_logprobs": [_finite(piece.logprob) for piece in part.pieces],
            "top_logprobs": [
                {named[token]: _finite(logprob) for token, logprob in piece.best}
                for named, piece in zip(names, part.pieces, strict=True)
            ],
            "text_offset": offsets,
        }

    def _names(self, piece: Piece) -> dict[int, str]:
        """The names of a piece's token and of the best ones in its place: their texts.

        Of several with one text (`▁the` and `the` by themselves, parts of characters) the likeliest has it, and the
        others are `token_id:N`, as vLLM calls tokens by their ids.
        """
        names: dict[int, str] = {}
        taken: set[str] = set()
        for token in (
            *(token for token, _ in piece.best),
            piece.token,
        ):  # one that is not among the best is less likely
            if token not in names:
                text = self._vocabulary.token_text(token)
                names[token] = f"token_id:{token}" if text in taken else text
                taken.add(text)
        return names


class ChatForm:
    """`/v1/chat/completions`; logprobs are one object for each token."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, vocabulary: Vocabulary, logprobs: bool):
        """`vocabulary` gives the text of single tokens."""
        self._vocabulary = vocabulary
        self._logprobs = logprobs

    def choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """A whole answer."""
        message = {"role": "assistant", "content": part.text, "refusal": None}
        logprobs = self._listed(part)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def opening(self, index: int) -> str | None:
        """Whose message it is."""
        delta = '{"role": "assistant", "content": ""}'
        return f'{{"index": {index}, "delta": {delta}, "logprobs": null, "finish_reason": null}}'

    def chunk(self, index: int, part: AnswerPart) -> str:
        """The choice of a chunk."""
        logprobs = json.dumps(self._listed(part)) if self._logprobs else "null"
        delta = f'{{"content": {json.dumps(part.text)}}}'
        return f'{{"index": {index}, "delta": {delta}, "logprobs": {logprobs}, {_tail(part)}'

    def _listed(self, part: AnswerPart) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            self._one(piece.token, piece.logprob, piece.added)
            | {"top_logprobs": [self._one(*candidate) for candidate in piece.best]}
            for piece in part.pieces
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float | None, added: str = "") -> dict[str, Any]:
        """A token. The bytes of all that were `added`, put together, are the text: the first one of an answer may lack
        the space that it has within a text.
        """
        name = self._vocabulary.token_text(token)
        token_bytes = self._vocabulary.token_bytes(token)
        if token_bytes is not None and added and token_bytes.endswith(added.encode()):
            token_bytes = added.encode()
        return {"token": name, "logprob": _finite(logprob), "bytes": None if token_bytes is None else list(token_bytes)}


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return max(logprob, LOWEST)
