"""A server for tests: in a thread of this process, or as the command line starts it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from fp8q.api import ServeOptions, serve

if TYPE_CHECKING:
    from fp8q.serve.web.server import Server

SECONDS = 60


@dataclass(frozen=True)
class Process:
    """`fp8q serve` in a process of its own."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def started(run: Path, *options: str) -> Iterator[Process]:
    """Start it on a free port; kill it in the end, where it has not ended.

    A shell has its background jobs ignore SIGINT, which they hand on, and fp8q leaves ignored; here it is heard.
    """
    command = [sys.executable, "-m", "fp8q", "serve", str(run), "--port", "0", "--json", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, preexec_fn=heard, **pipes)  # noqa: PLW1509  # one call of the system
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield Process(json.loads(line)["url"], process)
    finally:
        process.kill()
        process.communicate()


@dataclass
class Thread:
    """A server in a thread, whose parts a test may look at."""

    server: Server
    client: httpx.Client
    cut: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where sockets connect."""
        return str(self.client.base_url.host), self.client.base_url.port or 0

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def count(self, name: str) -> float:
        """The value of a metric, such as `fp8q_requests_running{model="m"}`."""
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).rpartition(" ")[2])


@contextmanager
def in_thread(run: Path, **options: Any) -> Iterator[Thread]:
    """Serve until the block ends."""
    ready, servers, cuts = threading.Event(), list[Any](), list[int]()

    def told(server: Server) -> None:
        servers.append(server)
        ready.set()

    thread = threading.Thread(target=lambda: cuts.append(serve(run, ServeOptions(port=0, **options), told)))
    thread.start()
    assert ready.wait(SECONDS)
    with httpx.Client(base_url=servers[0].url, timeout=SECONDS) as client:
        found = Thread(servers[0], client)
        try:
            yield found
        finally:
            servers[0].stop()
            thread.join(SECONDS)
            found.cut = cuts[0] if cuts else None
    assert not thread.is_alive()


class Held:
    """Keeps the stepping thread of a server where it is, between two steps."""

    def __init__(self, server: Thread):
        self._go, held = threading.Event(), threading.Event()
        self.service = server.server.serving.models[0].service

        def hold() -> None:
            held.set()
            self._go.wait(SECONDS)

        self.service.run_between_steps(hold)
        assert held.wait(SECONDS)

    def release(self) -> None:
        self._go.set()

    def settle(self) -> None:
        """Wait until all that was asked of the thread so far is done."""
        done = threading.Event()
        self.service.run_between_steps(done.set)
        assert done.wait(SECONDS)
