"""Schemathesis against `fp8q serve`, and clients beside it that ask properly.

    python -m tests.serve.web.schema_attack RUN --examples 1000 --seed 1     what `make described` runs on the demo

Schemathesis makes requests of the server's own OpenAPI description, good and bad, and holds each answer against it
(status, content type, schema). Not asked: that what the description allows is served, for how long a prompt may be is
not in it. Wanted besides: the neighbours are told what they were told when nobody else was there, each time; the server
lives, and its memory stays bounded. Prints one JSON line; exit status 1 where anything else came.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.serve.web.started_server import SECONDS, Process, started

#: The counting model of the tests reads the words of the first three.
PROMPTS = ("t3 t1 t4", "t1", "t5 t9 t2 t6", "def read_file(path):", "été 你好", "import os\nimport sys\n")
TOKENS, NEIGHBOURS = 16, 2
#: Bytes that the server may grow by: its allocator gives little back of what large requests took.
GROWTH = 300_000_000


@dataclass
class Found:
    """How many cases schemathesis sent, how often neighbours were answered, bytes that the server grew by, and what may
    not be.
    """

    cases: int = 0
    neighbours: int = 0
    grown: int = 0
    faults: list[str] = field(default_factory=list)


def attack(served: Process, examples: int, seed: int) -> Found:
    """Send schemathesis' cases, up to so many `examples` of each operation."""
    found, server = Found(), psutil.Process(served.process.pid)
    with httpx.Client(base_url=served.url, timeout=SECONDS) as client:
        texts = {prompt: told(client, prompt) for prompt in PROMPTS}
        before = server.memory_info().rss
        with neighbours(served, texts, found), tempfile.TemporaryDirectory() as folder:
            said = schemathesis(served.url, examples, seed, Path(folder))
        if said.returncode:
            found.faults.append(said.stdout)
        found.cases = sum(int(number) for number in re.findall(r"(\d+) generated", said.stdout))
        found.grown = server.memory_info().rss - before
        if found.grown > GROWTH:
            found.faults.append(f"the server grew by {found.grown:,} bytes")
        found.faults += [
            f"afterwards {prompt!r}: another text" for prompt in PROMPTS if told(client, prompt) != texts[prompt]
        ]
    return found


def told(client: httpx.Client, prompt: str) -> str:
    """What the model tells."""
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": TOKENS, "temperature": 0})
    return str(answer.raise_for_status().json()["choices"][0]["text"])


@contextmanager
def neighbours(served: Process, texts: dict[str, str], found: Found) -> Iterator[None]:
    """Clients that ask for `texts` until the block ends."""
    over = threading.Event()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        with httpx.Client(base_url=served.url, timeout=SECONDS) as client:
            while not over.wait(0.02):
                prompt = draw.choice(PROMPTS)
                try:
                    if told(client, prompt) != texts[prompt]:
                        found.faults.append(f"a neighbour asked {prompt!r}: another text")
                except httpx.HTTPError as error:
                    found.faults.append(f"a neighbour asked {prompt!r}: lost ({error!r})")
                found.neighbours += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NEIGHBOURS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def schemathesis(url: str, examples: int, seed: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it, its own files in `folder`."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--phases", "fuzzing",
        "--max-examples", str(examples), "--exclude-checks", "positive_data_acceptance", "--generation-database",
        "none", "--seed", str(seed), "--no-color",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def main() -> int:
    """Start a server, attack it, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with started(given.run) as served:
        found = attack(served, given.examples, given.seed)
    print("\n".join(found.faults), file=sys.stderr)
    sizes = {"cases": found.cases, "neighbours": found.neighbours, "grown_bytes": found.grown}
    print(json.dumps({"examples": given.examples, "seed": given.seed, **sizes, "faults": len(found.faults)}))
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
