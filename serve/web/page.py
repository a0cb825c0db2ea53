"""The page at `/`: one file, which may load nothing and talk to its own server alone.

Its script and style are allowed by their hashes (Content Security Policy 3, section 8.4), so that text which a model
writes could do nothing even if it became part of the page, which it does not: it is inserted as text.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.responses import HTMLResponse


def page_response() -> HTMLResponse:
    """The page, with the headers that hold it to what it is."""
    text = files(__package__).joinpath("templates/page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": policy(text), **HEADERS})


HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


def policy(text: str) -> str:
    """The policy of a page: its one script, its one style, its own server, and nothing else."""
    allowed = {kind: _hash(text, kind) for kind in ("script", "style")}
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str, kind: str) -> str:
    (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
