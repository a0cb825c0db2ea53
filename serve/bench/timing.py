"""Time an answer on a runtime: a `Batch` driven step by step, without tokenizer, server, or other requests.

All prompts of a batch arrive together and are read as in the loop of `generate.py`: in chunks of the runtime's `Pace`,
row by row or as many rows as a chunk holds. Then each row gains one greedy token a step. An answer begins as after a
pause: on the CPU with no cache, so that allocating it counts, on a GPU with what the runtime keeps.

Several models are measured in turns (`time_contenders`), so that the machine's other load affects all alike. All of
them are in memory together. Before the rounds of a size each gives one untimed answer; then each round times one answer
of each, and the order rotates.

Other traffic, sampling and text cost more; these belong to the server and are measured there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..loop.sampling import best_tokens
from ..loop.sessions import Batch, Pace, Session
from .meter import MemoryTaken

Clock = Callable[[], float]
#: The quantiles of a step's time that are reported.
QUANTILES = (0.5, 0.95, 0.99)
SECONDS_AN_HOUR = 3600
MILLION = 1_000_000


@dataclass(frozen=True)
class BatchTiming:
    """Seconds of one batch of answers: until every row had its first token, and from each token to the next."""

    first: float
    between: tuple[float, ...]

    @property
    def total(self) -> float:
        """Until every row had its last token."""
        return self.first + sum(self.between)


@dataclass(frozen=True)
class Timing:
    """Several answers of equal rows and tokens: medians over answers, and quantiles over all of their steps.

    `latency_ms` is that of the whole answer, and `tokens_per_second` counts the tokens of all rows over it.
    """

    ttft_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    itl_p99_ms: float
    latency_ms: float
    tokens_per_second: float


def time_batch(
    batch: Batch, pace: Pace, prompts: NDArray[np.int64], tokens: int, clock: Clock = time.perf_counter
) -> BatchTiming:
    """Take in `prompts` [rows, length] and give each row `tokens` tokens, two or more."""
    rows, length = prompts.shape
    batch.idle()
    begun = clock()
    last = _first_tokens(batch, pace, prompts, length + tokens)
    times = [clock()]
    for filled in range(length, length + tokens - 1):
        batch.reserve(filled + 1, length + tokens, rows)
        last = best_tokens(batch.decode(last, np.full(rows, filled)), rows)
        times.append(clock())
    return BatchTiming(times[0] - begun, tuple(np.diff(times).tolist()))


def _first_tokens(batch: Batch, pace: Pace, prompts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Take in the prompts; return each row's first token [rows]. `most`: positions that a row can ever fill."""
    rows, length = prompts.shape
    together = max(1, pace.chunk // length)
    best = np.empty(rows, np.int64)
    for first in range(0, rows, together):
        group = prompts[first : first + together]
        for begin in range(0, length, pace.chunk):
            chunk = np.ascontiguousarray(group[:, begin : begin + pace.chunk])
            count, size = chunk.shape
            batch.reserve(begin + size, most, rows)
            logits = batch.prefill(first, chunk, np.full(count, begin), np.full(count, size))
        best[first : first + count] = logits.argmax(-1)
    return best


def timing(answers: Sequence[BatchTiming], rows: int) -> Timing:
    """Summarize the times of `answers` of `rows` rows each."""
    p50, p95, p99 = np.quantile([1e3 * seconds for answer in answers for seconds in answer.between], QUANTILES).tolist()
    total = median(answer.total for answer in answers)
    tokens = rows * (len(answers[0].between) + 1)
    return Timing(1e3 * median(answer.first for answer in answers), p50, p95, p99, 1e3 * total, tokens / total)


def million_tokens_cost(price_an_hour: float, tokens_per_second: float) -> float:
    """Return the cost of a million tokens, at that price of an hour, in its currency."""
    return price_an_hour / SECONDS_AN_HOUR / tokens_per_second * MILLION


@dataclass(frozen=True)
class Contender:
    """A model that is measured: its name, its session, and the memory that it holds."""

    name: str
    session: Session
    held: MemoryTaken


@dataclass
class Answers:
    """A contender's answers to one size, one a round: their `timings`, the memory that it held, and the energy that
    they took (None without a counter).
    """

    memory_bytes: int
    timings: list[BatchTiming] = field(default_factory=list)
    joules: float | None = 0.0


def time_contenders(
    contenders: Sequence[Contender],
    size: tuple[int, int, int],
    rounds: int,
    advance: Callable[[int], None] = lambda done: None,
    clock: Clock = time.perf_counter,
) -> list[Answers]:
    """Time the answers of each of `contenders`, models of one vocabulary, for `size`: rows, tokens of each prompt,
    tokens of each answer. `advance` is called with each number of answers given.
    """
    rows, length, tokens = size
    vocabulary = min(contender.session.vocabulary for contender in contenders)
    prompts = np.random.default_rng(0).integers(0, vocabulary, (rows, length))
    batches = []
    answers_by_contender = []
    for contender in contenders:
        with contender.held.counting():
            batches.append(contender.session.open_batch(rows, length + tokens))
            time_batch(batches[-1], contender.session.pace, prompts, tokens, clock)
        answers_by_contender.append(Answers(contender.held.bytes))
        advance(1)
    for number in range(rounds):
        for turn in range(len(contenders)):
            index = (number + turn) % len(contenders)
            contender = contenders[index]
            answers = answers_by_contender[index]
            before = contender.held.meter.joules()
            answers.timings.append(time_batch(batches[index], contender.session.pace, prompts, tokens, clock))
            after = contender.held.meter.joules()
            spent = None if before is None or after is None else after - before
            answers.joules = None if answers.joules is None or spent is None else answers.joules + spent
            advance(1)
    for contender, batch in zip(contenders, batches, strict=True):
        with contender.held.counting():
            batch.clear()
    return answers_by_contender
