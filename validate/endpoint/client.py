"""Speak JSON to a server over HTTP, within bounds: of time, of attempts, and of bytes that are read.

A server that is busy (429, 502, 503, 504), or not reachable for a moment, is asked again; urllib3 counts the attempts
and waits between them. A redirect is not followed, so that text and key go to the address that the user gave and to no
other, and no proxy is taken from the environment. The key comes from `OPENAI_API_KEY` and is written nowhere.
"""

import json
import time
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, MaxRetryError, NewConnectionError, ReadTimeoutError

from ...core.errors import BackendError, InputError

#: Attempts after the first, and the seconds that the waits between them begin with.
RETRIES, BACKOFF_S, CONNECT_S = 4, 0.5, 5.0
BUSY = (429, 502, 503, 504)
#: The most bytes of an answer that are read.
MOST_BYTES = 64 << 20
#: The most characters of a server's own words that are repeated.
MOST_QUOTED = 200


class RefusedError(Exception):
    """The server does not answer this: `status`, and its own words."""

    def __init__(self, status: int, words: str):
        """Keep both apart, for whoever asks otherwise then."""
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
            raise InputError(f"{option} {url}: is no address of a server; give one such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise InputError(
                f"{option} {parts.hostname}: holds a password, which would be shown and written; leave it out, and set "
                "OPENAI_API_KEY"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.requests, self.option, self._less = 0, option, less
        self._timeout_s = timeout_s
        retries = urllib3.Retry(
            total=RETRIES, read=0, redirect=0, backoff_factor=BACKOFF_S, status_forcelist=BUSY, allowed_methods=None,
            raise_on_status=False, raise_on_redirect=False, respect_retry_after_header=False,
        )  # fmt: skip
        self._pool = urllib3.PoolManager(
            retries=retries, timeout=urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)
        )
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> Any:
        """The JSON at `path`; raises what `post` raises."""
        return self._ask("GET", path, None)

    def post(self, path: str, fields: dict[str, Any]) -> Any:
        """The JSON that `fields` are answered with.

        Raises RefusedError for a status other than 200, BackendError for a server that is down or slow, InputError for
        an answer that is no JSON or too long.
        """
        return self._ask("POST", path, json.dumps(fields).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        self.requests += 1
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        try:
            response = self._pool.request(
                method, self.url + path, body=body, headers=headers, preload_content=False, decode_content=True
            )
            content = self._read(response)
        except HTTPError as error:
            raise self._unreachable(error) from None
        if len(content) > MOST_BYTES:
            raise InputError(f"{self.url}{path}: answers with more than {MOST_BYTES:,} bytes; is it the right server?")
        if response.status != 200:
            raise RefusedError(response.status, _words(content))
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self.url}{path}: answers with no JSON ({error}); is it the address of a model's server?"
            ) from None

    def _read(self, response: urllib3.BaseHTTPResponse) -> bytes:
        """The body, as far as it is read: a byte more than may be, or what came in time; raises ReadTimeoutError."""
        parts, length, until = list[bytes](), 0, time.monotonic() + self._timeout_s
        try:
            while length <= MOST_BYTES and (part := response.read1(1 << 20)):
                parts.append(part)
                length += len(part)
                if time.monotonic() > until:
                    raise ReadTimeoutError(self._pool, self.url, "the body comes too slowly")  # type: ignore[arg-type]
        finally:
            response.close() if length > MOST_BYTES else response.release_conn()
        return b"".join(parts)

    def _unreachable(self, error: HTTPError) -> BackendError:
        cause: BaseException | None = error.reason if isinstance(error, MaxRetryError) else error
        if isinstance(cause, ReadTimeoutError):
            return BackendError(
                f"{self.url}: did not answer within {self._timeout_s:g} seconds; give it longer with --timeout, or ask "
                f"less with {self._less}"
            )
        if isinstance(cause, NewConnectionError | ConnectTimeoutError):
            return BackendError(
                f"{self.url}: no server answers there; start it, or give its address with {self.option}"
            )
        return BackendError(f"{self.url}: the connection broke off ({type(cause).__name__}); see the server's log")


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
    return words if len(words) <= MOST_QUOTED else f"{words[:MOST_QUOTED]}…"
