"""How long `fp8q serve` waits for clients that do nothing: each of its times, made short, ends a connection, and none
before.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fp8q.serve.loop.generate import Generator, Piece
from fp8q.serve.web import gate, server
from tests.serve.web.started_server import SECONDS, Thread, in_thread

if TYPE_CHECKING:
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


def test_a_long_answer_outlives_all_of_them(patient: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of clients that do nothing, not of requests that take their time."""
    for name in ("HEAD_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(server, name, SHORT / 4)
    step = Generator.step

    def slowly(generator: Generator) -> list[Piece]:
        time.sleep(SHORT / 4)
        return step(generator)

    monkeypatch.setattr(Generator, "step", slowly)
    found = patient.post(prompt="t3 t1 t4", max_tokens=8, temperature=0)
    assert found.json()["usage"]["completion_tokens"] == 8
