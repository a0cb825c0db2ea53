"""A server on loopback whose answers a test gives: what stand-ins for hubs have in common."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

#: Method, path, body and headers of a request -> status, headers and body of the answer, which is JSON.
Answer = Callable[[str, str, bytes, Message], tuple[int, Mapping[str, str], bytes]]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Answer requests at the address that is yielded, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = answer(self.command, unquote(urlsplit(self.path).path), body, self.headers)
            self.send_response(status)
            sizes = {"Content-Length": str(len(content)), "Content-Type": "application/json"}
            for key, value in {**headers, **sizes}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = handle_any  # noqa: N815  # http.server's names

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
