"""Hostile clients against a real Triton server with a model of fp8q, and ordinary ones beside them.

    python tests/serve/real/rig/hostile.py RUN/triton --cases 5000 --seed 1      what `make hostile` runs on the demo
    python tests/serve/real/rig/hostile.py RUN/triton --case 1:4711              one case, shown

Wanted: every whole request is answered, by a text or by a refusal; whoever asks properly, among them and afterwards, is
told what the model told when nobody else was there; the server lives, and its memory stays bounded. Prints a table and,
as its last line, one JSON object; exit status 1 where anything else came.
"""

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import grpc
import psutil
from hostile_cases import KINDS, Case, draw
from tritonclient.grpc import service_pb2
from tritonserver import Server, end_on_signals, models, serving

#: Asked alone first; the counting model of the tests reads the words of the first three.
PROMPTS = ("t3 t1 t4", "t1", "t5 t9 t2 t6", "def read_file(path):", "été 你好", "import os\nimport sys\n")
TOKENS, CLIENTS, NEIGHBOURS = 24, 6, 2
#: Seconds after which a request that was not answered is lost.
LOST_S = 60.0
#: Bytes that the server may grow by: its allocator gives little back of what large requests took.
GROWTH = 500_000_000
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

Outcome = Literal["answered", "refused", "ignored", "lost", "another text"]


