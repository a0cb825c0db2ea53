"""Watch which of several processes are alive: each second every rank reports to rank 0, and rank 0 informs all.

Collectives alone do not show it: a rank that computes for an hour would learn only then that another has died, and
torchrun's agent kills the ranks of its own machine only. A process that dies closes its connections, which the next
beat notices at once. A machine that is cut off closes nothing, and counts as lost after `SILENCE_S` of silence.
`monitored_barrier` notices both too, but names the dead rank in an English message only, and transmits no reason of a
rank that can still give one.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ...core.errors import INTERRUPTED, TERMINATED, BackendError, Fp8qError
from ...core.files import Strict

#: Seconds between two beats, and seconds of silence after which rank 0 counts a rank as lost; the others wait
#: `PATIENCE_S` longer for rank 0, since it may be waiting itself.
INTERVAL_S = 1.0
SILENCE_S = 30.0
PATIENCE_S = 10.0
#: The bytes of a beat, and the most characters of a message in it.
BEAT_BYTES = 4096
LONGEST_MESSAGE = 900


class RankFailure(Strict):
    """The rank that failed; `message` is None if it died without one."""

    rank: int
    name: str
    message: str | None = None
    code: int = BackendError.exit_code


class Beat(Strict):
    """The state of one rank, sent to rank 0, or of all ranks, sent by rank 0."""

    done: bool = False
    failure: RankFailure | None = None


class RankError(Fp8qError):
    """Another rank failed; the exit code is that rank's. `reported`: it has printed the reason on its own standard
    error.
    """

    def __init__(self, failure: RankFailure):
        """Name the rank, and the cause where it is known."""
        if failure.message:
            super().__init__(failure.name, failure.message)
        else:
            super().__init__(
                "",
                f"{failure.name} died without a word (killed, out of memory, or its machine is gone); what started it "
                "has its exit code",
                "the same command goes on from what is finished",
            )
        self.exit_code = failure.code
        self.reported = failure.message is not None


class Stopped(BaseException):
    """Ends the main thread's work wherever it is; it is no `Exception`, so that no called code catches it. `error`: the
    exception to raise for it.
    """

    def __init__(self, error: Fp8qError):
        """Store `error`."""
        super().__init__(str(error))
        self.error = error


class Heartbeat:
    """The heartbeat of one rank.

    Invariant: all living ranks end in the same round, with the same verdict.
    """

    def __init__(self, rank: int, names: Sequence[str], group: Any):
        """Beat for `rank`, in a separate gloo process `group`; `names`: what to call each rank in messages."""
        self.rank = rank
        self.names = names
        self.group = group
        self.beat = Beat()
        self.ended = False
        self.failure: RankFailure | None = None
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fp8q-heartbeat", daemon=True)
        self._handler = (
            signal.signal(signal.SIGTERM, self._stopped)
            if threading.current_thread() is threading.main_thread()
            else None
        )
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Report that this rank is done, or the `error` it failed with, and wait until all ranks have ended.

        Raises RankError when another rank failed.
        """
        if error is not None and self._handler is not None:  # nothing may interrupt the report of a failure
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        failure = (
            None
            if error is None
            else RankFailure(rank=self.rank, name=self.names[self.rank], message=line_of(error), code=code)
        )
        self.beat = Beat(done=error is None, failure=failure)
        self._changed.set()
        self._thread.join()
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise RankError when another rank is known to have failed."""
        if self.failure is not None:
            raise RankError(self.failure)

    def explain(self, seconds: float = SILENCE_S + 2 * PATIENCE_S) -> None:
        """Wait for the verdict that follows a broken connection; raises RankError when it is a failure."""
        deadline = time.monotonic() + seconds
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.05)
        self.check()

    def _stopped(self, number: int, frame: object) -> None:
        """Handle SIGTERM: from our own thread, from torchrun because another rank died, or from outside."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self.explain(3 * INTERVAL_S)
        except RankError as error:
            raise Stopped(error) from None
        stopped = Fp8qError(
            "", "stopped by SIGTERM", "what is finished is kept, and the same command goes on from there"
        )
        stopped.exit_code = TERMINATED
        raise Stopped(stopped)

    def _beat(self) -> None:
        verdict = Beat()
        while not (verdict.done or verdict.failure):
            self._changed.wait(INTERVAL_S)
            verdict = self._follow() if self.rank else self._lead()
        failure = verdict.failure
        self.failure = failure if failure and failure.rank != self.rank else None
        self.ended = True
        if self.failure and self.beat == Beat() and self._handler is not None:
            # a real signal ends waits that `_thread.interrupt_main` would not
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _lead(self) -> Beat:
        deadline = time.monotonic() + SILENCE_S
        beats = [self.beat, *(self._heard(rank, deadline) for rank in range(1, len(self.names)))]
        failures = [beat.failure for beat in beats if beat.failure]
        verdict = Beat(done=all(beat.done for beat in beats), failure=failures[0] if failures else None)
        for rank in range(1, len(self.names)):
            with suppress(RuntimeError):  # this rank died
                self._say(verdict, rank)
        return verdict

    def _follow(self) -> Beat:
        with suppress(RuntimeError):
            self._say(self.beat, 0)
        return self._heard(0, time.monotonic() + SILENCE_S + PATIENCE_S)

    def _say(self, beat: Beat, rank: int) -> None:
        import torch

        content = beat.model_dump_json().encode().ljust(BEAT_BYTES)
        self.group.send([torch.frombuffer(bytearray(content), dtype=torch.uint8)], rank, 0).wait(
            timedelta(seconds=SILENCE_S)
        )

    def _heard(self, rank: int, deadline: float) -> Beat:
        """Receive the beat of `rank`; a failure where its connection is closed, or silent until the deadline."""
        import torch

        content = torch.empty(BEAT_BYTES, dtype=torch.uint8)
        try:
            self.group.recv([content], rank, 0).wait(timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError:
            return Beat(failure=RankFailure(rank=rank, name=self.names[rank]))
        return Beat.model_validate_json(content.numpy().tobytes())


def line_of(error: BaseException) -> str:
    """Format an exception in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = (
        str(error)
        if isinstance(error, Fp8qError)
        else f"{type(error).__name__}: {error}"
        if str(error)
        else type(error).__name__
    )
    return " ".join(text.split())[:LONGEST_MESSAGE]


def rank_name(rank: int, host: str) -> str:
    """The name of this process in messages, by its `rank` and `host`."""
    return f"rank {rank} (process {os.getpid()} on {host})"
