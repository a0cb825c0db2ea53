"""Time an answer on a runtime: a `Batch` driven step by step, without tokenizer, server, or other requests.

All prompts of a batch arrive together and are read as in the loop of `generate.py`: in chunks of the runtime's `Pace`,
row by row or as many rows as a chunk holds. Then each row gains one greedy token a step. An answer begins as after a
pause: on the CPU with no cache, so that allocating it counts, on a GPU with what the runtime keeps.

Other traffic, sampling and text cost more; these belong to the server and are measured there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..loop.sessions import Batch, Pace

Clock = Callable[[], float]
#: Shares of the steps that take no longer than what is told.
QUANTILES = (0.5, 0.95, 0.99)
SECONDS_AN_HOUR, MILLION = 3600, 1_000_000


@dataclass(frozen=True)
class BatchTiming:
    """Seconds of one batch of answers: until every row had its first token, and from each token to the next."""

    first: float
    between: tuple[float, ...]

    @property
    def whole(self) -> float:
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
        last = batch.decode(last, np.full(rows, filled)).argmax(-1)
        times.append(clock())
    return BatchTiming(times[0] - begun, tuple(np.diff(times).tolist()))


def _first_tokens(batch: Batch, pace: Pace, prompts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Take in the prompts; each row's first token [rows]. `most`: positions that a row can ever fill."""
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
    total = median(answer.whole for answer in answers)
    tokens = rows * (len(answers[0].between) + 1)
    return Timing(1e3 * median(answer.first for answer in answers), p50, p95, p99, 1e3 * total, tokens / total)


def million_tokens_cost(price_an_hour: float, tokens_per_second: float) -> float:
    """Return the cost of a million tokens, at that price of an hour, in its currency."""
    return price_an_hour / SECONDS_AN_HOUR / tokens_per_second * MILLION
