"""Pass pieces from the stepping thread to the event loop, with one call a step for all clients.

Waking a loop from another thread costs a system call, and every socket written there makes the stepping thread wait for
the interpreter. So a mailbox collects the pieces, and a client that is slower than the model gets several at once; a
client that wants the whole answer is woken once, at its end.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

from ..loop.request import Piece
from ..loop.service import Failed


class Arrived(NamedTuple):
    """A message for one of the answers that a client waits for, and its time (seconds of `perf_counter`)."""

    answer: int
    message: Piece | Failed
    at: float


class Courier:
    """Wake the mailboxes with new messages, in the event loop in which the courier was made."""

    def __init__(self) -> None:
        """Nothing is under way yet."""
        self._loop = asyncio.get_running_loop()
        self._ringing: deque[Mailbox] = deque()
        self._called = False

    def ring(self, mailbox: "Mailbox") -> None:
        """Wake `mailbox`, from any thread."""
        self._ringing.append(mailbox)
        if not self._called:  # two threads may both call, which does no harm
            self._called = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._called = False  # before looking: what comes from now on calls again
        while self._ringing:
            self._ringing.popleft().wake()


class Mailbox:
    """The messages for one client; only the functions that `receiver` returns may be called in other threads."""

    def __init__(self, courier: Courier, eager: bool):
        """`eager`: whether it wants each piece of text as it comes, or all at the end."""
        self._courier = courier
        self._eager = eager
        self._arrived: deque[Arrived] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False
        self._seen: Arrived | None = None
        self.gone = False

    def receiver(self, answer: int) -> Callable[[Piece | Failed], None]:
        """Return the function that the service calls with the pieces of this answer, in its own thread."""

        def receive(message: Piece | Failed) -> None:
            self._arrived.append(Arrived(answer, message, perf_counter()))
            if isinstance(message, Failed) or message.finish_reason or (self._eager and message.text):
                self._courier.ring(self)

        return receive

    def look(self) -> tuple[int, float]:
        """The number of pieces that a client with a stream has not taken since the last look, and the seconds since the
        first of them came. The event loop has turned since then, so it is the client that is late and not the loop.
        """
        first = self._arrived[0] if self._eager and self._arrived else None
        seen = self._seen
        self._seen = first
        if first is not None and first is seen:
            return (len(self._arrived), perf_counter() - first.at)
        return (0, 0.0)

    def wake(self) -> None:
        """Wake the waiting client."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hang_up(self) -> None:
        """Say that the client has gone."""
        self.gone = True
        self.wake()

    def fail(self, reason: str) -> None:
        """Say that there is nothing more to come."""
        self._arrived.append(Arrived(0, Failed(reason, "failed"), perf_counter()))
        self.wake()

    async def fetch(self) -> list[Arrived]:
        """Wait for messages, and return those since the last call; none if the client has gone."""
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._woken = False
        if self.gone:
            return []
        arrived = []
        while self._arrived:
            arrived.append(self._arrived.popleft())
        return arrived
