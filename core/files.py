"""Write and read files: atomic replacement, locks, validated JSON, and errors of the disk in one line.

Refused fields of JSON are named in plain words, in the place of pydantic's own messages: each text completes "FIELD
..." and names the limit. A type of error that is not listed here has pydantic's message.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from .errors import InputError

#: pydantic's type of an error -> its text; `{...}` are entries of the error's context.
TEXTS: Mapping[str, str] = {
    "missing": "is missing",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "none_required": "must be null",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dataclass_type": "must be an object",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
}


#: The type of an error whose message is such a text: `PydanticCustomError(PLAIN, "must be …")`.
PLAIN = "plain"


def plain_text(error: Mapping[str, Any]) -> str:
    """Return the text of one of pydantic's errors (`ValidationError.errors()`)."""
    text = TEXTS.get(error["type"])
    if error["type"] == PLAIN:
        return str(error["msg"])
    if text is None:
        message = str(error["msg"])
        return f"is refused: {message[:1].lower()}{message[1:]}"
    context = dict(error.get("ctx", {}))
    if "expected" in context:  # in the words of JSON
        context["expected"] = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), context["expected"])
    return text.format(**{name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()})


#: The ending of the temporary name of a file or folder that is not complete.
PARTIAL = ".partial"
#: Linux's ioctl that makes one file share the blocks of another (linux/fs.h).
FICLONE = 0x40049409


class Strict(BaseModel):
    """A JSON object of the run directory: frozen, unknown keys refused.

    JSON has no infinity and no NaN: these are strings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


#: The version of a document, under the key `schema`, that has been the first since there is the document.
FirstSchema = Annotated[int, Field(alias="schema", ge=1, le=1)]

#: Things other than files that may be at a path; to read from one may never end.
NO_FILES = (
    (stat.S_ISDIR, "directory"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)

Document = TypeVar("Document", bound=BaseModel)


#: Errors of the operating system, each with its fault and remedy; other errors are not translated.
REFUSALS: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("is not there, or no longer", "restore it, and run the same command again"),
    errno.ENOSPC: ("no space left on the disk", "free some or name another directory"),
    errno.EDQUOT: ("the disk quota is used up", "free some space or name another directory"),
    errno.EACCES: ("permission denied", "name a place you have the right to, or give it to yourself"),
    errno.EPERM: ("not permitted", "name a place you have the right to, or give it to yourself"),
    errno.EROFS: ("the file system is read-only", "name a directory you may write to"),
    errno.EFBIG: ("the file grew larger than it may", "raise the limit (`ulimit -f`), or name another directory"),
    errno.EIO: ("the disk failed (input/output error)", "see the system's log, and name another directory"),
    errno.ENAMETOOLONG: ("the name is longer than the file system allows", "name a shorter one"),
    errno.ELOOP: ("the links there lead in a circle", "mend them, or name another"),
    errno.ENOTDIR: ("a part of the path is a file, not a directory", "name another"),
    errno.EEXIST: ("stands where a directory belongs", "remove it, or name another"),
    errno.EISDIR: ("is a directory where a file belongs", "remove it, or name another"),
    errno.EMFILE: ("too many files are open", "raise the limit (`ulimit -n`)"),
    errno.ENFILE: ("too many files are open on this machine", "end what holds them"),
}


#: In the messages of torch's writer, which loses the error of the operating system that stopped it.
TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
#: The message of NumPy's writer, which loses it too.
NUMPY_WRITER = re.compile(r"^\d+ requested and \d+ written")
ROOM = "free space there, or name another directory"


def refusal(error: OSError | SafetensorError | RuntimeError, where: Path | None = None) -> InputError | None:
    """Translate an error of the operating system into an InputError that names the file (or else `where`) and the
    remedy.

    None for an error that is not in `REFUSALS`.
    """
    if isinstance(error, RuntimeError):
        if not any(part in str(error) for part in TORCH_WRITER):
            return None
        return InputError(where or "", "a file could not be written to its end", ROOM)
    if NUMPY_WRITER.search(str(error)):  # without a number of the system's
        return InputError(where or "", "a file could not be written to its end", ROOM)
    number = getattr(error, "errno", None) or next(map(int, re.findall(r"\(os error (\d+)\)", str(error))), None)
    if number not in REFUSALS:
        return None
    name = getattr(error, "filename", None)
    place = os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else where
    return InputError(place or "", *REFUSALS[number])


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Raise errors of the operating system in this block as InputError that names the file, or else `where`, and the
    remedy; those of torch's writer too.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if (translated := refusal(error, where)) is None:
            raise
        raise translated from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file or directory at; rename it to `path` when the block ends without an error.

    An old directory is renamed first and removed last, so `path` is missing only between the two renames. Raises
    InputError, naming `path`, for errors of the disk.
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
    """Give files the permissions that the umask allows.

    safetensors writes them for the owner alone, and a server often runs as another user.
    """
    mask = os.umask(0)
    os.umask(mask)
    for file in [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]:
        file.chmod(0o666 & ~mask)


def remove(path: Path) -> None:
    """Remove a file or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clone_file(source: Path, target: Path) -> None:
    """Copy a file; where the file system can (Btrfs, XFS) the copy shares its blocks with the original and takes no
    room.

    A hard link would take no space anywhere, but ONNX's checker refuses external data with several links, as an attack.
    """
    with open(source, "rb") as read, open(target, "wb") as written:
        try:
            fcntl.ioctl(written.fileno(), FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, written, 16 << 20)


#: The locks that this thread holds until `keeping_locks` ends; None outside such a block.
_held_locks: ContextVar[dict[Path, TextIO] | None] = ContextVar("kept locks", default=None)


