"""Speak JSON to a server over HTTP, within bounds: of time, of attempts, and of bytes that are read.

A server that is busy (429, 502, 503, 504), or not reachable for a moment, is asked again. A redirect is not followed,
so that text and key go to the address that the user gave and to no other, and no proxy is taken from the environment.
The key comes from `OPENAI_API_KEY` and is written nowhere.

The timeouts of urllib3, requests and http.client bound the wait for each packet: a server that sends a byte a second,
in the head or the body, is never late. So a `Deadline` shuts the connection down when an answer is not complete in
time. And urllib3 reads all of an answer before it asks again, however long that is, so that attempts after a busy
server's answer are counted here.
"""

import json
import socket
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, MaxRetryError, NewConnectionError, ReadTimeoutError

from ...core.errors import BackendError, InputError
from .schema import BASE_BYTES, most_bytes

#: Attempts after the first, and the seconds that the waits between them begin with.
RETRIES = 4
BACKOFF_S = 0.5
CONNECT_S = 5.0
BUSY = (429, 502, 503, 504)
#: The most bytes of a refusal that are read, and the most characters of a server's own words that are repeated.
MOST_REFUSED = 64 << 10
MOST_QUOTED = 200


class RefusedError(Exception):
    """A status other than 200, with the server's own words."""

    def __init__(self, status: int, words: str):
        """Set the status, for callers that then ask in another form, and the message."""
        super().__init__(f"HTTP {status}: {words}" if words else f"HTTP {status}")
        self.status = status


class Client:
    """One server. `requests` counts what it was sent."""

    def __init__(
        self, url: str, timeout_s: float, key: str | None = None, option: str = "--url", less: str = "--windows"
    ):
        """Ask the server at `url`, such as http://127.0.0.1:8000, with or without /v1.

        `option`: the option that named it; `less`: the one that makes a request shorter.

        Raises InputError for a URL that is none of HTTP.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{option} {url}", "is no address of a server", "give one such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise InputError(
                f"{option} {parts.hostname}",
                "holds a password, which would be shown and written",
                "leave it out, and set OPENAI_API_KEY",
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.requests = 0
        self.option = option
        self._less = less
        self._timeout_s = timeout_s
        retries = urllib3.Retry(
            total=RETRIES, read=0, other=0, redirect=0, backoff_factor=BACKOFF_S, raise_on_redirect=False,
        )  # fmt: skip
        self._pool = urllib3.PoolManager(
            retries=retries, timeout=urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)
        )
        self._pool.pool_classes_by_scheme = {"http": _WatchedPool, "https": _WatchedSecurePool}
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> Any:
        """The JSON at `path`; raises what `post` raises."""
        return self._ask("GET", path, None, BASE_BYTES)

    def post(self, path: str, fields: dict[str, Any]) -> Any:
        """The JSON that `fields`, of a completion, are answered with.

        Raises RefusedError for a status other than 200, BackendError for a server that is down or slow, InputError for
        an answer that is no JSON, or longer than one to these fields may be.
        """
        return self._ask("POST", path, json.dumps(fields).encode(), most_bytes(fields))

    def _ask(self, method: str, path: str, body: bytes | None, most: int) -> Any:
        for attempt in range(RETRIES + 1):
            status, content = self._answer(method, path, body, most)
            if status not in BUSY or attempt == RETRIES:
                break
            time.sleep(BACKOFF_S * 2**attempt)
        if status != 200:
            raise RefusedError(status, _words(content))
        if len(content) > most:
            raise InputError(
                f"{self.url}{path}",
                f"answers with more than {most:,} bytes, the most that such an answer has",
                "is it the right server?",
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self.url}{path}",
                f"answers with no JSON ({str(error)[:MOST_QUOTED]})",
                "is it the address of a model's server?",
            ) from None

    def _answer(self, method: str, path: str, body: bytes | None, most: int) -> tuple[int, bytes]:
        """Status and body of one answer, of which at most a byte more than `most` is read."""
        self.requests += 1
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        with Deadline(self._timeout_s) as deadline:
            try:
                response = self._pool.request(
                    method, self.url + path, body=body, headers=headers, preload_content=False, decode_content=True
                )
                content = _read(response, most if response.status == 200 else MOST_REFUSED)
            except HTTPError as error:
                raise self._unreachable(error, deadline.passed) from None
        if deadline.passed:  # a body without a length ends where the connection does
            raise self._late()
        return response.status, content

    def _late(self) -> BackendError:
        return BackendError(
            self.url,
            f"did not answer within {self._timeout_s:g} seconds",
            f"give it longer with --timeout, or ask less with {self._less}",
        )

    def _unreachable(self, error: HTTPError, late: bool) -> BackendError:
        cause: BaseException | None = error.reason if isinstance(error, MaxRetryError) else error
        if isinstance(cause, NewConnectionError | ConnectTimeoutError):
            return BackendError(
                self.url, "no server answers there", f"start it, or give its address with {self.option}"
            )
        if late or isinstance(cause, ReadTimeoutError):
            return self._late()
        return BackendError(self.url, f"the connection broke off ({type(cause).__name__})", "see the server's log")


class Deadline:
    """Shut down the connections of this block when it takes longer than `seconds`; `passed` tells of it."""

    def __init__(self, seconds: float):
        """Begin to count when the block is entered."""
        self.passed = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._pass)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        """Watch the connections that this thread makes."""
        self._token = _deadline.set(self)
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let them be."""
        self._timer.cancel()
        _deadline.reset(self._token)
        with self._lock:
            self._socket = None

    def watch(self, connected: "socket.socket | None") -> None:
        """Shut this socket down in time, or at once where that is over."""
        with self._lock:
            self._socket = connected
            if self.passed:
                _shut(connected)

    def _pass(self) -> None:
        with self._lock:
            self.passed = True
            _shut(self._socket)


def _shut(connected: "socket.socket | None") -> None:
    """End both directions, so that whoever reads has reached the end; of TLS below its own records."""
    if connected is not None:
        with suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)


_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def _watch(connection: HTTPConnection) -> None:
    if deadline := _deadline.get():
        deadline.watch(connection.sock)


class _Watched(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _watch(self)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as in urllib3
        _watch(self)  # a connection that was made for an earlier request
        return super().getresponse()


class _WatchedSecure(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _watch(self)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as in urllib3
        _watch(self)
        return super().getresponse()


class _WatchedPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Watched


class _WatchedSecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _WatchedSecure


def _read(response: urllib3.BaseHTTPResponse, most: int) -> bytes:
    """The body, as far as it is read: a byte more than `most` at least, where there are so many."""
    parts: list[bytes] = []
    length = 0
    try:
        while length <= most and (part := response.read1(1 << 20)):
            parts.append(part)
            length += len(part)
    finally:
        response.close() if length > most else response.release_conn()
    return b"".join(parts)


def _words(content: bytes) -> str:
    """The server's own words in the body of an error, as one short line."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        said = content.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    words = " ".join(str(said).split())
    if len(words) <= MOST_QUOTED:
        return words
    return f"{words[:MOST_QUOTED]}…"
