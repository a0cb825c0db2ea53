"""Copies that take no room where the file system can share blocks.

Whether this one can is not known here: both ways are taken.
"""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from fp8q.files import FICLONE, share

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


def test_a_copy_is_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    share(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert source.stat().st_nlink == 1
    assert not (tmp_path / "copy").is_symlink()


def test_blocks_are_shared_where_the_file_system_can(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def clone(target: int, request: int, origin: int) -> None:
        asked.append(request)
        os.sendfile(target, origin, 0, len(CONTENT))

    def refused(*_: object) -> None:
        raise AssertionError("copied byte by byte, though the file system shares blocks")

    monkeypatch.setattr(fcntl, "ioctl", clone)
    monkeypatch.setattr(shutil, "copyfileobj", refused)
    share(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert asked == [FICLONE]


def test_where_no_blocks_are_shared_the_bytes_are_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "ioctl", unsupported)
    share(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