@contextmanager
def keeping_locks() -> Iterator[None]:
    """Hold every lock that is taken in this block until it ends, so no other process can enter between two stages."""
    if _held_locks.get() is not None:
        yield
        return
    locks: dict[Path, TextIO] = {}
    token = _held_locks.set(locks)
    try:
        yield
    finally:
        _held_locks.reset(token)
        for handle in locks.values():
            handle.close()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock on `file` against other processes, during the block or until `keeping_locks` ends.

    The file is created. On a file system without locks nothing is locked. Raises BlockingIOError where another process
    holds the lock, InputError where the file is a link: opening it would create or empty its target.
    """
    if file.is_symlink():
        raise InputError(file, "is a link, and a lock is a file of its own", "remove it")
    held_locks = _held_locks.get()
    key = file.resolve()
    if (
        held_locks is not None and key in held_locks and os.fstat(held_locks[key].fileno()).st_nlink
    ):  # else it was removed with its folder
        yield
        return
    handle = _open_lock(file)
    while not _is_at(handle, file):  # who held it has removed it since, and nobody else would meet this lock
        handle.close()
        handle = _open_lock(file)
    if held_locks is not None:
        if key in held_locks:  # of a file that was removed since
            held_locks[key].close()
        held_locks[key] = handle
        yield
        return
    with handle:
        yield


def _open_lock(file: Path) -> TextIO:
    """Open the file of a lock, and take it; raises BlockingIOError where another process holds it."""
    handle = open(file, "w", opener=not_followed)  # noqa: SIM115  # who keeps it closes it
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    except OSError:
        pass  # network file systems may have none
    return handle


def _is_at(handle: TextIO, file: Path) -> bool:
    """Tell whether an open file is the one that has the name `file` now."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), file.lstat())
    except FileNotFoundError:
        return False


def not_followed(name: str, flags: int) -> int:
    """Open a file without following links, and without waiting for the other end of a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def created(name: str, flags: int) -> int:
    """Open a file that is not there; raises FileExistsError for whatever is, a link included."""
    return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def make_directory(path: Path) -> list[Path]:
    """Make a directory with those that lead to it; return the ones that were not there, the innermost first."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
    except OSError:
        remove_empty(filter(Path.is_dir, missing))
        raise
    return missing


def copy_files(files: Mapping[str, Path], directory: Path) -> None:
    """Copy `files` under their names in `directory`, with the folders that these lie in."""
    for name, file in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, directory / name)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove `folders`, the innermost first, up to one that holds something, or is another's."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def is_own_file(path: Path) -> bool:
    """Tell whether a regular file is at `path`, and no link to one."""
    return path.is_file() and not path.is_symlink()


def regular_file(path: Path, remedy: str = "") -> int:
    """The size of a file in bytes, links followed; nothing of it is read.

    Raises InputError, which ends with `remedy`, for a path that does not exist, may not be read, or is a directory,
    pipe, socket or device.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        what = "is a link to a file that is not there" if path.is_symlink() else "there is no such file"
        raise InputError(path, what, remedy) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error, remedy) from None
    for is_one, kind in NO_FILES:
        if is_one(status.st_mode):
            raise InputError(path, f"is a {kind}", remedy or "name a file")
    if not os.access(path, os.R_OK):
        raise unreadable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)), remedy)
    return status.st_size


def unreadable(path: Path, error: OSError | ValueError, remedy: str = "") -> InputError:
    """Make the error for a file that cannot be read."""
    why = getattr(error, "strerror", None) or error
    return InputError(path, f"cannot be read ({why})", remedy and f"mend that, or {remedy}")


def write_document(path: Path, document: BaseModel) -> None:
    """Write a pydantic model as indented JSON, atomically; raise InputError for a name that is not valid UTF-8."""
    try:
        text = document.model_dump_json(by_alias=True, indent=1, exclude_none=True) + "\n"
    except ValueError:  # pydantic_core.PydanticSerializationError
        raise InputError(
            path, "would hold the name of a file or directory that is no text in UTF-8", "rename what is called so"
        ) from None
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def json_text(content: object) -> bytes:
    """JSON in UTF-8, indented, for what came out of a source's JSON: a lone surrogate, which UTF-8 lacks, is escaped as
    it was there.
    """
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def read_document(path: Path, kind: type[Document]) -> Document:
    """Read and validate one of fp8q's JSON files.

    Raises InputError that names the file and its first wrong field, with the fault.
    """
    regular_file(path)
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise InputError(
            path,
            f"does not read as fp8q's {path.name}: {where} {plain_text(first)}",
            "restore it, or calibrate again into a new directory",
        ) from None


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; raises InputError for what is no regular file."""
    regular_file(path)
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


#: The exceptions that readers of safetensors, npz, JSON, ONNX and checkpoints raise for a malformed file.
DAMAGE = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError, RecursionError,
    RuntimeError, SafetensorError, StopIteration, TypeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


#: The remedy for a damaged file of a run that no later stage writes again.
RESTORE = "restore it, or calibrate again into a new directory"


@contextmanager
def reading(path: Path, what: str, remedy: str = RESTORE) -> Iterator[None]:
    """Raise any error of a reader of `path`, which should contain `what`, as InputError that names the file.

    For files of a run: although their SHA-256 is in the record, whoever wrote the file could write the record too.
    """
    try:
        yield
    except InputError:
        raise
    except DAMAGE as error:
        if type(error).__name__ == "OutOfMemoryError":  # of a GPU, which says nothing of the file
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(path, f"does not read as {what} ({reason})", remedy) from None
