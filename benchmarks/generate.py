"""What generating costs in this process: one request, eight at once, and one under a flood of new prompts.

    python benchmarks/generate.py [RUN] [--tokens 128] [--rounds 7] [--threads 0] [--clock wall] [--peers]

The ceiling is the session's bare decode step: inputs and outputs bound, nothing written to the cache, no token chosen,
no text; the loop is all the rest, measured with a session that does nothing. Every figure of a round is held against
the same round's ceiling or lone request, and medians over rounds are given, for the machine's own pace changes: the
milliseconds are of this machine, the ratios carry over. Lone and together, requests end after the same number of
tokens, the end of text ignored. The flood: a running request, and always sixteen prompts of 64 tokens that wait, each
for one token; its latency is from token to token, prompts between them included. `--clock processor` counts this
process's processor time, for a busy machine: with `--threads 1` alone. `--peers`: transformers' generate on the BF16
source, one request and eight. Without RUN one is made of the demo, and thrown away. Prints one JSON line; exit status 1
when a limit is not met.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from models import small_models
from result import arguments, described, publish

from fp8q.core.run import Run
from fp8q.core.run_files import GRAPH_FP32
from fp8q.serve.loop.generate import Generator
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.serve.loop.text import Vocabulary

ROWS, PROMPT, FLOOD_PROMPT, WAITING = 8, 16, 64, 16
LOOP_STEPS = 100
LIMITS = {"alone_over_bare": 1.15, "together_over_alone": 4.0, "overhead_ms": 1.0, "flood_over_alone": 3.0}
Clock = Callable[[], float]


def prompt(seed: int, length: int, vocabulary: int) -> tuple[int, ...]:
    """Tokens that mean nothing, past the special ones."""
    return tuple(np.random.default_rng(seed).integers(10, vocabulary, length).tolist())


def bare(session: OnnxRuntimeSession, rows: int, tokens: int, positions: int, clock: Clock) -> float:
    """Seconds of a bare decode step of `rows` rows, over the capacities that as many tokens meet."""
    batch = session.open_batch(rows, positions)
    batch.reserve(PROMPT, PROMPT + tokens, rows)
    batch.decode(np.zeros(rows, np.int64), np.full(rows, PROMPT))
    spent = 0.0
    for position in range(PROMPT, PROMPT + tokens):
        batch.reserve(position + 1, PROMPT + tokens, rows)
        run = batch.bound(rows).run
        begun = clock()
        run()
        spent += clock() - begun
    return spent / tokens


def served(generator: Generator, requests: int, tokens: int, vocabulary: int, clock: Clock) -> tuple[float, float]:
    """Seconds in all, and between two tokens of one request, of so many requests at once."""
    for number in range(requests):
        generator.submit(Request(prompt(number, PROMPT, vocabulary), tokens, ignore_end=True))
    begun, times = clock(), list[float]()
    while generator.busy:
        if generator.step():
            times.append(clock())
    return times[-1] - begun, (times[-1] - times[0]) / (len(times) - 1)


def flooded(generator: Generator, tokens: int, vocabulary: int, clock: Clock) -> list[float]:
    """Seconds between the tokens of a request while new prompts never cease to come."""
    running = generator.submit(Request(prompt(0, PROMPT, vocabulary), tokens, ignore_end=True))
    times = list[float]()
    while len(times) < tokens:
        while generator.load[1] < WAITING:
            generator.submit(Request(prompt(len(times), FLOOD_PROMPT, vocabulary), 1))
        times += [clock() for piece in generator.step() if piece.ticket == running]
    generator.reset()
    return np.diff(times).tolist()


def loop(session: OnnxRuntimeSession, vocabulary: Vocabulary, rows: int, clock: Clock) -> float:
    """Seconds of a step of so many requests in which the session does nothing: what is Python's and NumPy's."""
    with patch.object(session, "bind", lambda inputs, outputs: lambda: None):
        generator = Generator(session, vocabulary, rows)
        for number in range(rows):
            generator.submit(Request(prompt(number, PROMPT, session.vocabulary), LOOP_STEPS + 100, ignore_end=True))
        for _ in range(100):
            generator.step()
        spent = []
        for _ in range(LOOP_STEPS):
            begun = clock()
            generator.step()
            spent.append(clock() - begun)
    return statistics.median(spent)


def demo(folder: Path) -> Run:
    """A run of the demo, its cache in BF16."""
    from fp8q import api

    texts = small_models("demo")[0]
    return api.calibrate(
        texts.directory, texts.data, folder / "run", texts.eval_data, api.CalibrateOptions(samples=24, seq_len=256)
    )


def one_round(session: OnnxRuntimeSession, vocabulary: Vocabulary, tokens: int, clock: Clock) -> dict[str, float]:
    """All figures, measured one after another."""
    generator, size = Generator(session, vocabulary, ROWS), session.vocabulary
    step, steps = (bare(session, rows, tokens, generator.positions, clock) for rows in (1, ROWS))
    alone, between = served(generator, 1, tokens, size, clock)
    together, _ = served(generator, ROWS, tokens, size, clock)
    flood = flooded(generator, tokens, size, clock)
    return {
        "bare_ms": step * 1e3,
        "bare_eight_ms": steps * 1e3,
        "loop_ms": loop(session, vocabulary, 1, clock) * 1e3,
        "loop_eight_ms": loop(session, vocabulary, ROWS, clock) * 1e3,
        "alone_ms": between * 1e3,
        "overhead_ms": (between - step) * 1e3,
        "alone_over_bare": between / step,
        "alone_tokens_per_second": tokens / alone,
        "together_tokens_per_second": ROWS * tokens / together,
        "together_over_alone": ROWS * alone / together,
        "together_over_alone_ceiling": ROWS * step / steps,
        "together_over_bare_eight": together / tokens / steps,
        "flood_mean_ms": statistics.mean(flood) * 1e3,
        "flood_over_alone": statistics.mean(flood) / between,
        "flood_p99_over_alone": float(np.quantile(flood, 0.99)) / between,
    }


def transformers(run: Run, tokens: int, clock: Clock) -> dict[str, float]:
    """Tokens per second of the peer, in BF16, one request and eight."""
    import torch

    from fp8q.calibrate.model.source import load_model
    from fp8q.stages.shared.sources import source_of

    model: Any = load_model(source_of(run), torch.bfloat16)
    found = {}
    for name, rows in (("one", 1), ("eight", ROWS)):
        size = model.config.get_text_config().vocab_size
        ids = torch.tensor([prompt(number, PROMPT, size) for number in range(rows)])
        rule: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(ids, attention_mask=torch.ones_like(ids), **(rule | {"max_new_tokens": 2, "min_new_tokens": 2}))
        begun = clock()
        model.generate(ids, attention_mask=torch.ones_like(ids), **rule)
        found[f"transformers_bf16_{name}_tokens_per_second"] = rows * tokens / (clock() - begun)
    return found


def main() -> int:
    """Measure, print, and say whether the limits are met."""
    parser = arguments(__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="of ONNX Runtime; 0: its own choice")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--peers", action="store_true")
    asked = parser.parse_args()
    if asked.clock == "processor" and asked.threads != 1:
        parser.error("processor time is one thread's: add --threads 1")
    with tempfile.TemporaryDirectory() as folder:
        return measure(Run(asked.run) if asked.run else demo(Path(folder)), asked)


def measure(run: Run, asked: argparse.Namespace) -> int:
    """Measure a run, as the options have it."""
    head = described("generate")
    clock = time.process_time if asked.clock == "processor" else time.perf_counter
    session = OnnxRuntimeSession(run.model / GRAPH_FP32, asked.threads)
    vocabulary = Vocabulary.read(run.model)
    one_round(session, vocabulary, asked.tokens, clock)
    rounds = [one_round(session, vocabulary, asked.tokens, clock) for _ in range(asked.rounds)]
    figures: dict[str, Any] = {
        name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]
    } | {"tokens": asked.tokens, "rounds": asked.rounds, "threads": asked.threads, "clock": asked.clock}
    if asked.peers:
        figures |= {name: round(value, 1) for name, value in transformers(run, asked.tokens, clock).items()}
    figures["limits"] = LIMITS
    higher = {"together_over_alone"}
    figures["passed"] = all(
        figures[name] >= limit if name in higher else figures[name] <= limit for name, limit in LIMITS.items()
    )
    return publish(head, figures, asked.save)


if __name__ == "__main__":
    sys.exit(main())
