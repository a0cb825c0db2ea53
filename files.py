"""How fp8q writes and reads files: under a temporary name and then renamed, JSON validated on reading, the disk's
refusals in one line.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

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


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into an InputError that names the directory and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None) or next(map(int, re.findall(r"\(os error (\d+)\)", str(error))), None)
        remedies = {
            errno.ENOSPC: "no space left on the disk; free some or name another directory",
            errno.EDQUOT: "the disk quota is used up; free some space or name another directory",
            errno.EACCES: "permission denied; name a directory you may write to",
            errno.EROFS: "the file system is read-only; name a directory you may write to",
        }
        if number not in remedies:
            raise
        raise InputError(f"{getattr(error, 'filename', None) or where}: {remedies[number]}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write a file or directory at; rename it over `path` when the block ends
    well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}{PARTIAL}"
    remove(partial)
    try:
        yield partial
        _readable(partial)
        if partial.is_file():
            with open(partial, "rb+") as handle:
                os.fsync(handle.fileno())
        elif path.is_dir():
            remove(path)
        partial.rename(path)
    finally:
        remove(partial)


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


def share(source: Path, target: Path) -> None:
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


def regular_file(path: Path) -> int:
    """The size of a file in bytes, links followed, before any of it is read.

    Raises InputError for one that is not there, may not be read, or is a directory, pipe, socket or device.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        what = "is a link to a file that is not there" if path.is_symlink() else "there is no such file"
        raise InputError(f"{path}: {what}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    for is_one, kind in NO_FILES:
        if is_one(found.st_mode):
            raise InputError(f"{path}: is a {kind}; name a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read ({os.strerror(errno.EACCES)})")
    return found.st_size


def write_document(path: Path, document: BaseModel) -> None:
    """Write a pydantic model as indented JSON, atomically."""
    with replacing(path) as partial:
        partial.write_text(
            document.model_dump_json(by_alias=True, indent=1, exclude_none=True) + "\n", encoding="utf-8"
        )


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
