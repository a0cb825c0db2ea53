"""Copies that take no room where the file system can share blocks (whether this one can is not known here: both ways
are taken), and files that are none.
"""

import fcntl
import json
import os
import re
import shutil
import socket
from pathlib import Path
from zipfile import BadZipFile

import pytest
from safetensors import SafetensorError

from fp8q.core.errors import InputError
from fp8q.core.files import FICLONE, Strict, clone_file, disk_errors, json_text, read_document, reading, regular_file

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


def test_a_copy_is_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    clone_file(source, tmp_path / "copy")
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
    clone_file(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert asked == [FICLONE]


def test_where_no_blocks_are_shared_the_bytes_are_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "ioctl", unsupported)
    clone_file(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT


def test_a_file_has_a_size_through_a_link_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    assert regular_file(source) == regular_file(tmp_path / "link") == len(CONTENT)


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "to_a_pipe").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    for name, what in {
        "pipe": "is a pipe; name a file",
        "to_a_pipe": "is a pipe; name a file",
        "directory": "is a directory; name a file",
        "socket": "is a socket; name a file",
        "dangling": "is a link to a file that is not there",
        "circle": "cannot be read (Too many levels of symbolic links)",
        "nothing": "there is no such file",
        "n" * 256: "cannot be read (File name too long)",
        "a\0b": "cannot be read (embedded null byte)",
    }.items():
        with pytest.raises(InputError, match=re.escape(f"{tmp_path / name}: {what}") + "$"):
            regular_file(tmp_path / name)
    with pytest.raises(InputError, match=r"^/dev/zero: is a device; name a file$"):
        regular_file(Path("/dev/zero"))


def test_a_document_is_read_from_a_file_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(InputError, match=rf"^{re.escape(str(tmp_path / 'run.json'))}: is a pipe; name a file$"):
        read_document(tmp_path / "run.json", Strict)
    with pytest.raises(InputError, match=rf"^{re.escape(str(tmp_path / 'gone.json'))}: there is no such file$"):
        read_document(tmp_path / "gone.json", Strict)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("bits"), "'bits'"),
        (ValueError("not\n  a number"), "not a number"),
        (MemoryError(), "MemoryError"),
        (SafetensorError("header too large"), "header too large"),
        (BadZipFile("x" * 300), "x" * 200),
    ],
)
def test_what_a_reader_raises_is_said_of_its_file_in_one_line(error: Exception, told: str) -> None:
    with pytest.raises(InputError) as refused, reading(Path("run/tokens.npz"), "losses", "run `fp8q validate` again"):
        raise error
    assert str(refused.value) == f"run/tokens.npz: does not read as losses ({told}); run `fp8q validate` again"


def test_what_fp8q_refuses_while_it_reads_is_said_as_it_is() -> None:
    with pytest.raises(InputError, match="^no$"), reading(Path("run"), "anything"):
        raise InputError("", "no")


def test_a_disk_that_is_full_while_torch_writes_is_named(tmp_path: Path) -> None:
    """torch's writer loses the error of the operating system, and raises a RuntimeError of its own."""
    import torch

    with pytest.raises(InputError) as refused, disk_errors(tmp_path):
        torch.save({"a": torch.zeros(100_000)}, "/dev/full")
    assert str(refused.value) == (
        f"{tmp_path}: a file could not be written to its end; free space there, or name another directory"
    )
    with pytest.raises(RuntimeError, match=r"^out of memory$"), disk_errors(tmp_path):
        raise RuntimeError("out of memory")


def test_a_lone_surrogate_round_trips_through_json() -> None:
    assert json_text({"é": "\ud800"}) == '{\n  "é": "\\ud800"\n}\n'.encode()
    assert json.loads(json_text({"é": "\ud800"})) == {"é": "\ud800"}
