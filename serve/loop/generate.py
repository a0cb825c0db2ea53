"""The generation loop: continuous batching of requests, each at its own position.

A step gives every active request its next token, and then reads a chunk of the waiting prompts. So no answer stands
still while other prompts are read, however many or long they are: between two tokens of an answer at most `Pace.share`
positions of prompts are read on average; prompts take turns too, and new ones go first. A prompt is always cut at the
same places, and rows are independent, so that a request gets the same text alone and among others
(tests/serve/local/test_generation.py checks this on the demo).

The row of a finished request is free at once (the last row moves into the gap). A row whose prompt is still being read
may lie among the active ones; it is decoded with them, and the keys and values of that are overwritten by the prompt's
next chunk. Of a graph that is not asked for the last position's logits, and gives all of them, chunks also bound these:
with 128k tokens of vocabulary, 512 positions take 268 MB of FP32.

`fp8q generate` and the Triton model run this same file: `fp8q triton` copies it with its neighbours (`LOOP` in
repository.py) beside `model.py`. Triton imports that as the module `<version>.model`, so the version directory is a
package there, and relative imports mean the same in both places and cannot be shadowed by the server's path. Needs
NumPy, tokenizers and the runtime: no torch, no transformers, nothing else of fp8q.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .request import BusyError, GeneratedAnswer, Piece, Request, RequestError, Row, TokenizedRequest, tokenize_request
from .sampling import choose_step
from .sessions import Pace, Session
from .step_logits import HostLogits, StepLogits
from .text import TextStream, Vocabulary

__all__ = [
    "BusyError",
    "GeneratedAnswer",
    "GenerationError",
    "Generator",
    "Piece",
    "Request",
    "RequestError",
    "TokenizedRequest",
    "complete",
    "completion",
]  # fmt: skip


class GenerationError(RuntimeError):
    """The model's answer to a request broke off."""


