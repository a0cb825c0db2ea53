"""The generation loop: many requests in one batch, each at its own position, entering and leaving as they come and end.

One step is either the prefill of the requests that just got a row, together, or one token for every row. A request that
ends gives its row to the next at once (the last row moves into the gap), so nobody waits for the longest answer of a
batch. Prompts of different lengths are padded on the right, continue the positions there and are masked; what padding
writes into the cache lies behind the row's filled slots and is overwritten. Long prompts go in pieces, for the graph
answers with logits [batch, seq, vocabulary]: at 128k tokens of vocabulary, 512 positions are 268 MB of FP32.

`fp8q generate` and the Triton model run this same file: `fp8q triton` copies it with its neighbours (cache, sampling,
sessions, text) beside `model.py`. Triton imports that as the module `<version>.model`, so the version directory is a
package there and imports relative to this folder mean the same in both places; they cannot be shadowed by anything on
the server's path either. Needs NumPy, tokenizers and the runtime: no torch, no transformers, nothing else of fp8q.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .cache import Cache
from .sampling import Sampling, choose
from .sessions import Session
from .text import TextStream, Vocabulary

#: Positions prefilled at once, over all rows.
PREFILL_POSITIONS = 512
#: Capacities are multiples of this, so that runtimes meet few shapes.
CAPACITY_STEP = 64

FinishReason = Literal["stop", "length"]


class RequestError(ValueError):
    """A request that cannot be served as it is."""


@dataclass(frozen=True)
class Request:
    """What to generate; the fields mean what they mean in OpenAI's completions API.

    `max_tokens` bounds the tokens produced, the end-of-text token included; prompt and answer together are bounded by
    the model's positions besides. `temperature` 0 takes the best token. Without a `seed` every run draws other tokens.
    Raises RequestError for values out of range.
    """

    prompt: str
    max_tokens: int = 16
    stop_words: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check each value; NaN is in no range."""
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("temperature", self.temperature, 0.0 <= self.temperature < np.inf, "0 or more, and finite")
        _check("top_p", self.top_p, 0.0 <= self.top_p <= 1.0, "from 0 to 1")
        _check("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2")
        _check("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2")
        _check("seed", self.seed, self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2^64 - 1")
        _check("stop_words", list(self.stop_words), all(self.stop_words), "without an empty one")

    @property
    def sampling(self) -> Sampling:
        """The part of the request that chooses among the logits."""
        return Sampling(self.temperature, self.top_p, self.frequency_penalty, self.presence_penalty)


def _check(name: str, value: object, good: bool, rule: str) -> None:
    if not good:
        raise RequestError(f"{name} is {value}; it must be {rule}")


@dataclass(frozen=True)
class Piece:
    """What one step added to one request.

    `ticket` is what `submit` returned; `token` the id that was chosen. `text` may be empty while characters or stop
    words are incomplete.
    `finish_reason` is None until the last piece: `stop` after the end-of-text token or a stop word, `length` at
    max_tokens or the model's last position. `output_tokens` were produced so far, this one included.
    """

    ticket: int
    token: int
    text: str
    finish_reason: FinishReason | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Completion:
    """The whole answer to one request: its text, and the ids of all tokens produced, the end-of-text token included."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    input_tokens: int


@dataclass
class _Row:
    """A request in flight. `filled` slots of its row in the cache hold positions; `last` is the token to feed next."""

    ticket: int
    request: Request
    prompt: list[int]
    limit: int
    text: TextStream
    random: np.random.Generator
    counts: Counter[int] = field(default_factory=Counter)
    produced: int = 0
    filled: int = 0
    last: int = 0

    def accept(self, token: int, end: frozenset[int]) -> Piece:
        """Take the token that was chosen."""
        self.last = token
        self.produced += 1
        self.counts[token] += 1
        text = "" if token in end else self.text.push(token)
        reason: FinishReason | None = (
            "stop" if token in end or self.text.stopped else "length" if self.produced == self.limit else None
        )
        return Piece(
            self.ticket, token, text + (self.text.flush() if reason else ""), reason, len(self.prompt), self.produced
        )


class Generator:
    """Runs requests through a session, at most `max_batch` at a time, in the order they were submitted.

    Not for several threads at once: whoever steps it also submits and cancels.
    """

    def __init__(self, session: Session, vocabulary: Vocabulary, max_batch: int = 8):
        """Serve with `session`; prompts and answers are bounded by `vocabulary.positions`."""
        self._session = session
        self._vocabulary = vocabulary
        self._max_batch = max_batch
        self._tickets = 0
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache: Cache | None = None

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or in flight."""
        return bool(self._rows or self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a request; returns the ticket that its pieces will carry.

        Raises RequestError when the prompt has no tokens or leaves no position for an answer.
        """
        prompt, positions = self._vocabulary.encode(request.prompt), self._vocabulary.positions
        if not prompt:
            raise RequestError("the prompt has no tokens; write something to continue")
        if len(prompt) >= positions:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the model {positions} positions for prompt and answer; "
                f"shorten it to {positions - 1} tokens or fewer"
            )
        self._tickets += 1
        text = TextStream(self._vocabulary.tokenizer, prompt, request.stop_words)
        limit = min(request.max_tokens, positions - len(prompt))
        self._waiting.append(_Row(self._tickets, request, prompt, limit, text, np.random.default_rng(request.seed)))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """Forget a request; one that has ended already is none to forget."""
        self._waiting = deque(row for row in self._waiting if row.ticket != ticket)
        for index in [i for i, row in enumerate(self._rows) if row.ticket == ticket]:
            self._leave(index)

    def reset(self) -> None:
        """Forget all requests, and the cache with them."""
        self._waiting.clear()
        self._rows.clear()
        self._cache = None

    def step(self) -> list[Piece]:
        """Run the graph for newcomers, or else for one token of every row; return what each request it served has
        gained.
        """
        if not self.busy:
            return []
        first = len(self._rows)
        while self._waiting and len(self._rows) < self._max_batch:
            self._rows.append(self._waiting.popleft())
        if first < len(self._rows):
            logits = self._prefill(first)
        else:
            first, logits = 0, self._decode()
        pieces = [self._advance(row, values) for row, values in zip(self._rows[first:], logits, strict=True)]
        for index in reversed(range(len(pieces))):
            if pieces[index].finish_reason:
                self._leave(first + index)
        return pieces

    def run(self, requests: Iterable[Request]) -> Iterator[Piece]:
        """Submit `requests` and step until all have ended; tickets ascend in their order."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from self.step()

    def _advance(self, row: _Row, logits: NDArray[np.float32]) -> Piece:
        return row.accept(choose(logits, row.request.sampling, row.counts, row.random), self._vocabulary.end)

    def _leave(self, index: int) -> None:
        """Free a row: the last one moves into its place, so that those in use stay the first ones."""
        last = self._rows.pop()
        if not self._rows:
            self._cache = None
        elif index < len(self._rows) and self._cache is not None:
            self._rows[index] = last
            self._cache.move(len(self._rows), index)

    def _reserved(self, positions: int) -> Cache:
        """The cache, with room for `positions`; it grows to twice its capacity, but not beyond what the requests in
        flight can fill.
        """
        held = self._cache.capacity if self._cache else 0
        if self._cache is None or held < positions:
            fillable = max(len(row.prompt) + row.limit for row in self._rows)
            steps = -(-min(max(positions, 2 * held), fillable) // CAPACITY_STEP)
            capacity = min(steps * CAPACITY_STEP, self._vocabulary.positions)
            if self._cache is None:
                self._cache = self._session.new_cache(self._max_batch, capacity)
            else:
                self._cache.grow(capacity, len(self._rows))
        return self._cache

    def _prefill(self, first: int) -> Sequence[NDArray[np.float32]]:
        """Run the prompts of the rows from `first`, in pieces; the logits of their last tokens, [vocabulary] each."""
        rows = self._rows[first:]
        lengths = np.array([len(row.prompt) for row in rows])
        longest = int(lengths.max())
        cache = self._reserved(longest + 1)
        tokens = np.zeros((len(rows), longest), np.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row.prompt)] = row.prompt
            row.filled = len(row.prompt)
        last: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
        width = max(1, PREFILL_POSITIONS // len(rows))
        for start in range(0, longest, width):
            stop = min(start + width, longest)
            positions = np.tile(np.arange(start, stop), (len(rows), 1))
            # nothing is filled before the first piece: spare attention the buffer
            past = cache.past(first, len(rows)) if start else None
            mask = attention_mask(
                np.minimum(lengths, start), cache.capacity if start else 0, positions < lengths[:, None]
            )
            logits, new = self._session.forward(tokens[:, start:stop], mask, positions, past)
            cache.write(first, positions, new)
            for index, length in enumerate(lengths.tolist()):
                if start < length <= stop:
                    last[index] = logits[index, length - 1 - start].copy()  # a view would keep the others in memory
        return last

    def _decode(self) -> Sequence[NDArray[np.float32]]:
        """Run each row's last token; logits [rows, vocabulary]."""
        filled = np.array([row.filled for row in self._rows])
        cache = self._reserved(int(filled.max()) + 1)
        positions = filled[:, None]
        tokens = np.array([[row.last] for row in self._rows])
        mask = attention_mask(filled, cache.capacity, np.ones_like(positions, bool))
        logits, new = self._session.forward(tokens, mask, positions, cache.past(0, len(self._rows)))
        cache.write(0, positions, new)
        for row in self._rows:
            row.filled += 1
        return list(logits[:, 0])


def attention_mask(filled: NDArray[np.int64], capacity: int, real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The graph's mask [batch, capacity + seq]: the `filled` [batch] first slots of each row, then which new tokens are
    `real` [batch, seq].
    """
    return np.concatenate([np.arange(capacity) < filled[:, None], real], axis=1).astype(np.int64)


def complete(generator: Generator, requests: Sequence[Request]) -> list[Completion]:
    """Run `requests` to their ends in a generator that has nothing else in flight; the answers, in the same order."""
    answers: dict[int, list[Piece]] = {}
    for piece in generator.run(requests):
        answers.setdefault(piece.ticket, []).append(piece)
    return [_completion(answers[ticket]) for ticket in sorted(answers)]


def _completion(pieces: Sequence[Piece]) -> Completion:
    reason = pieces[-1].finish_reason
    assert reason is not None, "the loop ran until nothing was in flight"
    return Completion(
        "".join(piece.text for piece in pieces), tuple(piece.token for piece in pieces), reason, pieces[-1].input_tokens
    )
