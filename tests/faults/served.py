"""A server in a process of its own, whose answers are a case's: well-formed ones of a model that is none, and changed.

A case asks `http://127.0.0.1:PORT/FOLDER`, and the file `served.json` in its folder says what is done to which answer,
by a seed: so a case is the same again. `compare` asks for one window, by token ids and then as texts and a chat.
"""

import ctypes
import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import log
from pathlib import Path
from typing import Any

from mutate_bytes import mutate_bytes
from mutate_json import mutate_json
from workers import PR_SET_PDEATHSIG

#: Likeliest tokens of every position, with the same probability each.
LIKELY = 20
#: What a case changes, and how often.
CHANGED = {"completion": 12, "models": 3, "bytes": 2, "raw": 3, "status": 2}
STATUSES = (100, 201, 204, 301, 302, 400, 401, 404, 413, 418, 422, 429, 500, 501, 503, 599, 999)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
#: The beginning of an answer, and what follows without end; with a pause before each part, or none.
RAW: dict[str, tuple[bytes, bytes, float]] = {
    "a slow head": (OK, b"X: 1\r\n", 0.1),
    "a slow body": (OK + b"\r\n{", b" ", 0.1),
    "a slow body in chunks": (CHUNKED, b"1\r\n \r\n", 0.1),
    "a body without end": (OK + b"\r\n[", b"0," * 30_000, 0),
    "chunks without end": (CHUNKED, b"10000\r\n" + b"0," * (1 << 15) + b"\r\n", 0),
    "a head without end": (OK, b"X: 1\r\n" * 1000, 0),
    "continue without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0),
    "no HTTP": (b"\0\xff" * 20, b"", 0),
    "an empty head": (b"\r\n\r\n", b"", 0),
    "a length of -1": (OK + b"Content-Length: -1\r\n\r\n{}", b"", 0),
    "two lengths": (OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"", 0),
    "a chunk of another length": (CHUNKED + b"ffffffffffff\r\n{}", b"", 0),
    "gzip that is none": (OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", b"", 0),
    "an encoding that is none": (OK + b"Content-Encoding: x, y, z\r\nContent-Length: 2\r\n\r\n{}", b"", 0),
    "a redirect to itself": (b"HTTP/1.1 307 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", b"", 0),
}  # fmt: skip


def draw_served(draw: random.Random, folder: Path) -> str:
    """Say in `folder` what its server changes; a description."""
    kind = draw.choices(list(CHANGED), list(CHANGED.values()))[0]
    name = draw.choice(list(RAW)) if kind == "raw" else draw.choice(STATUSES) if kind == "status" else ""
    forms = draw.choice([["prompt_logprobs"], ["echo"], ["logprobs"], ["text"], ["prompt_logprobs", "text"]])
    seed, begins = draw.randrange(1 << 30), draw.choice([0, 0, 0, 1, 2])
    change = {"kind": kind, "name": name, "seed": seed, "from": begins, "forms": forms}
    (folder / "served.json").write_text(json.dumps(change), encoding="utf-8")
    return f"a server with {kind} {name} changed, forms {', '.join(forms)}"


def serve(root: Path) -> tuple[int, int]:
    """Start the server of the cases below `root`; its process and its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Handler.root = root
        with suppress(BaseException):
            server = ThreadingHTTPServer(("127.0.0.1", port), Handler, bind_and_activate=False)
            server.socket, server.daemon_threads = listening, True
            server.serve_forever()
        os._exit(0)
    listening.close()
    return pid, port


class Handler(BaseHTTPRequestHandler):
    """One request of a case."""

    root: Path

    def do_GET(self) -> None:
        """The list of models."""
        self.answer(None)

    def do_POST(self) -> None:
        """A completion, or a chat."""
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked: dict[str, Any] | None) -> None:
        """Send the answer, changed as the case says."""
        name = self.path.split("/")[1]
        change = json.loads((self.root / name / "served.json").read_text(encoding="utf-8"))
        draw = random.Random(f"{change['seed']}:{asked}")
        content = json.dumps(models() if asked is None else completion(asked)).encode()
        status, hit = 200, change["from"] <= (0 if asked is None else 1)
        if asked is not None and not any(form in asked or form == "text" for form in change["forms"]):
            status, content, hit = 400, b'{"error": "this form is not known"}', False
        if hit and change["kind"] == "raw":
            self.raw(*RAW[change["name"]])
            return
        if hit and change["kind"] == "status":
            status = int(change["name"])
        if hit and change["kind"] == ("models" if asked is None else "completion"):
            content = mutate_json(draw, content)[1]
        if hit and change["kind"] == "bytes":
            content = mutate_bytes(draw, content)[1]
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def raw(self, begun: bytes, part: bytes, pause_s: float) -> None:
        """Send bytes as they are until the other side has enough."""
        until = time.monotonic() + 30
        with suppress(OSError):
            self.wfile.write(begun)
            while part and time.monotonic() < until:
                time.sleep(pause_s)
                self.wfile.write(part)
        self.close_connection = True

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""


def models() -> dict[str, Any]:
    """A list of one model."""
    return {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 32}]}


def completion(asked: dict[str, Any]) -> dict[str, Any]:
    """An answer to a completion or chat in every form, of a model that finds `LIKELY` tokens equally likely."""
    prompts = asked.get("prompt", [0])
    many = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
    choices = [{"index": index, **choice(each, asked)} for index, each in enumerate(prompts if many else [prompts])]
    return {"choices": choices, "usage": {"prompt_tokens": sum(map(len, prompts)) if many else len(prompts)}}


def choice(prompt: list[int] | str, asked: dict[str, Any]) -> dict[str, Any]:
    """One completion."""
    value, found = log(1 / LIKELY), dict[str, Any](text="the", finish_reason="length")
    best = [*range(2, 2 + LIKELY)]
    ids = prompt if isinstance(prompt, list) else [2] * len(prompt)
    if "prompt_logprobs" in asked:
        entries = [{str(token): {"logprob": value, "rank": 1} for token in [*best[1:], own]} for own in ids]
        found["prompt_logprobs"] = [None, *entries[1:]]
    if "logprobs" in asked:
        length = len(ids) + 1 if "echo" in asked else 1
        found["logprobs"] = {
            "tokens": [*(f"token_id:{own}" for own in ids), "the"][-length:], "token_logprobs": [value] * length,
            "top_logprobs": [{f"token_id:{token}": value for token in best} for _ in range(length)],
        }  # fmt: skip
    return found
