"""A hub on this machine: the part of the Hugging Face hub's HTTP interface that uploads use.

It takes every file within the commit, as the hub takes small ones; large ones go by a protocol of storage (Xet), which
is huggingface_hub's own matter.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from tests.stand_in.loopback import answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class UploadHub:
    """Takes what is uploaded by `token` into `files`; `refuses`: the status that it answers instead."""

    token: str
    address: str = ""
    refuses: int | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes, authorization: str | None) -> tuple[int, bytes]:
        """Status and body for a request."""
        self.asked.append(f"{method} {path}")
        if authorization != f"Bearer {self.token}":
            return 401, json.dumps({"error": f"invalid credentials: {authorization}"}).encode()
        if self.refuses is not None:
            return self.refuses, json.dumps({"error": f"refused, {authorization}"}).encode()
        return 200, json.dumps(self._made(path, body)).encode()

    def _made(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.address}/owner/name", "name": "owner/name", "id": "owner/name"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            for line in body.decode().splitlines():
                self._commit(json.loads(line))
            return {"commitUrl": f"{self.address}/owner/name/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
        return {"errors": [], "warnings": []}

    def _commit(self, entry: dict[str, Any]) -> None:
        value = entry["value"]
        if entry["key"] == "file":
            self.files[value["path"]] = base64.b64decode(value["content"])


@contextmanager
def upload_hub(token: str) -> Iterator[UploadHub]:
    """A running hub that takes uploads by this token."""

    def answer(method: str, path: str, body: bytes, headers: Message) -> tuple[int, dict[str, str], bytes]:
        status, content = served.answer(method, path, body, headers.get("Authorization"))
        return status, {}, content

    with answering(answer) as address:
        served = UploadHub(token, address)
        yield served