class Generator:
    """Runs requests through a session, at most `max_batch` at a time, in the order they were submitted; of several
    clients, the one with the fewest requests in flight is next.

    Not for several threads at once: whoever steps it also submits and cancels (`service.Service` does it in a thread of
    its own). `prepare` alone may be called from anywhere.
    """

    def __init__(
        self,
        session: Session,
        vocabulary: Vocabulary,
        max_batch: int = 8,
        max_waiting: int | None = None,
        pace: Pace | None = None,
    ):
        """Serve with `session`; prompts and answers are bounded by the model's positions, or the session's.

        `max_waiting`: how many requests may wait for a row (None: any number); `pace`: another than the session's own.
        """
        self.vocabulary = vocabulary
        self.positions = min(vocabulary.positions, session.most_positions or vocabulary.positions)
        self.tokens = session.vocabulary
        self.max_batch = min(max_batch, session.most_rows or max_batch)
        self._max_waiting = max_waiting
        self._pace = pace or session.pace
        self._batch = session.open_batch(self.max_batch, self.positions)
        self._tickets = self._steps = 0
        self._credit = self._pace.saved
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._lengths: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Tell whether any request is waiting or in flight."""
        return bool(self._rows or self._waiting)

    @property
    def load(self) -> tuple[int, int]:
        """Return the numbers of requests in flight and waiting."""
        return len(self._rows), len(self._waiting)

    def prepare(self, request: Request) -> TokenizedRequest:
        """Tokenize a request, in any thread; raises RequestError for one that cannot be served."""
        return tokenize_request(request, self.vocabulary, self.positions, self.tokens)

    def submit(self, request: Request | TokenizedRequest, client: str = "") -> int:
        """Queue a request of `client`; return the ticket of its pieces.

        Raises what `prepare` raises, and BusyError when the queue is full.
        """
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise BusyError(f"{len(self._waiting)} requests are waiting already; try again later")
        ready = request if isinstance(request, TokenizedRequest) else self.prepare(request)
        asked = ready.request
        self._tickets += 1
        vocabulary = self.vocabulary
        text = TextStream(vocabulary.tokenizer, ready.prompt, asked.stop_words, self._lengths, vocabulary.special)
        limit = min(asked.max_tokens, self.positions - len(ready.prompt))
        end = frozenset[int]() if asked.ignore_end else self.vocabulary.end
        first = len(ready.prompt) if asked.prompt_logprobs is None else 1
        prompt = ready.prompt[:first]
        forced = ready.prompt[first:]
        limit += len(forced)
        self._waiting.append(Row(self._tickets, asked, prompt, limit, text, end, forced=forced, client=client))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """Forget a request, whose row is free at once; one that has ended already is none to forget."""
        self._waiting = deque(row for row in self._waiting if row.ticket != ticket)
        for row in self._rows:
            row.ended |= row.ticket == ticket
        self._leave()

    def drop(self) -> list[int]:
        """Forget the requests in flight, and the cache with them; their tickets. Those who wait go on waiting."""
        tickets = [row.ticket for row in self._rows]
        self._rows.clear()
        self._batch.clear()
        return tickets

    def reset(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        self.drop()

    def step(self) -> list[Piece]:
        """Give each active request its next token, and read a chunk of prompts; return the new pieces.

        Exceptions of the session pass through: `drop` the active requests then.
        """
        while self._waiting and len(self._rows) < self.max_batch:
            held = Counter(row.client for row in self._rows)
            row = min(self._waiting, key=lambda row: held[row.client])  # of equals the first
            self._waiting.remove(row)
            self._rows.append(row)
            row.turn = self._steps
        if not self._rows:
            return []
        self._steps += 1
        self._batch.reserve(
            max(min(row.filled + self._pace.chunk, len(row.prompt) + row.produced) for row in self._rows),
            max(len(row.prompt) + row.limit for row in self._rows),
            len(self._rows),
        )
        pieces = self._decode()
        pieces += self._prefill(len(pieces))
        self._leave()
        return pieces

    def run(self, requests: Iterable[Request]) -> Iterator[Piece]:
        """Submit `requests` and step until all have ended; tickets ascend in their order."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from self.step()

    def _decode(self) -> list[Piece]:
        """One token more for every row that is being answered."""
        count = max((index + 1 for index, row in enumerate(self._rows) if row.answering), default=0)
        if not count:
            return []
        rows = self._rows[:count]
        tokens = np.array([row.last for row in rows])
        filled = np.array([row.filled for row in rows])
        logits = self._batch.decode(tokens, filled)
        answering = [(row, index) for index, row in enumerate(rows) if row.answering]
        for row, _ in answering:
            row.filled += 1
        return advance_all(answering, logits)

    def _prefill(self, others: int) -> list[Piece]:
        """Read a chunk of prompts, when their turn has come among the tokens of so many `others`; return the first
        tokens of complete prompts.
        """
        first, lengths = self._chunk()
        if others:
            positions = max(lengths, default=0) * len(lengths)
            pace = self._pace
            self._credit = min(self._credit + pace.share + others - 1, max(pace.chunk, pace.saved))
            if self._credit < positions:
                return []
            self._credit -= positions
        if not lengths:
            return []
        rows = self._rows[first : first + len(lengths)]
        tokens = np.zeros((len(rows), max(lengths)), np.int64)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            tokens[index, -length:] = row.prompt[row.filled : row.filled + length]
        logits = self._batch.prefill(first, tokens, np.array([row.filled for row in rows]), np.array(lengths))
        for row, length in zip(rows, lengths, strict=True):
            row.filled += length
            row.turn = self._steps
        complete_rows = [(row, index) for index, row in enumerate(rows) if row.filled == len(row.prompt)]
        return advance_all(complete_rows, HostLogits(logits))

    def _chunk(self) -> tuple[int, list[int]]:
        """The rows whose turn it is, the first and then its neighbours, and how much of each prompt to take in."""
        left = [0 if row.answering else min(self._pace.chunk, len(row.prompt) - row.filled) for row in self._rows]
        if not any(left):
            return 0, []
        waits = [index for index, length in enumerate(left) if length]
        first = min(waits, key=lambda index: (self._rows[index].turn, self._rows[index].filled))
        end = first + 1
        longest = left[first]
        while end < len(left) and left[end] and (end + 1 - first) * max(longest, left[end]) <= self._pace.chunk:
            longest = max(longest, left[end])
            end += 1
        return first, left[first:end]

    def _leave(self) -> None:
        """Free the rows of finished requests: the last row moves into each gap, so that the rows in use stay the first
        ones.
        """
        for index in reversed([index for index, row in enumerate(self._rows) if row.ended]):
            if self._rows[index].failed:
                self._batch.wipe(index)
            last = self._rows.pop()
            if index < len(self._rows):
                self._rows[index] = last
                self._batch.move(len(self._rows), index, last.filled)
        if not self._rows:
            self._batch.idle()


def advance_all(rows: Sequence[tuple[Row, int]], logits: StepLogits) -> list[Piece]:
    """Choose the next token of each row, whose index in the step is beside it, all in one call; return their pieces."""
    read = [index for row, index in rows if row.needs_logits]
    values = dict(zip(read, logits.rows(read), strict=True))
    chosen = choose_step([row.choice(values.get(index)) for row, index in rows], [index for _, index in rows], logits)
    return [row.advance(values.get(index), token) for (row, index), token in zip(rows, chosen, strict=True)]


def complete(generator: Generator, requests: Sequence[Request]) -> list[GeneratedAnswer]:
    """Run `requests` to their ends in a generator that has nothing else in flight; the answers, in the same order.

    Raises GenerationError when the model's answer to one breaks off.
    """
    answers: dict[int, list[Piece]] = {}
    for piece in generator.run(requests):
        answers.setdefault(piece.ticket, []).append(piece)
    return [completion(answers[ticket]) for ticket in sorted(answers)]


def completion(pieces: Sequence[Piece]) -> GeneratedAnswer:
    """The answer that the pieces of one request are; raises GenerationError for one that broke off."""
    last = pieces[-1]
    if last.error is not None:
        raise GenerationError(f"generation failed: {last.error}")
    assert last.finish_reason is not None, "the loop ran until nothing was in flight"
    text = "".join(piece.text for piece in pieces)
    return GeneratedAnswer(text, tuple(piece.token for piece in pieces), last.finish_reason, last.input_tokens)
