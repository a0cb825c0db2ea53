"""Run the server process: uvicorn's event loop, on a socket that is bound before anything is promised.

uvicorn does not handle signals here: the command line decides when the server ends (docs/decisions/0010 and 0013). Then
no new request is accepted, active ones are answered, and after the grace period the rest is broken off.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...core.errors import InputError
from .app import application
from .gate import names_of
from .serving import Serving

#: Seconds that a connection may be open without a whole request head, without a request between two, and without
#: taking anything of what it is sent.
HEAD_SECONDS = 20.0
IDLE_SECONDS = 10
UNREAD_SECONDS = 60.0
#: Bytes of a request's head, and of an answer that may wait in this process and in the kernel (which doubles its part):
#: what lies there seems read.
LARGEST_HEAD = 32 << 10
UNSENT = 16 << 10
SEND_BUFFER = 32 << 10


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP, for clients that may do nothing: who sends no whole request head in time, or takes nothing of an
    answer, is hung up on.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNSENT)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop waiting where a request has begun."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()

    def on_response_complete(self) -> None:
        """Begin to wait for the next one."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: the client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing; what uvicorn calls here ends the wait for a reader too."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _expire(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for a reader
        else:
            self.transport.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """A server that can be asked to end."""

    def __init__(self, serving: Serving, host: str, port: int, grace: int, ready: Callable[["Server"], object]):
        """Listen, and call `ready` when requests are taken in; port 0 is a free one.

        Raises InputError where that cannot be.
        """
        self.serving = serving
        self._listener = listening_socket(host, port)
        self._ready = ready
        serving.hosts = names_of(host, self._listener.getsockname()[0])
        super().__init__(
            uvicorn.Config(
                application(serving), http=PatientProtocol, ws="none", lifespan="off", proxy_headers=False,
                server_header=False, log_config=None, log_level="critical", access_log=False,
                timeout_keep_alive=IDLE_SECONDS, timeout_graceful_shutdown=grace,
                h11_max_incomplete_event_size=LARGEST_HEAD,
            )
        )  # fmt: skip

    @property
    def is_open(self) -> bool:
        """Tell whether other machines reach it, and need no key."""
        return self.serving.hosts is None and self.serving.key is None

    @property
    def url(self) -> str:
        """The address of the server."""
        host, port = self._listener.getsockname()[:2]
        if ":" in host:
            return f"http://[{host}]:{port}"
        return f"http://{host}:{port}"

    def stop(self) -> None:
        """Accept no more requests, and end when those in flight are answered; from a signal handler or any thread."""
        self.serving.closing = self.should_exit = True

    def serve_until_stopped(self) -> int:
        """Serve; returns how many requests were broken off in the end."""
        try:
            self.run(sockets=[self._listener])
        finally:
            self._listener.close()
            self.serving.closing = True
            self.serving.close()
        return self.serving.cut

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open what belongs to the event loop, and say that it runs."""
        self.serving.open()
        self._watching = asyncio.create_task(self.serving.watch())
        await super().startup(sockets)
        self._ready(self)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[Any]:
        """Signals are the command line's."""
        yield


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises InputError."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(kind, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections have it too
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InputError(
            f"--host {host} --port {port}",
            f"cannot be listened at ({error.strerror})",
            "name another, or --port 0 for a free one",
        ) from None
    return listener