@dataclass
class Findings:
    """What came of the cases: kind -> outcome -> how many; seconds of each request of a neighbour; bytes that the
    server grew by; and what may not be, with the case that shows it.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    neighbours: list[float] = field(default_factory=list)
    grown: int = 0
    faults: list[str] = field(default_factory=list)


class Campaign:
    """A server, its model, and the texts that it told when nobody else was there."""

    def __init__(self, server: Server, model: str, tokens: int = TOKENS):
        """Ask for the texts, of so many tokens."""
        self.server, self.model, self.tokens = server, model, tokens
        self.texts = dict[str, str]()
        self.texts = {prompt: self.ask(prompt) for prompt in PROMPTS}

    def attack(self, cases: Sequence[tuple[int, int]]) -> Findings:
        """Send the cases (seed, index) from several clients while neighbours ask properly."""
        found, over, before = Findings(), threading.Event(), resident(self.server.process.pid)
        with ThreadPoolExecutor(CLIENTS + NEIGHBOURS) as pool:
            beside = [pool.submit(self._neighbour, found, over) for _ in range(NEIGHBOURS)]
            for (seed, index), (kind, outcome) in zip(cases, pool.map(self._try, cases), strict=True):
                found.outcomes[kind][outcome] += 1
                if outcome in ("lost", "another text"):
                    found.faults.append(f"{seed}:{index} ({kind}): {outcome}")
            over.set()
            for each in beside:
                each.result()
        if not self.server.alive:
            found.faults.append(f"the server ended: {self.server.log.read_text(errors='replace')[-500:]}")
            return found
        found.grown = resident(self.server.process.pid) - before
        if found.grown > GROWTH:
            found.faults.append(f"the server grew by {found.grown:,} bytes")
        found.faults += [f"afterwards {prompt!r}: another text" for prompt in PROMPTS if not self._is_told(prompt)]
        return found

    def ask(self, prompt: str) -> str:
        """What the model tells; raises where it does not."""
        asked = json.dumps({"text_input": prompt, "max_tokens": self.tokens}).encode()
        return str(json.loads(self.post(f"/v2/models/{self.model}/generate", asked)[1])["text_output"])

    def post(self, path: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> tuple[int, str]:
        """Status and text of the answer to one whole HTTP request."""
        with closing(http.client.HTTPConnection(*self._address, timeout=LOST_S)) as connection:
            connection.request("POST", path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")

    @property
    def _address(self) -> tuple[str, int]:
        where = urlsplit(self.server.http)
        return str(where.hostname), int(where.port or 0)

    def _is_told(self, prompt: str) -> bool:
        try:
            return self.ask(prompt) == self.texts[prompt]
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False

    def _neighbour(self, found: Findings, over: threading.Event) -> None:
        random_ = random.Random(0)
        while not over.is_set():
            prompt, begun = random_.choice(PROMPTS), time.monotonic()
            if not self._is_told(prompt):
                found.faults.append(f"a neighbour asked {prompt!r}: lost, or another text")
                return
            found.neighbours.append(time.monotonic() - begun)

    def _try(self, which: tuple[int, int]) -> tuple[str, Outcome]:
        case = draw(*which, self.model, PROMPTS, self.tokens)
        try:
            return case.kind, self.send(case)
        except (OSError, http.client.HTTPException):
            return case.kind, "lost" if case.whole else "ignored"

    def send(self, case: Case) -> Outcome:
        """What came of a case; raises OSError or HTTPException where nothing did."""
        if not case.whole:
            return self._say(case)
        if case.port == "grpc":
            return self._stream(case.body)
        status, text = self.post(case.path, case.body, case.headers)
        if status != 200 or '"error":' in text:
            return "refused"
        if case.asked is None:
            return "answered"
        told = json.loads(text.removeprefix("data: "))["text_output"]
        return "answered" if told == self.texts[case.asked] else "another text"

    def _say(self, case: Case) -> Outcome:
        """Send bytes that are no whole request, or one whose answer is not waited for, and leave."""
        host, port = self._address if case.port == "http" else self.server.grpc.split(":")
        with socket.create_connection((host, int(port)), timeout=LOST_S) as connection:
            connection.sendall(case.body)
            connection.settimeout(case.listens)
            return "answered" if connection.recv(4096).startswith(b"HTTP/1.1 200") else "refused"

    def _stream(self, message: bytes) -> Outcome:
        """Send bytes as a gRPC message, and wait for the end of what it is answered."""
        with grpc.insecure_channel(self.server.grpc) as channel:
            call = channel.stream_stream(STREAM, response_deserializer=service_pb2.ModelStreamInferResponse.FromString)
            try:
                answers = list(call(iter([message]), timeout=LOST_S))
            except grpc.RpcError as error:
                return "lost" if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else "refused"
        return "refused" if not answers or any(answer.error_message for answer in answers) else "answered"


def resident(process: int) -> int:
    """Bytes in memory of a process and all that it started."""
    first = psutil.Process(process)
    return sum(each.memory_info().rss for each in (first, *first.children(recursive=True)))


def table(found: Findings) -> str:
    """Kind and outcomes, a line each, and what became of the neighbours."""
    lines = [f"{'kind':10}{'answered':>10}{'refused':>10}{'ignored':>10}{'lost':>8}{'other text':>12}"]
    for kind, counts in found.outcomes.items():
        ends = [counts[name] for name in ("answered", "refused", "ignored", "lost", "another text")]
        lines.append(f"{kind:10}{ends[0]:10,}{ends[1]:10,}{ends[2]:10,}{ends[3]:8,}{ends[4]:12,}")
    lines.append(f"neighbours were told {len(found.neighbours):,} texts, the slowest in {max(found.neighbours):.2f} s")
    return "\n".join([*lines, f"the server grew by {found.grown / 1e6:.0f} MB", *found.faults])


def main() -> int:
    """Serve the repository, and attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", help="SEED:INDEX: this one alone")
    given = parser.parse_args()
    end_on_signals()
    model = models(given.repository)[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(given.repository, Path(folder) / "log.txt", [f"--load-model={model}"]) as server,
    ):
        campaign = Campaign(server, model)
        if given.case:
            seed, index = map(int, given.case.split(":"))
            case = draw(seed, index, model, PROMPTS, TOKENS)
            print(case, campaign.send(case), sep="\n")
            return 0
        found = campaign.attack([(given.seed, index) for index in range(given.cases)])
    print(table(found))
    counts = {kind: dict(outcomes) for kind, outcomes in found.outcomes.items()}
    print(json.dumps({"cases": given.cases, "seed": given.seed, "outcomes": counts, "faults": found.faults,
                      "neighbours": len(found.neighbours), "grown_bytes": found.grown}))  # fmt: skip
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
