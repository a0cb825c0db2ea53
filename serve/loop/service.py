"""The loop for several threads: whoever has a request hands it in and is told of each piece; one thread steps.

    submit (any thread) -> tokenize (a few threads) -> the inbox -> step (one thread) -> receive(piece)

Tokenizing a long prompt takes longer than many steps, so it happens beside them. What a client brings may fail in its
own way (a callback that raises, a question whether it has gone that does): that ends its own request and no other. A
failure of the session ends those in flight, and those who wait start afresh. After a failure that it cannot recover
from (a device that is broken, or whatever else is raised in the stepping thread) the service is down: all who are here
are told at once, nobody is taken in any more, and the thread lives on for requests that were on their way.

Copied as it is into Triton repositories: imports only its neighbours in this folder.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from .device import BrokenDeviceError
from .generate import GenerationError, Generator
from .request import BusyError, Piece, Request, RequestError, TokenizedRequest

LOG = logging.getLogger("fp8q")
#: Threads that tokenize; the library lets the others go on meanwhile.
TOKENIZERS = 2
#: Requests that may be here beside those that a batch holds, and beside these for clients that have none here.
MAX_WAITING = 256
RESERVED = 32


@dataclass(frozen=True)
class Failed:
    """The reason why a request gets no more pieces: it was refused, its client has gone, or it failed.

    `code`: the reason in a word that programs know.
    """

    reason: str
    kind: Literal["refused", "cancelled", "failed"]
    code: str | None = None


Receive = Callable[[Piece | Failed], None]


class Ongoing:
    """A request that was handed in."""

    def __init__(self, service: "Service", receive: Receive, gone: Callable[[], bool] | None, client: str):
        """Whom to tell, whom to ask whether anybody still waits, and who asked."""
        self._service = service
        self.receive = receive
        self.gone = gone
        self.client = client
        self.ticket: int | None = None
        self.over = False

    def cancel(self) -> None:
        """Cancel the request, from any thread: its row is free before the next step, and its client gets no more."""
        self._service.run_between_steps(lambda: self._service.end(self))


class Service:
    """One `Generator`, shared by threads: `submit` and `stream` hand requests in."""

    def __init__(self, generator: Generator, max_waiting: int = MAX_WAITING):
        """Step `generator`, which nothing else may use from now on, and whose own queue is unbounded. At most
        `max_waiting` requests wait beside those that its batch holds.
        """
        self._generator = generator
        self._most = generator.max_batch + max_waiting
        self._here: set[Ongoing] = set()
        self._lock = threading.Lock()
        #: The reason why the service is down; None while it serves.
        self.failure: str | None = None
        self._closing = False
        self._tokenizing = ThreadPoolExecutor(TOKENIZERS, "fp8q-tokenize")
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ongoing: dict[int, Ongoing] = {}
        self._thread = threading.Thread(target=self._serve, name="fp8q-step", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Tell whether requests are served."""
        return self.failure is None and not self._closing and self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int]:
        """Return the numbers of requests being answered and waiting, as far as another thread can tell."""
        with self._lock:
            here = len(self._here)
        flying = min(self._generator.load[0], here)
        return flying, here - flying

    def submit(
        self, request: Request, receive: Receive, gone: Callable[[], bool] | None = None, client: str = ""
    ) -> Ongoing:
        """Submit a request of `client` ("" where nobody knows): clients share the rows, however much each asks for.

        `receive` is called with each piece, the last one with a finish_reason, or with one Failed instead of the last:
        in the stepping or a tokenizing thread, so it must return quickly. `gone` is asked before each step whether the
        client has gone. Raises BusyError when the queue is full, or the service closes, and GenerationError when it is
        down.
        """
        with self._lock:
            if self.failure is not None:
                raise GenerationError(self.failure)
            if self._closing:
                raise BusyError("the service is closing; ask another")
            here = len(self._here)
            most = self._most
            if client and all(other.client != client for other in self._here):
                most += RESERVED
            if here >= most:
                raise BusyError(f"{here} requests are here already; try again later")
            ongoing = Ongoing(self, receive, gone, client)
            self._here.add(ongoing)
            self._tokenizing.submit(self._prepare, request, ongoing)
        return ongoing

    def stream(self, request: Request) -> Iterator[Piece]:
        """The pieces of an answer as they come; whoever stops early cancels the request.

        Raises BusyError as `submit` does, RequestError for a request that cannot be served, GenerationError for an
        answer that breaks off, or where the service is down.
        """
        pieces: queue.SimpleQueue[Piece | Failed] = queue.SimpleQueue()
        ongoing = self.submit(request, pieces.put)
        try:
            while True:
                piece = pieces.get()
                if isinstance(piece, Failed):
                    raise (RequestError if piece.kind == "refused" else GenerationError)(piece.reason)
                yield piece
                if piece.finish_reason:
                    return
        finally:
            ongoing.cancel()

    def close(self) -> None:
        """Take no more requests, answer those that are here, and end the threads."""
        with self._lock:
            self._closing = True
        self._tokenizing.shutdown()
        self.run_between_steps(lambda: None)
        self._thread.join()

    def run_between_steps(self, action: Callable[[], None]) -> None:
        """Let the stepping thread do this before it steps again."""
        self._inbox.put(action)

    def end(self, ongoing: Ongoing, message: Failed | None = None) -> None:
        """End a request, in the stepping thread; `message`: the last one to its client."""
        if ongoing.over:
            return
        ongoing.over = True
        with self._lock:
            self._here.remove(ongoing)
        if message:
            _tell(ongoing, message)
        if ongoing.ticket is not None:
            del self._ongoing[ongoing.ticket]
            if self.failure is None:
                self._generator.cancel(ongoing.ticket)

    def _prepare(self, request: Request, ongoing: Ongoing) -> None:
        """Tokenize, in a thread of the pool, and let the stepping thread go on."""
        refusal = None
        try:
            ready = self._generator.prepare(request)
        except RequestError as error:
            refusal = Failed(str(error), "refused", error.code)
        except BaseException as error:  # noqa: BLE001  # tokenizers may panic, which is no Exception, and the client waits
            refusal = Failed(f"the prompt cannot be tokenized: {type(error).__name__}: {error}", "refused")
        self.run_between_steps(
            (lambda: self.end(ongoing, refusal)) if refusal else (lambda: self._admit(ready, ongoing))
        )

    def _admit(self, ready: TokenizedRequest, ongoing: Ongoing) -> None:
        if not ongoing.over:  # as all are once the service is down
            ongoing.ticket = self._generator.submit(ready, ongoing.client)
            self._ongoing[ongoing.ticket] = ongoing

    def _serve(self) -> None:
        """Do what came in, and step, until the service closes and all are answered."""
        while self._here or not self._closing:
            try:
                self._advance()
            except BaseException as error:  # panics are no Exception, and without this thread all would wait for ever
                LOG.exception("the loop that generates has ended")
                reason = ": ".join(filter(None, (type(error).__name__, str(error))))
                self._go_down(f"the loop that generates has ended ({reason}); start the server again")

    def _advance(self) -> None:
        """Do the next thing that came in, or step where there is none."""
        stepping = self.failure is None and self._generator.busy
        try:
            action = self._inbox.get(block=not stepping)
        except queue.Empty:
            self._step()
        else:
            action()

    def _go_down(self, failure: str) -> None:
        """Take nobody in any more, and tell all who are here why."""
        with self._lock:
            self.failure = self.failure or failure
            here = list(self._here)
        for ongoing in here:
            self.end(ongoing, Failed(self.failure, "failed"))

    def _step(self) -> None:
        for ongoing in [ongoing for ongoing in self._ongoing.values() if ongoing.gone]:
            self._ask(ongoing)
        try:
            pieces = self._generator.step()
        except BrokenDeviceError:
            raise
        except BaseException as error:  # panics are no Exception, and other requests can be answered
            LOG.exception("generation failed")
            failure = Failed(f"generation failed: {type(error).__name__}: {error}", "failed")
            for ticket in self._generator.drop():
                self.end(self._ongoing[ticket], failure)
            return
        for piece in pieces:
            self._hand_on(self._ongoing[piece.ticket], piece)

    def _ask(self, ongoing: Ongoing) -> None:
        """Let a request go that nobody waits for, or that cannot say so."""
        try:
            gone = ongoing.gone is not None and ongoing.gone()
        except Exception as error:  # the client's own question may raise anything, and is nobody else's misfortune
            LOG.exception("whether a client has gone cannot be told")
            self.end(ongoing, Failed(f"whether the client has gone cannot be told: {error}", "failed"))
            return
        if gone:
            self.end(ongoing, Failed("the client cancelled the request", "cancelled"))

    def _hand_on(self, ongoing: Ongoing, piece: Piece) -> None:
        if piece.error is not None:
            LOG.error("generation failed for one request: %s", piece.error)
            self.end(ongoing, Failed(f"generation failed: {piece.error}", "failed"))
            return
        taken = _tell(ongoing, piece)
        if piece.finish_reason or not taken:
            self.end(ongoing)


def _tell(ongoing: Ongoing, message: Piece | Failed) -> bool:
    """Call the client back; return whether it accepted the message."""
    try:
        ongoing.receive(message)
    except Exception:  # the client's own callback may raise anything, and is nobody else's misfortune
        LOG.exception("a response could not be sent")
        return False
    return True
