"""How long a step of 64 rows takes to choose its tokens, at the vocabulary of Llama 3 (128,256).

    python benchmarks/sampling.py [--rounds 60]

Two shapes of logits: those of texts, whose probabilities fall as rank^-s with s from 1.25 to 3 over the rows, and flat
ones, normal with a standard deviation of 3, of which the nucleus has thousands of tokens. `row_by_row` is
`sampling.token_at` for one row after the other; `all_rows` is `choose_step` where all logits are on the host, and whose
tokens are held against it. `summaries` is `choose_step` on logits that a device summarizes, which
are here made beforehand: the host's part, and the bytes that it is sent, `all_bytes` of which it would be sent without.
Logits are BF16, as engines give them; `widening` is the time in which they become FP32, before `all_rows`, whose time
does not hold it. The ceiling is one pass over the logits that finds the best of each row.

Times are the shortest and the median of the rounds; `processor_ms` counts the processor time of all threads and is
divided by their number: what a step takes where nothing else runs. The limit holds for that, at temperature 0.8 and
top_p 0.95 on logits of texts. Prints one JSON line; exit status 1 when the limit is missed, or a token differs.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from result import arguments, described, publish

from fp8q.serve.loop import sampling
from fp8q.serve.loop.device_calls import float_logits
from fp8q.serve.loop.device_kernels import summarized
from fp8q.serve.loop.device_logits import MOST_BLOCKS
from fp8q.serve.loop.sampling import BLOCK, RowChoice, Sampling, choose_step, token_at
from fp8q.serve.loop.step_logits import HostLogits, Summary

ROWS, VOCABULARY = 64, 128_256
EXPONENTS = (1.25, 1.5, 2.0, 3.0)
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 0.8": Sampling(0.8),
    "temperature 0.8, top_p 0.95": Sampling(0.8, 0.95),
}
LIMITED = ("texts", "temperature 0.8, top_p 0.95")
LIMIT_MS = 5.0
BF16 = np.dtype(np.uint16)


def logits_of_texts(random: np.random.Generator) -> NDArray[np.float32]:
    """Logits [rows, vocabulary] whose probabilities fall as a power of the rank, in any order of the tokens."""
    ranks = np.log(np.arange(1, VOCABULARY + 1))
    rows = [random.permutation(-EXPONENTS[row % len(EXPONENTS)] * ranks) + 15.0 for row in range(ROWS)]
    return np.stack(rows).astype(np.float32)


def flat_logits(random: np.random.Generator) -> NDArray[np.float32]:
    """Logits [rows, vocabulary] of which thousands of tokens are probable."""
    return (3.0 * random.standard_normal((ROWS, VOCABULARY))).astype(np.float32)


def rounded(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logits as BF16 has them."""
    return float_logits((logits.view(np.uint32) >> 16).astype(BF16).view(np.uint8), BF16)


class Summaries:
    """Logits [rows, vocabulary], of BF16, that a device has summarized; `sent` counts the bytes that it sends."""

    count, most_blocks = ROWS, ROWS * MOST_BLOCKS

    def __init__(self, logits: NDArray[np.float32], temperature: float):
        self._raw = (logits.view(np.uint32) >> 16).astype(BF16)
        self._blocks = self._raw.reshape(ROWS, -1, BLOCK)
        self._summary = summarized(logits, np.full(ROWS, 1.0 / (temperature or 1.0), np.float32))
        self.sent = self.whole_rows = 0

    @property
    def summaries(self) -> "Summaries":
        """Itself."""
        return self

    def summary(self, temperatures: NDArray[np.float32]) -> Summary:
        """Give what was made before."""
        self.sent += sum(values.nbytes for values in self._summary)
        return self._summary

    def blocks(self, pairs: NDArray[np.int32]) -> NDArray[np.float32]:
        """Give some blocks of logits."""
        raw = self._blocks[pairs[:, 0], pairs[:, 1]]
        self.sent += raw.nbytes + pairs.nbytes
        return float_logits(raw.view(np.uint8), BF16)

    def rows(self, rows: Sequence[int]) -> list[NDArray[np.float32]]:
        """Give rows as a whole."""
        self.whole_rows += len(rows)
        self.sent += len(rows) * self._raw[0].nbytes
        return [float_logits(self._raw[row : row + 1].view(np.uint8), BF16)[0] for row in rows]


def timed(work: Callable[[], object], rounds: int, threads: int = 1) -> dict[str, float]:
    """Milliseconds of `work`: the shortest, the median, and the least processor time of each of its threads."""
    work()
    wall, processor = [], []
    for _ in range(rounds):
        begun, used = time.perf_counter(), time.process_time()
        work()
        wall.append(1e3 * (time.perf_counter() - begun))
        processor.append(1e3 * (time.process_time() - used) / threads)
    return {
        "ms": round(min(wall), 2),
        "median_ms": round(statistics.median(wall), 2),
        "processor_ms": round(min(processor), 2),
    }


def measured(logits: NDArray[np.float32], sampling: Sampling, rounds: int, threads: int) -> dict[str, Any]:
    """The ways to choose a token for each row, and the number of rows for which they differ."""
    one, other, third = ([np.random.default_rng(seed) for seed in range(ROWS)] for _ in range(3))
    choices = [RowChoice(None, sampling, {}, random) for random in one]
    partial = [RowChoice(None, sampling, {}, random) for random in third]
    device = Summaries(logits, sampling.temperature)

    def row_by_row() -> list[int]:
        uniforms = [random.random() if sampling.temperature else 0.0 for random in other]
        return [
            token_at(row, sampling.temperature, sampling.top_p, uniform)
            for row, uniform in zip(logits, uniforms, strict=True)
        ]

    def all_rows() -> list[int | Exception]:
        return choose_step(choices, range(ROWS), HostLogits(logits))

    def from_summaries() -> list[int | Exception]:
        return choose_step(partial, range(ROWS), device)

    expected, tokens, from_parts = row_by_row(), all_rows(), from_summaries()
    device.sent = device.whole_rows = 0
    host = timed(from_summaries, rounds)
    steps = rounds + 1
    return {
        "row_by_row": timed(row_by_row, 2),
        "all_rows": timed(all_rows, rounds, threads),
        "summaries": host | {"bytes": device.sent // steps, "rows_sent_whole": round(device.whole_rows / steps, 2)},
        "differing": sum(
            wanted != token or wanted != part for wanted, token, part in zip(expected, tokens, from_parts, strict=True)
        ),
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    head, threads = described("sampling"), sampling._most_threads()
    shapes = {"texts": logits_of_texts(np.random.default_rng(0)), "flat": flat_logits(np.random.default_rng(0))}
    shapes = {name: rounded(logits) for name, logits in shapes.items()}
    raw = (shapes["texts"].view(np.uint32) >> 16).astype(BF16).view(np.uint8)
    found = {
        shape: {name: measured(logits, sampling, options.rounds, threads) for name, sampling in SAMPLINGS.items()}
        for shape, logits in shapes.items()
    }
    ceiling = timed(lambda: [row.argmax() for row in shapes["texts"]], options.rounds)
    differing = sum(each["differing"] for kinds in found.values() for each in kinds.values())
    best = found[LIMITED[0]][LIMITED[1]]["all_rows"]["processor_ms"]
    result = {
        "rows": ROWS,
        "vocabulary": VOCABULARY,
        "threads": threads,
        "one_pass": ceiling,
        "widening": timed(lambda: float_logits(raw, BF16), options.rounds),
        "all_bytes": raw.nbytes,
        "logits": found,
        "limit_ms": LIMIT_MS,
        "passed": best < LIMIT_MS and not differing,
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
