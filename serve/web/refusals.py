"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}` and a status.

The official client makes its exceptions of the status alone (400 BadRequestError, 404 NotFoundError …), asks again by
itself after 429 and 5xx, and waits as long as `Retry-After` says.
"""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ...core.files import plain_text

#: Seconds after which a client that was told to come back may.
RETRY_AFTER = "1"
#: The most characters of a message: some repeat what was sent.
LONGEST = 500


#: Errors that are looked at, of a body that may have some for each of its bytes.
MOST_ERRORS = 100
#: pydantic's names for the types of a field that may have several.
BRANCHES = ("str", "list", "int", "float", "bool", "dict")


class Fault(BaseModel):
    """A fault, and the field it is in."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is none."""

    error: Fault


class Refusal(HTTPException):
    """A request ends here, with this status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        """`param`: the field at fault; `code`: a word that programs may know."""
        super().__init__(status, message)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON that the client is sent."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        if self.status_code == 429:
            kind = "rate_limit_error"
        message = self.detail if len(self.detail) <= LONGEST else f"{self.detail[:LONGEST]}…"
        param = self.param and self.param[:LONGEST]
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {"Retry-After": RETRY_AFTER} if self.status_code in (429, 503) else {}
        if self.status_code == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        return JSONResponse(self.body(), self.status_code, headers)


def of_fields(errors: Sequence[Any]) -> Refusal:
    """The refusal of a body with invalid fields; `errors` are pydantic's.

    The first invalid field is named, as deep as it lies: of a field with several types pydantic tells each type's
    faults, and those furthest in are of the type that was meant. Where several types are as near, the fault for each.
    """
    errors, first = errors[:MOST_ERRORS], _param(errors[0]) or ""
    within = [error for error in errors if re.match(rf"{re.escape(first)}(?:$|[.[])", _param(error) or "")]
    deepest = max(within, key=_depth)
    name = _param(deepest)
    faults = [error for error in within if _param(error) == name]
    if any(error["type"] == "extra_forbidden" for error in faults):
        return Refusal(
            400,
            f"{name}: is no field that this server knows; leave it out (docs/serve.md lists those it takes)",
            name,
        )
    texts = " or ".join(dict.fromkeys(map(plain_text, faults[:4])))
    return Refusal(400, f"{name or 'the body'} {texts}", name)


def _depth(error: Any) -> int:
    return len(re.findall(r"[.[]", _param(error) or ""))


def _param(error: Any) -> str | None:
    """The name of the field at fault, such as `messages[0].content`.

    pydantic writes the branches of a union between names (`str`, `list[TextPart]`); these are left out. An unknown
    field may be called anything.
    """
    name = ""
    where = error["loc"][1:]
    unknown = len(where) - 1 if error["type"] == "extra_forbidden" else None
    for index, part in enumerate(where):
        if isinstance(part, int):
            name += f"[{part}]"
        elif index == unknown or (part.isidentifier() and part not in BRANCHES):
            name += f".{part}" if name else part
    return name or None
