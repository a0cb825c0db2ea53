"""How long a step of 64 rows takes to choose its tokens, at the vocabulary of Llama 3 (128,256).

    python benchmarks/sampling.py [--rounds 60]

Two shapes of logits: those of texts, whose probabilities fall as rank^-s with s from 1.25 to 3 over the rows, and flat
ones, normal with a standard deviation of 3, of which the nucleus has thousands of tokens. `row_by_row` is
`sampling.choose` for one row after the other; `all_rows` is `choose_all`, which the loop calls, and whose tokens are
held against it. The ceiling is one pass over the logits that finds the best of each row, which greedy rows take too.

Times are the shortest and the median of the rounds; `processor_ms` counts the processor time of all threads and is
divided by their number: what a step takes where nothing else runs. The limit holds for that, at temperature 0.8 and
top_p 0.95 on logits of texts. Prints one JSON line; exit status 1 when the limit is missed, or a token differs.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from result import arguments, described, publish

from fp8q.serve.loop import batch_sampling
from fp8q.serve.loop.batch_sampling import RowChoice, choose_all
from fp8q.serve.loop.sampling import Sampling, choose

ROWS, VOCABULARY = 64, 128_256
EXPONENTS = (1.25, 1.5, 2.0, 3.0)
SAMPLINGS = {
    "temperature 0.8": Sampling(0.8),
    "temperature 0.8, top_p 0.95": Sampling(0.8, 0.95),
}
LIMITED = ("texts", "temperature 0.8, top_p 0.95")
LIMIT_MS = 5.0


def logits_of_texts(random: np.random.Generator) -> NDArray[np.float32]:
    """Logits [rows, vocabulary] whose probabilities fall as a power of the rank, in any order of the tokens."""
    ranks = np.log(np.arange(1, VOCABULARY + 1))
    rows = [random.permutation(-EXPONENTS[row % len(EXPONENTS)] * ranks) + 15.0 for row in range(ROWS)]
    return np.stack(rows).astype(np.float32)


def flat_logits(random: np.random.Generator) -> NDArray[np.float32]:
    """Logits [rows, vocabulary] of which thousands of tokens are probable."""
    return (3.0 * random.standard_normal((ROWS, VOCABULARY))).astype(np.float32)


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
    """Both ways to choose a token for each row, and the number of rows for which they differ."""
    one, other = ([np.random.default_rng(seed) for seed in range(ROWS)] for _ in range(2))
    choices = [RowChoice(row, sampling, {}, random) for row, random in zip(logits, one, strict=True)]

    def row_by_row() -> list[int]:
        return [choose(row, sampling, {}, random) for row, random in zip(logits, other, strict=True)]

    found, expected = choose_all(choices), row_by_row()
    return {
        "row_by_row": timed(row_by_row, 2),
        "all_rows": timed(lambda: choose_all(choices), rounds, threads),
        "differing": sum(token != wanted for token, wanted in zip(found, expected, strict=True)),
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    head, threads = described("sampling"), batch_sampling._most_threads()
    shapes = {"texts": logits_of_texts(np.random.default_rng(0)), "flat": flat_logits(np.random.default_rng(0))}
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
        "logits": found,
        "limit_ms": LIMIT_MS,
        "passed": best < LIMIT_MS and not differing,
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
