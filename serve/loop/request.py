"""Requests and the pieces of their answers. Values and sizes are bounded before any work is done.

A client is not trusted: tokenizing takes time for each character, and every stop word is searched for in every piece of
text, so both are bounded here, before a tokenizer sees the prompt.

Copied unchanged into Triton repositories: imports only NumPy and its neighbours in this folder.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from .sampling import RowChoice, Sampling, log_probabilities
from .step_logits import Logits
from .text import TextStream, Vocabulary

#: A prompt of more characters than this for each of the model's positions is refused untokenized.
CHARACTERS_A_POSITION = 16
MOST_STOP_WORDS = 16
MOST_STOP_CHARACTERS = 256
#: Log-probabilities that may be asked for with each token, and penalties either way, as in OpenAI's API.
MOST_LOGPROBS = 20
MOST_PENALTY = 2.0
MOST_SEED = 2**64 - 1

FinishReason = Literal["stop", "length", "error"]


class RequestError(ValueError):
    """A request that cannot be served as it is; `code`: a word for the reason that programs know, if there is one."""

    code: str | None = None


class TooLongError(RequestError):
    """A prompt that has more tokens than the model has positions for."""

    code = "context_length_exceeded"


class BusyError(RuntimeError):
    """The queue is full; the same request may be served later."""


@dataclass(frozen=True)
class Request:
    """A request to generate text; the fields have their meaning in OpenAI's completions API.

    `prompt`: text, or token ids. `max_tokens` bounds the generated tokens, the end-of-text token included; the model's
    positions bound prompt and answer together. `temperature` 0 takes the best token. Without a `seed` every run draws
    other tokens. `logprobs`: the number of best tokens to return with each token, beside its own (None: none).
    `ignore_end`: go on after the end-of-text token, for measurements. `prompt_logprobs`: return each token of the
    prompt but the first too, with so many best tokens (None: not); they are taken in one by one, as tokens that were
    generated are, so that the logits of one position are all that is held. `special_tokens`: the tokenizer puts its own
    around a text; not around a chat, whose template writes them. Raises RequestError for values out of range.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int = 16
    stop_words: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_end: bool = False
    prompt_logprobs: int | None = None
    special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check each value; NaN is in no range."""
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("temperature", self.temperature, 0.0 <= self.temperature < np.inf, "0 or more, and finite")
        _check("top_p", self.top_p, 0.0 <= self.top_p <= 1.0, "from 0 to 1")
        for name in ("frequency_penalty", "presence_penalty"):
            _check(name, getattr(self, name), -MOST_PENALTY <= getattr(self, name) <= MOST_PENALTY, "from -2 to 2")
        _check("seed", self.seed, self.seed is None or 0 <= self.seed <= MOST_SEED, "from 0 to 2^64 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            most = MOST_LOGPROBS
            _check(name, number, number is None or 0 <= number <= most, f"from 0 to {most}")
        self._check_stop_words()

    def _check_stop_words(self) -> None:
        count = len(self.stop_words)
        longest = max(map(len, self.stop_words), default=0)
        if count > MOST_STOP_WORDS or longest > MOST_STOP_CHARACTERS:
            raise RequestError(
                f"stop_words are {count:,}, the longest of {longest:,} characters; there may be at most "
                f"{MOST_STOP_WORDS}, of at most {MOST_STOP_CHARACTERS} characters"
            )
        _check("stop_words", list(self.stop_words), all(self.stop_words), "without an empty one")

    @property
    def sampling(self) -> Sampling:
        """The part of the request that chooses among the logits."""
        return Sampling(self.temperature, self.top_p, self.frequency_penalty, self.presence_penalty)


def _check(name: str, value: object, good: bool, rule: str) -> None:
    if not good:
        raise RequestError(f"{name} is {value}; it must be {rule}")


class Piece(NamedTuple):
    """The text and tokens that one step added to one request.

    `ticket` is the result of `submit`; `token` the chosen id. `text` may be empty while characters or stop words are
    incomplete. `finish_reason` is None until the last piece: `stop` after the end-of-text token or a stop word,
    `length` at max_tokens or the model's last position, `error` when this request failed, for the reason `error`; such
    a piece has no token of its own, and repeats the one before. `output_tokens` were generated so far, this one
    included. `logprob` is the token's own, and `best` the (id, logprob) of the best tokens, both where the request asks
    for them. `of_prompt`: the token is the prompt's, of a request with `prompt_logprobs`. `added`: the token's own
    text, a possible beginning of a stop word included; a character belongs to the token that completes it.
    """

    ticket: int
    token: int
    text: str
    finish_reason: FinishReason | None
    input_tokens: int
    output_tokens: int
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()
    error: str | None = None
    of_prompt: bool = False
    added: str = ""


@dataclass(frozen=True)
class GeneratedAnswer:
    """The whole answer to one request: its text, and the ids of all tokens produced, the end-of-text token included."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    input_tokens: int


@dataclass(frozen=True)
class TokenizedRequest:
    """A request and the token ids of its prompt, which fit the model."""

    request: Request
    prompt: tuple[int, ...]


