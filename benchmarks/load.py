"""What servers do under load: requests that arrive by chance, ever more of them, until the slowest wait much longer.

    python benchmarks/load.py [RUN] [--seconds 60] [--tokens 32] [--servers serve triton] [--threads 1]

Arrivals are a Poisson process (exponential gaps, seeded), as independent users make them; each asks for a greedy answer
on a connection of its own and listens to the stream. Rates are shares of what eight clients that ask without pause get
(the ceiling, measured first), a minute each, rising until the 99th percentile of the latency is five times that of the
lowest rate. Beside each rate: requests and tokens answered a second, time to the first token and to the last (median
and p99), how many were told that the server is busy, were lost (no end, another error) or mixed up (another text than
alone). The servers are `fp8q serve` and a real Triton server on the repository of `fp8q triton`, both on the same run
and cores as this client. Prints one JSON line; exit status 1 when an answer was lost or mixed up.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from generate import ROWS, demo
from models import DEMO
from openai_client import Client, Heard
from result import ROOT, arguments, described, publish

from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import TritonOptions
from fp8q.serve.triton.repository import write_repository
from serve import HOST, served

sys.path.insert(0, str(ROOT / "tests" / "serve" / "real" / "rig"))
from tritonserver import serving  # beside the tests that it is for

SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2)
#: The p99 has bent where it is so many times that of the lowest rate.
BENT = 5.0
PROMPTS, CHARACTERS, CAPACITY_S, PATIENCE_S, LIFE_S = 64, (40, 200), 10, 120, 3600
BUSY = (429, 503)


@dataclass(frozen=True)
class Target:
    """A server: where it listens, and how it is asked for an answer of so many tokens to a prompt."""

    port: int
    path: str
    asked: Callable[[str, int], dict[str, Any]]
    text: Callable[[Heard], str]

    async def answer(self, prompt: str, tokens: int) -> Heard:
        """One answer, on a connection of its own."""
        async with connected(self.port) as client:
            return await asyncio.wait_for(client.ask(self.asked(prompt, tokens), self.path), PATIENCE_S)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """A connection to the server at `port`."""
    client = await Client.connect(HOST, port)
    try:
        yield client
    finally:
        await client.close()


@contextmanager
def fp8q_serve(run: Run, threads: int) -> Iterator[Target]:
    """`fp8q serve`."""

    def asked(prompt: str, tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}

    with served(run, threads) as (port, _):
        yield Target(port, "/v1/completions", asked, lambda heard: heard.text)


@contextmanager
def triton(run: Run, threads: int) -> Iterator[Target]:
    """A real Triton server on the repository of the run, its threads ONNX Runtime's own choice."""

    def asked(prompt: str, tokens: int) -> dict[str, Any]:
        return {"text_input": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": True}

    with tempfile.TemporaryDirectory() as folder:
        write_repository(run, TritonOptions(name="demo", max_batch=ROWS), SILENT)
        with serving(run.triton, Path(folder) / "log.txt", ["--load-model=demo"], life_s=LIFE_S) as server:
            yield Target(
                int(server.http.rpartition(":")[2]),
                "/v2/models/demo/generate_stream",
                asked,
                lambda heard: "".join(event.get("text_output", "") for event in heard.events),
            )


SERVERS: dict[str, Callable[[Run, int], AbstractContextManager[Target]]] = {"serve": fp8q_serve, "triton": triton}


def prompts() -> list[str]:
    """Beginnings of different lengths, cut from the demo's evaluation text."""
    text, draw = (DEMO / "evaluation.txt").read_text(encoding="utf-8"), np.random.default_rng(1)
    starts = draw.integers(0, len(text) - CHARACTERS[1], PROMPTS)
    lengths = draw.integers(*CHARACTERS, PROMPTS)
    return [text[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


@dataclass(frozen=True)
class Outcome:
    """One request: which prompt, what was heard (None: nothing whole), and when it ended."""

    prompt: int
    heard: Heard | None
    ended: float


async def capacity(target: Target, given: Sequence[str], tokens: int) -> float:
    """Requests a second that eight clients get who ask without pause."""
    end, done = perf_counter() + CAPACITY_S, 0

    async def client(first: int) -> int:
        number = first
        while perf_counter() < end:
            await target.answer(given[number % PROMPTS], tokens)
            number += ROWS
        return (number - first) // ROWS

    begun = perf_counter()
    done = sum(await asyncio.gather(*(client(first) for first in range(ROWS))))
    return done / (perf_counter() - begun)


async def at_rate(target: Target, given: Sequence[str], tokens: int, rate: float, seconds: float) -> list[Outcome]:
    """All requests that arrive in so many seconds, each waited for to its end."""
    draw, tasks, begun, due = np.random.default_rng(7), list[asyncio.Task[Outcome]](), perf_counter(), 0.0

    async def one(prompt: int) -> Outcome:
        try:
            heard: Heard | None = await target.answer(given[prompt], tokens)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            heard = None
        return Outcome(prompt, heard, perf_counter())

    while (due := due + float(draw.exponential(1 / rate))) < seconds:
        await asyncio.sleep(max(0.0, begun + due - perf_counter()))
        tasks.append(asyncio.create_task(one(int(draw.integers(PROMPTS)))))
    return await asyncio.gather(*tasks)


def judged(
    target: Target, outcomes: Sequence[Outcome], alone: Sequence[str], rate: float, seconds: float
) -> dict[str, Any]:
    """What a rate gave."""
    heard = [(each, each.heard) for each in outcomes if each.heard is not None]
    answered = [(each, found) for each, found in heard if found.status == 200]
    busy = sum(told_busy(found) for _, found in heard)
    mixed = sum(target.text(found) != alone[each.prompt] for each, found in answered)
    first = [found.first * 1e3 for _, found in answered]
    whole = [(each.ended - found.begun) * 1e3 for each, found in answered]
    lasted = (
        max([seconds, *(each.ended for each in outcomes)])
        if not answered
        else (max(each.ended for each, _ in answered) - min(found.begun for _, found in answered))
    )
    return {
        "offered_per_second": round(rate, 2),
        "requests": len(outcomes),
        "answered_per_second": round(len(answered) / lasted, 2),
        "events_per_second": round(sum(len(found.times) for _, found in answered) / lasted, 1),
        "first_ms_p50_p99": quantiles(first),
        "latency_ms_p50_p99": quantiles(whole),
        "busy": busy,
        "lost": len(outcomes) - len(answered) - busy,
        "mixed_up": mixed,
    }


def told_busy(found: Heard) -> bool:
    """Whether a server said so: by its status, or, as Triton answers a stream, by its words with another status."""
    return found.status in BUSY or any("try again later" in str(event.get("error")) for event in found.events)


def quantiles(values: Sequence[float]) -> list[float]:
    """Median and 99th percentile."""
    return np.percentile(values, [50, 99]).round(1).tolist() if values else [float("nan")] * 2


async def loaded(target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """All rates until the p99 has bent."""
    given = prompts()
    alone = [target.text(await target.answer(prompt, options.tokens)) for prompt in given]
    most = await capacity(target, given, options.tokens)
    rates: list[dict[str, Any]] = []
    for share in SHARES:
        outcomes = await at_rate(target, given, options.tokens, share * most, options.seconds)
        rates.append(judged(target, outcomes, alone, share * most, options.seconds))
        print(rates[-1], file=sys.stderr, flush=True)
        if rates[-1]["latency_ms_p50_p99"][1] > BENT * rates[0]["latency_ms_p50_p99"][1]:
            break
    return {"capacity_per_second": round(most, 2), "alone": alone, "rates": rates}


def main() -> int:
    """Measure, print, judge."""
    parser = arguments(__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime, for serve")
    options = parser.parse_args()
    head, results = described("load"), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options.run) if options.run else demo(Path(folder))
        for name in options.servers:
            with SERVERS[name](run, options.threads) as target:
                results[name] = asyncio.run(loaded(target, options))
    texts = [found.pop("alone") for found in results.values()]
    same = all(other == texts[0] for other in texts)
    whole = not any(rate["lost"] or rate["mixed_up"] for found in results.values() for rate in found["rates"])
    figures = {"seconds": options.seconds, "tokens": options.tokens, "servers_agree": same, "results": results}
    return publish(head, {**figures, "passed": whole and same}, options.save)


if __name__ == "__main__":
    sys.exit(main())
