"""Write and read files: under a temporary name and then renamed, JSON validated on reading, the disk's refusals in one
line.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from .errors import InputError

#: How the temporary name ends that a file or folder has until it is whole.
PARTIAL = ".partial"
#: Linux's request to share the blocks of one file with another (linux/fs.h).
FICLONE = 0x40049409


class Strict(BaseModel):
    """A JSON object of the run directory: frozen, unknown keys refused; infinity and NaN, which JSON lacks, are
    strings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


#: What may bear a file's name and must not be opened for one: reading it may never end.
NO_FILES = (
    (stat.S_ISDIR, "directory"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)

Document = TypeVar("Document", bound=BaseModel)


#: What the operating system refuses, and what helps; of any other refusal fp8q knows neither.
REFUSALS = {
    errno.ENOENT: "is not there, or no longer; restore it, and run the same command again",
    errno.ENOSPC: "no space left on the disk; free some or name another directory",
    errno.EDQUOT: "the disk quota is used up; free some space or name another directory",
    errno.EACCES: "permission denied; name a place you have the right to, or give it to yourself",
    errno.EPERM: "not permitted; name a place you have the right to, or give it to yourself",
    errno.EROFS: "the file system is read-only; name a directory you may write to",
    errno.EFBIG: "the file grew larger than it may; raise the limit (`ulimit -f`), or name another directory",
    errno.EIO: "the disk failed (input/output error); see the system's log, and name another directory",
    errno.ENAMETOOLONG: "the name is longer than the file system allows; name a shorter one",
    errno.ELOOP: "the links there lead in a circle; mend them, or name another",
    errno.ENOTDIR: "a part of the path is a file, not a directory; name another",
    errno.EEXIST: "stands where a directory belongs; remove it, or name another",
    errno.EISDIR: "is a directory where a file belongs; remove it, or name another",
    errno.EMFILE: "too many files are open; raise the limit (`ulimit -n`)",
    errno.ENFILE: "too many files are open on this machine; end what holds them",
}


def refusal(error: OSError | SafetensorError, where: Path | None = None) -> InputError | None:
    """Turn a refusal of the operating system into an error that names the file (or else `where`) and the remedy; None
    for what is no refusal of its.
    """
    number = getattr(error, "errno", None) or next(map(int, re.findall(r"\(os error (\d+)\)", str(error))), None)
    if number not in REFUSALS:
        return None
    name = getattr(error, "filename", None)
    place = os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else where
    return InputError(f"{place}: {REFUSALS[number]}" if place else REFUSALS[number])


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn the operating system's refusals into an InputError that names the file, or else `where`, and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if (told := refusal(error, where)) is None:
            raise
        raise told from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write a file or directory at; rename it over `path` when the block ends
    well. Raises InputError, naming `path`, for what the disk refuses.

    A directory that is there is renamed first and removed last: between the two renames alone is there none.
    """
    partial, old = (path.parent / f".{path.name}{part}{PARTIAL}" for part in ("", ".old"))
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        remove(old)
        try:
            yield partial
            _readable(partial)
            if partial.is_file():
                with open(partial, "rb+") as handle:
                    os.fsync(handle.fileno())
            elif path.is_dir():
                path.rename(old)
            partial.rename(path)
            remove(old)
        finally:
            remove(partial)
            if old.exists() and not path.exists():
                old.rename(path)


def _readable(path: Path) -> None:
    """Give files the permissions that the umask allows: safetensors writes them for the owner alone, and a server is
    often another user.
    """
    mask = os.umask(0)
    os.umask(mask)
    for file in [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]:
        file.chmod(0o666 & ~mask)


def remove(path: Path) -> None:
    """Remove a file, a folder with what is in it, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clone_file(source: Path, target: Path) -> None:
    """Copy a file; where the file system can (Btrfs, XFS) the copy shares its blocks with the original and takes no
    room.

    Not a hard link, which takes none anywhere: ONNX's own checker refuses external data with several links, as an
    attack.
    """
    with open(source, "rb") as read, open(target, "wb") as written:
        try:
            fcntl.ioctl(written.fileno(), FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, written, 16 << 20)


#: The locks that this thread keeps until `keeping_locks` ends; none where it does not keep them.
_kept: ContextVar[dict[Path, TextIO] | None] = ContextVar("kept locks", default=None)


@contextmanager
def keeping_locks() -> Iterator[None]:
    """Keep every lock that the block takes until it ends: between two stages no other process comes in."""
    if _kept.get() is not None:
        yield
        return
    locks: dict[Path, TextIO] = {}
    token = _kept.set(locks)
    try:
        yield
    finally:
        _kept.reset(token)
        for handle in locks.values():
            handle.close()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock on `file`, which is made, against other processes, for the block or as long as `keeping_locks`
    does; on a file system without locks, against none.

    Raises BlockingIOError where another holds it, InputError where it is a link: to open that would make, or empty,
    what it leads to.
    """
    if file.is_symlink():
        raise InputError(f"{file}: is a link, and a lock is a file of its own; remove it")
    kept, key = _kept.get(), file.resolve()
    if kept is not None and key in kept and os.fstat(kept[key].fileno()).st_nlink:  # else it went with its folder
        yield
        return
    handle = open(file, "w", opener=_not_followed)  # noqa: SIM115  # who keeps it closes it
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    except OSError:
        pass  # network file systems may have none
    if kept is not None:
        kept[key] = handle
        yield
        return
    with handle:
        yield


def _not_followed(name: str, flags: int) -> int:
    """Open a file itself, and nothing that a link leads to; a pipe is not waited for."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def regular_file(path: Path, remedy: str = "") -> int:
    """The size of a file in bytes, links followed, before any of it is read.

    Raises InputError, which ends with `remedy`, for one that is not there, may not be read, or is a directory, pipe,
    socket or device.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        what = "is a link to a file that is not there" if path.is_symlink() else "there is no such file"
        raise InputError(f"{path}: {what}{remedy and f'; {remedy}'}") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error, remedy) from None
    for is_one, kind in NO_FILES:
        if is_one(found.st_mode):
            raise InputError(f"{path}: is a {kind}; {remedy or 'name a file'}")
    if not os.access(path, os.R_OK):
        raise unreadable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)), remedy)
    return found.st_size


def unreadable(path: Path, error: OSError | ValueError, remedy: str = "") -> InputError:
    """Make the error for a file that the system does not give."""
    why = getattr(error, "strerror", None) or error
    return InputError(f"{path}: cannot be read ({why}){remedy and f'; mend that, or {remedy}'}")


def write_document(path: Path, document: BaseModel) -> None:
    """Write a pydantic model as indented JSON, atomically. Raises InputError for a name that is no text in UTF-8."""
    try:
        text = document.model_dump_json(by_alias=True, indent=1, exclude_none=True) + "\n"
    except ValueError:  # pydantic_core.PydanticSerializationError
        raise InputError(
            f"{path}: would hold the name of a file or directory that is no text in UTF-8; rename what is called so"
        ) from None
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_document(path: Path, kind: type[Document]) -> Document:
    """Read and validate one of fp8q's JSON files.

    Raises InputError naming the file, the first field that is wrong and what it holds.
    """
    regular_file(path)
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise InputError(
            f"{path}: does not read as fp8q's {path.name}: {where}: {first['msg']}; restore it, or calibrate again "
            "into a new directory"
        ) from None


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


#: What readers of safetensors, npz, JSON and ONNX raise for a file that is not what it should be.
DAMAGE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RecursionError, RuntimeError,
    SafetensorError, TypeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@contextmanager
def reading(
    path: Path, what: str, remedy: str = "restore it, or calibrate again into a new directory"
) -> Iterator[None]:
    """Turn whatever a reader raises for `path`, which should hold `what`, into an InputError that names it.

    For files of a run: their SHA-256 is in the record, and a record can be written by whoever writes the file.
    """
    try:
        yield
    except InputError:
        raise
    except DAMAGE as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path}: does not read as {what} ({told}); {remedy}") from None