def tokenize_request(request: Request, vocabulary: Vocabulary, positions: int, tokens: int) -> TokenizedRequest:
    """Tokenize `request` for a model of so many `positions` and `tokens`; needs no generator, so any thread may do it.

    Raises RequestError when the prompt has no tokens, leaves no position for an answer, is so long that it is not even
    tokenized, or has tokens that the model does not have.
    """
    prompt = request.prompt
    most = CHARACTERS_A_POSITION * positions
    if isinstance(prompt, str) and len(prompt) > most:
        raise TooLongError(
            f"the prompt has {len(prompt):,} characters, more than {most:,}, and the model {positions} positions for "
            "prompt and answer; shorten it"
        )
    if isinstance(prompt, str) and not _is_text(prompt):
        raise RequestError("the prompt has half a character (a lone surrogate), which is no text; leave it out")
    ids = tuple(vocabulary.encode(prompt, request.special_tokens) if isinstance(prompt, str) else prompt)
    if not ids:
        raise RequestError("the prompt has no tokens; write something to continue")
    if len(ids) >= positions:
        raise TooLongError(
            f"the prompt has {len(ids)} tokens and the model {positions} positions for prompt and answer; shorten it "
            f"to {positions - 1} tokens or fewer"
        )
    if min(ids) < 0 or max(ids) >= tokens:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(f"the prompt has the token {wrong}, and the model's go from 0 to {tokens - 1}")
    return TokenizedRequest(request, ids)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Row:
    """A request in flight. `filled` slots of its row in the cache hold positions; `last` is the token to feed next;
    `turn` the step that last took in some of its prompt, or that it came in after. `forced`: tokens of the prompt that
    are taken in as if they were generated, and count among the `produced` and in `limit`. `client`: who asked.
    """

    ticket: int
    request: Request
    prompt: tuple[int, ...]
    limit: int
    text: TextStream
    end: frozenset[int]
    ended: bool = False
    failed: bool = False
    counts: Counter[int] = field(default_factory=Counter)
    produced: int = 0
    filled: int = 0
    last: int = 0
    turn: int = 0
    random: np.random.Generator | None = None
    forced: tuple[int, ...] = ()
    client: str = ""

    def __post_init__(self) -> None:
        """Take out of the request what every token needs."""
        self.sampling = self.request.sampling

    @property
    def answering(self) -> bool:
        """Tell whether the whole prompt is taken in."""
        return self.produced > 0

    @property
    def forcing(self) -> bool:
        """Tell whether the next token is one of the prompt."""
        return self.produced < len(self.forced)

    @property
    def needs_logits(self) -> bool:
        """Tell whether the next token takes all of the row's logits: for penalties, or for log-probabilities."""
        penalized = self.sampling.frequency_penalty or self.sampling.presence_penalty
        return self.forcing or self.request.logprobs is not None or bool(penalized)

    def choice(self, logits: Logits | None) -> RowChoice:
        """Return all that the next token depends on; `logits` [vocabulary]. A forced token draws no random number."""
        if self.forcing:
            return RowChoice(logits, Sampling(), Counter(), None)
        if self.random is None and self.request.temperature:
            self.random = np.random.default_rng(self.request.seed)
        return RowChoice(logits, self.sampling, self.counts, self.random)

    def advance(self, logits: Logits | None, chosen: int | Exception) -> Piece:
        """Take the token that was chosen from `logits` [vocabulary], which are there if it `needs_logits`.

        Whatever is wrong with them or with the text is told in the piece: it is this request's misfortune alone.
        """
        try:
            if isinstance(chosen, Exception):
                raise chosen
            return self._accept(logits, chosen)
        except (KeyboardInterrupt, SystemExit):  # of whoever steps, and of no request
            raise
        except BaseException as error:  # noqa: BLE001  # tokenizers may panic in Rust, and the others must go on
            self.ended = self.failed = True
            fault = f"{type(error).__name__}: {error}"
            return Piece(self.ticket, self.last, "", "error", *self._lengths, error=fault)

    @property
    def _lengths(self) -> tuple[int, int]:
        """The tokens of the prompt, and those that were generated."""
        return len(self.prompt) + len(self.forced), max(0, self.produced - len(self.forced))

    def _accept(self, logits: Logits | None, token: int) -> Piece:
        request = self.request
        if self.forcing:
            assert logits is not None, "it needs them"
            self.last = self.forced[self.produced]
            self.produced += 1
            known = log_probabilities(logits, self.last, request.prompt_logprobs or 0)
            return Piece(self.ticket, self.last, "", None, *self._lengths, *known, of_prompt=True)
        asked = request.logprobs
        logprob, best = (None, ()) if asked is None or logits is None else log_probabilities(logits, token, asked)
        self.last = token
        self.produced += 1
        self.counts[token] += 1
        ends = token in self.end
        text = "" if ends else self.text.push(token)
        added = "" if ends else self.text.added
        reason: FinishReason | None = None
        if ends or self.text.stopped:
            reason = "stop"
        elif self.produced == self.limit:
            reason = "length"
        if reason:
            self.ended = True
            text += self.text.flush()
        return Piece(self.ticket, token, text, reason, *self._lengths, logprob, best, added=added)
