"""A reporter that keeps its notes, and a hub on this machine: the part of the Hugging Face hub's HTTP interface that
downloads use.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

import pytest

from fp8q.calibrate.model.source import Source, open_source
from fp8q.core.reporter import SILENT, Standing
from tests.stand_in.loopback import answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Notebook:
    """A reporter that keeps its notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        return SILENT.track(description, total, unit, standing)


@pytest.fixture(scope="module")
def demo(demo_checkpoint: Path) -> Source:
    """The demo."""
    return open_source(str(demo_checkpoint))


@pytest.fixture
def report() -> Notebook:
    """A fresh one."""
    return Notebook()


@dataclass
class Hub:
    """`add` a repository, and the clients of this process find it; those in `gated` want a login; `asked` holds the
    requests it had.
    """

    address: str
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes]) -> None:
        """Serve `files` as the repository `name`; data sets are called `datasets/owner/name`."""
        self.repositories[name] = files

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request."""
        kind, _, rest = path.removeprefix("/api/").partition("/")
        api = path.startswith("/api/")
        for name, files in self.repositories.items():
            prefix = "datasets" if name.startswith("datasets/") else "models"
            bare = name.removeprefix("datasets/")
            if name in self.gated and bare in path:
                return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
            if api and kind == prefix and rest.startswith(bare):
                return self._api(files, bare, rest.removeprefix(bare), body)
            if path.startswith(f"/{name}/resolve/"):
                return self._file(files, path.removeprefix(f"/{name}/resolve/").partition("/")[2])
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _api(self, files: dict[str, bytes], name: str, what: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        if what.startswith("/revision/") and what not in ("/revision/main", f"/revision/{COMMIT}"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if what.startswith("/tree/"):
            under = what.removeprefix("/tree/").partition("/")[2]
            if under and not any(path.startswith(f"{under}/") for path in files):
                return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
            return 200, {}, json.dumps([entry for entry in entries if str(entry["path"]).startswith(under)]).encode()
        if what.startswith("/paths-info/"):
            wanted = json.loads(body)["paths"]
            return 200, {}, json.dumps([entry for entry in entries if entry["path"] in wanted]).encode()
        info = {
            "id": name,
            "sha": COMMIT,
            "siblings": [{"rfilename": path} for path in files],
            "tags": [],
            "private": False,
            "gated": False,
            "downloads": 0,
            "likes": 0,
        }
        return 200, {}, json.dumps(info).encode()

    def _file(self, files: dict[str, bytes], path: str) -> tuple[int, dict[str, str], bytes]:
        if path not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        return (
            200,
            {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(files[path]).hexdigest()}"', "Accept-Ranges": "bytes"},
            files[path],
        )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running hub that this process's clients use, with an empty cache of its own."""

    def answer(method: str, path: str, body: bytes, asked: Message) -> tuple[int, dict[str, str], bytes]:
        served.asked.append(f"{method} {path}")
        status, headers, content = served.answer(path, body)
        if status == 200 and (wanted := asked.get("Range")):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = int(last) + 1 if last else len(content)
            status, headers = 206, headers | {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
            content = content[int(first) : end]
        return status, headers, content

    with answering(answer) as address:
        served = Hub(address)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            served.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", served.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield served
