"""How long a proper client waits for an answer while others ask for streams that they do not read.

    python benchmarks/unread.py [RUN] [--streams 40] [--tokens 16] [--rounds 5] [--threads 1]

`fp8q serve` on the demo, in a process of its own. Each of the others opens a connection, asks for a stream to the
model's last position, the end of text ignored, and never reads; then a proper client asks for a few tokens and is
timed. `alone_s`: without the others; `other_address_s`: they come from another address (127.0.0.2), as those of another
host do; `same_address_s`: from the client's own. The ceiling is `alone_s`. Without RUN one is made of the demo, and
thrown away. Prints one JSON line.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from generate import PROMPT, demo, prompt
from openai_client import together
from result import arguments, described, publish

from fp8q.core.run import Run
from fp8q.serve.loop.text import Vocabulary
from serve import HOST, served

OTHER = "127.0.0.2"
#: Seconds that the others' requests have to arrive before the client asks.
ARRIVING_S = 0.3


@contextmanager
def unread(port: int, address: str, streams: int, vocabulary: Vocabulary) -> Iterator[None]:
    """Have so many streams asked for from `address`, whose answers nobody reads, until the block ends."""
    with ExitStack() as stack:
        for number in range(streams):
            given = list(prompt(number, PROMPT, 2000))
            fields = {"prompt": given, "max_tokens": vocabulary.positions, "stream": True, "ignore_eos": True}
            body = json.dumps(fields).encode()
            client = stack.enter_context(socket.create_connection((HOST, port), source_address=(address, 0)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(ARRIVING_S)
        yield


def waited(port: int, tokens: int) -> float:
    """Seconds until a proper client has the last token of its answer."""
    asked = {"prompt": list(prompt(99, PROMPT, 2000)), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    (heard,) = asyncio.run(together(HOST, port, [asked]))
    assert heard.tokens == tokens, "the answer is not whole"
    return heard.times[-1] - heard.begun


def measure(run: Run, asked: argparse.Namespace) -> int:
    """Measure all three, in turn."""
    head, vocabulary = described("unread"), Vocabulary.read(run.model)
    times: dict[str, list[float]] = {"alone_s": [], "other_address_s": [], "same_address_s": []}
    with served(run, asked.threads) as (port, _):
        waited(port, asked.tokens)
        for _ in range(asked.rounds):
            times["alone_s"].append(waited(port, asked.tokens))
            for name, address in (("other_address_s", OTHER), ("same_address_s", HOST)):
                with unread(port, address, asked.streams, vocabulary):
                    times[name].append(waited(port, asked.tokens))
                time.sleep(ARRIVING_S)  # rows are free again
    figures = {name: round(statistics.median(each), 3) for name, each in times.items()}
    sizes = {"streams": asked.streams, "tokens": asked.tokens, "rounds": asked.rounds, "threads": asked.threads}
    return publish(head, figures | sizes, asked.save)


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime; 0: its own choice")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(Run(asked.run) if asked.run else demo(Path(folder)), asked)


if __name__ == "__main__":
    sys.exit(main())
