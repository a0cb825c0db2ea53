"""How long `fp8q serve` waits for clients that do nothing: each of its times, made short, ends a connection, and none
before.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.serve.loop.generate import Generator, Piece
from fp8q.serve.web import gate, server, serving
from fp8q.serve.web.serving import Handed
from tests.serve.web.started_server import SECONDS, Thread, in_thread

if TYPE_CHECKING:
    from pathlib import Path

    from fp8q.core.run import Run

#: Seconds that the time under test is made, and that the server does not go beyond by: machines are busy.
SHORT, LATE = 0.4, 20.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def patient(counting_run: Run) -> Iterator[Thread]:
    """A server with its own times."""
    with in_thread(counting_run.root, name="counting") as found:
        yield found


def until_hung_up(client: socket.socket) -> tuple[float, bytes]:
    """Seconds until the server closes, and what it said before."""
    begun, said = time.monotonic(), b""
    client.settimeout(SHORT + LATE)
    while part := client.recv(65536):
        said += part
    return time.monotonic() - begun, said


@pytest.mark.parametrize("sent", [b"", b"GET /hea", POST + b"Content-Len"])
def test_half_a_head_is_not_waited_for(patient: Thread, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", SHORT)
    with socket.create_connection(patient.address) as client:
        client.sendall(sent)
        waited, said = until_hung_up(client)
    assert SHORT * 0.9 < waited < SHORT + LATE
    assert said == b""


def test_dripping_a_head_gains_no_time(patient: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", SHORT)
    with socket.create_connection(patient.address) as client:
        client.settimeout(0.02)
        begun, closed = time.monotonic(), False
        while not closed and time.monotonic() - begun < SHORT + LATE:
            try:
                client.sendall(b"G")
                closed = client.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
    assert closed


def test_a_body_that_does_not_come_is_refused(patient: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", SHORT)
    with socket.create_connection(patient.address) as client:
        client.settimeout(SHORT + LATE)
        client.sendall(POST + b'Content-Length: 100\r\n\r\n{"prompt": ')
        begun = time.monotonic()
        said = client.recv(65536)
        assert time.monotonic() - begun > SHORT * 0.9
    assert said.startswith(b"HTTP/1.1 408 ")


def test_a_connection_without_another_request_is_closed(counting_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", SHORT)
    with in_thread(counting_run.root) as found, socket.create_connection(found.address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        waited, said = until_hung_up(client)
    assert SHORT * 0.9 < waited < SHORT + LATE
    assert said.startswith(b"HTTP/1.1 200 ")


def test_who_takes_nothing_of_an_answer_is_hung_up_on(patient: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_SECONDS", SHORT)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(SECONDS)
        client.connect(patient.address)
        with pytest.raises(ConnectionError):  # what would be answered is far more than buffers hold
            for _ in range(100_000):
                client.sendall(GET)
                time.sleep(0.0005)
    assert patient.client.get("/health").json() == {"status": "ok"}


def ask_unread(found: Thread, address: str, **fields: Any) -> socket.socket:
    """Ask for a stream from `address`, in a connection that holds little of what is not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.bind((address, 0))
    client.connect(found.address)
    body = json.dumps({"prompt": "t0", "stream": True, "ignore_eos": True, **fields}).encode()
    client.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


@contextmanager
def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Let each step of the loop take so long more, in the block."""
    step = Generator.step

    def slowly(generator: Generator) -> list[Piece]:
        time.sleep(seconds)
        return step(generator)

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "step", slowly)
        yield


def test_forty_unread_streams_of_another_host_are_not_waited_for(
    counting_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by what ended before: a proper client has the next row that is free, whoever else waits."""
    with in_thread(counting_run.root, name="counting", max_batch=2) as found, ExitStack() as stack:
        stack.enter_context(slow_steps(monkeypatch, 0.01))
        for _ in range(40):
            stack.enter_context(ask_unread(found, "127.0.0.2", max_tokens=30))
        while found.count('fp8q_requests_waiting{model="counting"}') < 30:
            time.sleep(0.01)
        before = found.count('fp8q_requests_total{model="counting",outcome="length"}')
        answer = found.post(prompt="t3 t1 t4", max_tokens=3, temperature=0).json()
        ended = found.count('fp8q_requests_total{model="counting",outcome="length"}') - before
        assert answer["choices"][0]["text"] == " t1 t2 t6"
        assert ended <= 8, "40 requests were before it"


def test_a_stream_that_nobody_reads_gives_its_row_to_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting_run_at: Callable[[Path, int], Run]
) -> None:
    monkeypatch.setattr(serving, "UNREAD_SECONDS", SHORT)
    run = counting_run_at(tmp_path / "long", 2000)
    with (
        in_thread(run.root, name="counting", max_batch=1) as found,
        slow_steps(monkeypatch, 0.01),
        ask_unread(found, "127.0.0.1", max_tokens=1990, logprobs=20),
    ):
        answer = found.post(prompt="t3 t1 t4", max_tokens=3, temperature=0).json()
        counted = {
            outcome: found.count(f'fp8q_requests_total{{model="counting",outcome="{outcome}"}}')
            for outcome in ("length", "cancelled")
        }
        running = found.count('fp8q_requests_running{model="counting"}')
    assert answer["choices"][0]["text"] == " t1 t2 t6"
    assert (counted, running) == ({"length": 1, "cancelled": 0}, 0), "the stream did not come to its end"


def test_a_stream_that_is_read_again_ends_by_saying_why(counting_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handed, "stalled", lambda handed: True)
    with in_thread(counting_run.root, name="counting") as found, slow_steps(monkeypatch, 0.1):
        said = found.post(prompt="t0", max_tokens=35, stream=True, ignore_eos=True).text
    assert said.endswith("\n\n")
    assert json.loads(said.split("data: ")[-1])["error"]["message"] == ("the stream was not read; read it as it comes")


def test_a_long_answer_outlives_all_of_them(patient: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of clients that do nothing, not of requests that take their time."""
    for name in ("HEAD_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(server, name, SHORT / 4)
    with slow_steps(monkeypatch, SHORT / 4):
        found = patient.post(prompt="t3 t1 t4", max_tokens=8, temperature=0)
    assert found.json()["usage"]["completion_tokens"] == 8
