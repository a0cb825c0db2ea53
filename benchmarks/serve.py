"""What HTTP costs: the same requests in this process, and through `fp8q serve` in a process of its own.

    python benchmarks/serve.py [RUN] [--tokens 128] [--rounds 7] [--threads 1]

Each round generates alone and eight at once, first in this process, then over HTTP as streams, token by token; every
figure is held against the same round's, for the machine's own pace changes. `share`: throughput over HTTP as a part of
that in the process. `overhead_ms`: what a token of a lone stream costs more, wall-clock. The client (`openai_client`)
runs on the same cores. The processor's milliseconds of the server for a token, beside those of the loop alone, are what
a busy machine cannot blur. The physical ceiling is the in-process figure. Without RUN one is made of the demo, and
thrown away. Prints one JSON line; exit status 1 when a limit is not met.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from generate import PROMPT, ROWS, demo, prompt
from openai_client import together
from result import arguments, described, publish

from fp8q.core.run import Run
from fp8q.core.run_files import GRAPH_FP32
from fp8q.serve.loop.generate import Generator
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.serve.loop.text import Vocabulary

HOST = "127.0.0.1"
LIMITS = {"share_of_eight": 0.8, "overhead_ms": 1.0}


def opened(run: Run, threads: int) -> Generator:
    """The loop over ONNX Runtime."""
    return Generator(OnnxRuntimeSession(run.model / GRAPH_FP32, threads), Vocabulary.read(run.model), ROWS)


def serve(run: Run, threads: int, pipe: Connection) -> None:
    """Serve until told to end, in a process of its own."""
    from threading import Thread

    from fp8q.core.errors import InputError
    from fp8q.serve.web.gate import names_of
    from fp8q.serve.web.server import Server
    from fp8q.serve.web.serving import Model, Serving

    model = Model("demo", "fp8", "onnxruntime", opened(run, threads))
    serving = Serving([model], InputError("", "no chats here"), None, names_of(HOST, HOST))
    server = Server(serving, HOST, 0, 5, lambda made: pipe.send(made.url))

    def wait() -> None:
        pipe.recv()
        server.stop()

    Thread(target=wait, daemon=True).start()
    server.serve_until_stopped()


@contextmanager
def served(run: Run, threads: int) -> Iterator[tuple[int, int]]:
    """The port and the process id of a server."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(run, threads, theirs))
    process.start()
    try:
        yield int(ours.recv().rpartition(":")[2]), process.pid or 0
    finally:
        ours.send("end")
        process.join()


def processor(pid: int) -> float:
    """Seconds of the processor that a process has had (proc(5): utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_process(generator: Generator, requests: int, tokens: int) -> tuple[float, float]:
    """Seconds, by the clock and of the processor, of so many requests at once."""
    for number in range(requests):
        ids = prompt(number, PROMPT, generator.tokens)
        generator.submit(Request(ids, tokens, ignore_end=True))
    begun, spent = time.perf_counter(), time.process_time()
    while generator.busy:
        generator.step()
    return time.perf_counter() - begun, time.process_time() - spent


def over_http(port: int, pid: int, requests: int, tokens: int, vocabulary: int) -> tuple[float, float]:
    """The same through the server."""
    asked: list[dict[str, Any]] = [
        {"prompt": list(prompt(number, PROMPT, vocabulary)), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        for number in range(requests)
    ]
    spent = processor(pid)
    heard = asyncio.run(together(HOST, port, asked))
    assert [each.tokens for each in heard] == [tokens] * requests, "an answer is not whole"
    last, first = max(each.times[-1] for each in heard), min(each.begun for each in heard)
    return last - first, processor(pid) - spent


def one_round(generator: Generator, port: int, pid: int, tokens: int) -> dict[str, float]:
    """All figures, measured one after another."""
    size = generator.tokens
    alone, alone_cpu = in_process(generator, 1, tokens)
    lone, lone_cpu = over_http(port, pid, 1, tokens, size)
    eight, eight_cpu = in_process(generator, ROWS, tokens)
    streams, streams_cpu = over_http(port, pid, ROWS, tokens, size)
    return {
        "alone_tokens_per_second": tokens / alone,
        "alone_http_tokens_per_second": tokens / lone,
        "eight_tokens_per_second": ROWS * tokens / eight,
        "eight_http_tokens_per_second": ROWS * tokens / streams,
        "overhead_ms": (lone - alone) / tokens * 1e3,
        "share_of_one": alone / lone,
        "share_of_eight": eight / streams,
        "processor_ms": alone_cpu / tokens * 1e3,
        "processor_http_ms": lone_cpu / tokens * 1e3,
        "processor_eight_ms": eight_cpu / tokens / ROWS * 1e3,
        "processor_eight_http_ms": streams_cpu / tokens / ROWS * 1e3,
    }


def main() -> int:
    """Measure, print, and say whether the limits are met."""
    parser = arguments(__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="of ONNX Runtime; 0: its own choice")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(Run(asked.run) if asked.run else demo(Path(folder)), asked)


def measure(run: Run, asked: argparse.Namespace) -> int:
    """Measure a run, as the options have it."""
    head, generator = described("serve"), opened(run, asked.threads)
    with served(run, asked.threads) as (port, pid):
        one_round(generator, port, pid, asked.tokens)
        rounds = [one_round(generator, port, pid, asked.tokens) for _ in range(asked.rounds)]
    figures: dict[str, Any] = {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}
    figures |= {"tokens": asked.tokens, "rounds": asked.rounds, "threads": asked.threads, "limits": LIMITS}
    figures["passed"] = (
        figures["share_of_eight"] >= LIMITS["share_of_eight"] and figures["overhead_ms"] <= LIMITS["overhead_ms"]
    )
    return publish(head, figures, asked.save)


if __name__ == "__main__":
    sys.exit(main())
