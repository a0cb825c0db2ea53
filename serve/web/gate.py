"""Check every request before the application sees it: its origin, its authorization, its size.

A server on the loopback address answers browsers only under a name of that address: a page elsewhere can point its own
name to 127.0.0.1, and could then read the answers (DNS rebinding). With a key this check is not needed, since such a
page does not have it. JSON requires its content type, so that a browser asks for permission before it sends another
site's request.
"""

import asyncio
import hmac
import logging
import zlib
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .refusals import Refusal
from .serving import Serving

LOG = logging.getLogger("fp8q")
#: Seconds that a request's body may take to come.
BODY_SECONDS = 30.0
#: Where bodies are read.
ASKED = ("/v1/completions", "/v1/chat/completions")
#: Beginnings of the paths that want the key.
KEYED = ("/v1/", "/openapi.json")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def names_of(host: str, bound: str) -> frozenset[str] | None:
    """The host names under which a server that listens at `host`, bound to the address `bound`, answers.

    None: any name, for an address that other machines can reach.
    """
    if not ip_address(bound.partition("%")[0]).is_loopback:
        return None
    return frozenset({*LOOPBACK, host.lower(), f"[{host.lower()}]", bound, f"[{bound}]"})


class Gate:
    """The application behind its checks (ASGI)."""

    def __init__(self, app: ASGIApp, serving: Serving):
        """Pass the requests to `app` that `serving` allows."""
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, and let it through with its whole body."""
        if scope["type"] != "http":
            return
        if scope["method"] == "HEAD":  # uvicorn leaves out the body of what GET is answered
            scope = {**scope, "method": "GET"}
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, await self._checked(scope, receive), sending)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
        except asyncio.CancelledError:
            if not self._serving.closing:
                raise
            self._serving.cut += 1
            if not started:
                await Refusal(503, "the server has closed; ask another", code="closing").response()(
                    scope, receive, send
                )
        except Exception:
            LOG.exception("a request failed, which is a fault of fp8q")
            if not started:
                await Refusal(500, "a fault of the server; its log says more").response()(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive) -> Receive:
        """Check a request and read its body; return a `receive` that yields the body again. Raises Refusal."""
        headers = Headers(scope=scope)
        serving = self._serving
        host = headers.get("host", "localhost").rpartition(":")
        name = host[0] if host[0] and host[2].isdigit() else "".join(host)
        if serving.hosts is not None and serving.key is None and name.lower() not in serving.hosts:
            raise Refusal(
                403,
                f"this server is for its own machine, and is asked as {name}; ask it as localhost, or start it with "
                "--api-key",
                code="wrong_host",
            )
        if scope["path"].startswith(KEYED):
            self._admit(headers)
        if scope["method"] != "POST" or scope["path"] not in ASKED:
            return receive
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body must be JSON; send it with the header Content-Type: application/json")
        body = unpacked(await self._read(headers, receive), headers, serving.largest_body)
        sent = False

        async def again() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return again

    def _admit(self, headers: Headers) -> None:
        key = self._serving.key
        scheme, _, token = headers.get("authorization", "").partition(" ")
        admitted = scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), (key or "").encode())
        if key is not None and not admitted:
            raise Refusal(
                401, "this server wants its API key; send it as Authorization: Bearer KEY", None, "invalid_api_key"
            )

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body; raises Refusal for one that is too long or too late."""
        most = self._serving.largest_body
        said = headers.get("content-length", "0")
        parts = []
        length = int(said) if said.isdigit() else 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = length <= most
                length = 0 if length <= most else length
                while more and length <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "the body broke off")
                    parts.append(message.get("body", b""))
                    length = length + len(parts[-1])
                    more = message.get("more_body", False)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {BODY_SECONDS:.0f} seconds; send it at once") from None
        if length > most:
            raise _too_large(most)
        return b"".join(parts)


def unpacked(body: bytes, headers: Headers, most: int) -> bytes:
    """The `body` that was sent by gzip, of at most so many bytes; raises Refusal for another encoding."""
    names = [name.strip().lower() for name in headers.get("content-encoding", "").split(",")]
    encodings = [name for name in names if name not in ("", "identity")]
    if not encodings:
        return body
    if encodings not in (["gzip"], ["x-gzip"]):
        raise Refusal(
            415, f"Content-Encoding: {', '.join(encodings)} is not read here; send the body as it is, or by gzip"
        )
    packed = zlib.decompressobj(wbits=31)
    try:
        data = packed.decompress(body, most + 1)
    except zlib.error as error:
        raise Refusal(400, f"the body is no gzip ({error}); send it as it is, or pack it again") from None
    if len(data) > most:
        raise _too_large(most)
    if not packed.eof or packed.unused_data:
        raise Refusal(400, "the body is not one whole gzip; send it as it is, or pack it again")
    return data


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the body has more than {most:,} bytes; send less", code="request_too_large")
