"""Mutations of the file system: something else where a file or a folder is looked for."""

import os
import random
import shutil
import socket
from pathlib import Path

#: A file that is this large and takes no room, bytes.
SPARSE = 3 << 30


def mutate_place(draw: random.Random, path: Path) -> str:
    """Put something else at `path`, a file or a folder; what it is now."""
    kind = draw.choice(KINDS)
    if kind == "unreadable":
        path.chmod(0)
        return kind
    if kind == "a link to itself elsewhere":
        moved = path.with_name(path.name + ".moved")
        path.rename(moved)
        path.symlink_to(moved.name)
        return "a link to what it was"
    if kind == "read-only":
        path.chmod(0o500 if path.is_dir() else 0o400)
        return kind
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    put(kind, path)
    return kind


def put(kind: str, path: Path) -> None:
    """Make what `kind` says at `path`, where nothing is."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a folder with something in it":
        path.mkdir()
        (path / "something").write_text("x")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = Path.cwd()
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(path.parent)  # the name of a socket has at most 107 bytes
            try:
                made.bind(path.name)
            finally:
                os.chdir(here)
    elif kind == "a sparse file":
        with open(path, "wb") as handle:
            handle.truncate(SPARSE)
    elif kind == "empty":
        path.touch()
    elif kind in LINKS:
        path.symlink_to(LINKS[kind] or path.name)


LINKS = {
    "a dangling link": "nowhere",
    "a link to itself": "",
    "a link to /dev/zero": "/dev/zero",
    "a link to /dev/full": "/dev/full",
    "a link to /dev/null": "/dev/null",
    "a link to a terminal": "/dev/tty",
    "a link to the folder above": "..",
}
KINDS = (
    "missing", "missing", "unreadable", "unreadable", "read-only", "a link to itself elsewhere", "a folder", "a pipe",
    "a folder with something in it", "a socket", "a sparse file", "empty", *LINKS,
)  # fmt: skip
#: Names of a run that none can be made under, or that are one thing or another already.
PLACES = (
    "/dev/full", "/dev/null", "/dev/full/run", "texts/text.txt", "texts/text.txt/run", "n" * 300, "/proc/run",
    "a/" * 2100 + "run", "", ".", "tiny", "texts", "run\x1b[2J", "new/run", "run/", "ünï/😀", "loop", "dangling",
    "pipe", "locked/run", "~/run", "-", "--json",
)  # fmt: skip
