"""Send the answer to an HTTP request: as a stream of events, or in one piece at its end.

The first message from the loop decides the status: a prompt that cannot be tokenized is a 400 in a stream too. A client
that hangs up frees its rows at once; one that does not read is disconnected (`server.PatientProtocol`).
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..loop.request import Piece
from ..loop.service import Failed
from .answers import AnswerPart, Writer
from .mailbox import Arrived
from .metrics import ModelMetrics
from .refusals import Refusal
from .serving import Handed

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
EVENTS.append((b"x-accel-buffering", b"no"))  # nginx would keep events until it has some kilobytes


class GoneError(Exception):
    """The client has gone."""


@dataclass(frozen=True)
class Delivery:
    """The delivery of an answer: its writer, and whether it is streamed; `param`: the request's field in errors.

    `with_usage`: a stream ends with the numbers of tokens; `counting`: each of its chunks has those so far too.
    """

    writer: Writer
    streamed: bool
    with_usage: bool
    param: str
    counting: bool = False


class AnswerResponse(Response):
    """The answers to all prompts of one request."""

    def __init__(self, handed: Handed, delivery: Delivery, counts: ModelMetrics, begun: float):
        """`begun`: when the request came, in seconds of `perf_counter`."""
        self.background = None
        self._handed = handed
        self._delivery = delivery
        self._counts = counts
        self._times = [begun] * len(handed.ongoing)
        self._last: list[Piece | None] = [None] * len(handed.ongoing)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it (ASGI)."""
        watching = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self._delivery.streamed else self._unstreamed(send))
        except Refusal as refusal:
            if self._started:
                await send({"type": "http.response.body", "body": _event(refusal)})
            else:
                await refusal.response()(scope, receive, send)
        except GoneError:
            self._counts.ended("cancelled", self._open)
        except asyncio.CancelledError:
            self._counts.ended("cancelled", self._open)
            raise
        finally:
            self._handed.let_go()
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    @property
    def _open(self) -> int:
        """The number of answers that have not ended."""
        return sum(piece is None or piece.finish_reason is None for piece in self._last)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._handed.box.hang_up()

    async def _fetch(self) -> dict[int, AnswerPart]:
        """Collect the new pieces by answer; raises GoneError, and Refusal where no answer is possible."""
        arrived = await self._handed.box.fetch()
        if self._handed.box.gone:
            raise GoneError
        parts: dict[int, AnswerPart] = {}
        for gain in arrived:
            if isinstance(gain.message, Failed):
                raise self._refused(gain.message)
            self._count(gain, gain.message)
            parts.setdefault(gain.answer, AnswerPart()).pieces.append(gain.message)
        return parts

    def _refused(self, failed: Failed) -> Refusal:
        self._counts.ended("refused" if failed.kind == "refused" else "failed", self._open)
        if failed.kind == "refused":
            return Refusal(400, failed.reason, self._delivery.param, failed.code)
        return Refusal(500, failed.reason)

    def _count(self, arrived: Arrived, piece: Piece) -> None:
        index = arrived.answer
        counts = self._counts
        if piece.of_prompt:
            return
        if self._last[index] is None:
            counts.first.observe(arrived.at - self._times[index])
            counts.prompt.inc(piece.input_tokens)
        else:
            counts.between.observe(arrived.at - self._times[index])
        counts.produced.inc()
        self._times[index], self._last[index] = arrived.at, piece
        if piece.finish_reason == "stop" or piece.finish_reason == "length":
            counts.ended(piece.finish_reason)

    async def _unstreamed(self, send: Send) -> None:
        answers = [AnswerPart() for _ in self._last]
        while self._open:
            for index, part in (await self._fetch()).items():
                answers[index].pieces += part.pieces
        body = self._delivery.writer.unstreamed(answers)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        writer = self._delivery.writer.stream(self._delivery.with_usage, self._delivery.counting)
        parts = await self._fetch()
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        text = "".join(writer.opening(index) for index in range(len(self._last)))
        while True:
            text += "".join(writer.chunk(index, part) for index, part in parts.items())
            if not self._open:
                break
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            text, parts = "", await self._fetch()
        body = text.encode() + writer.ending(_present(self._last))
        await send({"type": "http.response.body", "body": body})


def _present(pieces: Sequence[Piece | None]) -> list[Piece]:
    return [piece for piece in pieces if piece is not None]


def _event(refusal: Refusal) -> bytes:
    return f"data: {json.dumps(refusal.body())}\n\n".encode()
