"""A client of OpenAI's API that costs little itself: what is measured beside it, on the same cores, is the server.

It keeps a connection, writes the request down in one piece, takes down when each event of the stream arrives, and reads
their JSON when all is over. The official client spends more on a token than a small model does.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self


@dataclass
class Heard:
    """A stream that was listened to: its status, when it was asked for, when each of its events came (seconds of
    `perf_counter`), and what they say.
    """

    status: int
    begun: float
    times: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    @property
    def tokens(self) -> int:
        """How many tokens were produced, as the server counts them; 0 where it did not come so far."""
        return sum((event.get("usage") or {}).get("completion_tokens", 0) for event in self.events)

    @property
    def first(self) -> float:
        """Seconds to the first event."""
        return self.times[0] - self.begun


class Client:
    """One connection, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str):
        """Made by `connect`."""
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def connect(cls, host: str, port: int) -> Self:
        """Open a connection."""
        return cls(*await asyncio.open_connection(host, port), f"{host}:{port}")

    async def stream(self, fields: dict[str, Any], path: str = "/v1/completions") -> Heard:
        """Ask for a stream, its usage last, and listen to its end."""
        return await self.ask(fields | {"stream": True, "stream_options": {"include_usage": True}}, path)

    async def ask(self, fields: dict[str, Any], path: str) -> Heard:
        """Send a request and listen to the end of what comes."""
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        begun = perf_counter()
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        found = Heard(int(answer.split(b" ", 2)[1]), begun)
        if b"transfer-encoding: chunked" not in answer:
            length = int(answer.split(b"content-length: ")[1].split(b"\r")[0])
            whole = (await self._reader.readexactly(length)).decode()
            found.events.append(json.loads(whole.removeprefix("data: ")))  # which Triton's refusal of a stream has
            return found
        content = b""
        while size := int(await self._reader.readline(), 16):
            part = (await self._reader.readexactly(size + 2))[:-2]
            found.times += [perf_counter()] * part.count(b"data: ")
            content += part
        await self._reader.readline()
        data = [line[6:] for line in content.decode().split("\n\n") if line]
        found.events += [json.loads(line) for line in data if line != "[DONE]"]
        return found

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        await self._writer.wait_closed()


async def together(host: str, port: int, requests: Sequence[dict[str, Any]]) -> list[Heard]:
    """Ask all of these at once, each on a connection of its own that is open before."""
    clients = [await Client.connect(host, port) for _ in requests]
    try:
        return await asyncio.gather(*(client.stream(fields) for client, fields in zip(clients, requests, strict=True)))
    finally:
        for client in clients:
            await client.close()
