"""Read untrusted files: each is checked before it is opened and read within limits, and parser errors become one line.

A model directory or a text may come from anywhere. Opening a FIFO waits for ever, a device has no end, brackets in JSON
can be nested until the stack is used up, and every library that reads such a file fails in its own ways, some of which
(Rust's panics) are no `Exception`. Faults of files are found here for all of them.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import Fp8qError, InputError
from ...core.files import regular_file, unreadable

#: Bytes that a JSON file may have, and how deep its values may be nested. The largest of a published checkpoint, an
#: index of some 100,000 tensors, has 10 MB.
JSON_BYTES = 64 << 20
JSON_DEPTH = 64
#: The most characters of another library's message.
MESSAGE = 400
#: The remedy for a malformed file, which came from elsewhere.
AGAIN = "copy or download it again"
#: Bytes that are asked for beyond a file's size: all that is asked for is taken of memory at once.
SPARE = 1 << 20


def local_path(text: str | Path) -> Path:
    """The path of `text`; raises InputError for text that is no valid path."""
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle, a home of nobody, a NUL
        shown = str(text) if len(str(text)) <= 60 else f"{str(text)[:60]}…"
        raise InputError(
            f"{shown!r}",
            f"is no name that a file can have ({getattr(error, 'strerror', None) or error})",
            "give another",
        ) from None
    return path


def exists(path: Path) -> bool:
    """Tell whether anything is at `path`, a broken link included."""
    return os.path.lexists(path)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open the regular file at `path` and return its descriptor; raises InputError, naming it, where that fails."""
    regular_file(path, AGAIN)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        raise unreadable(path, error, AGAIN) from None


def read_bytes(path: Path, limit: int) -> bytes:
    """Read the file at `path`; raises InputError as `open_regular` does, and for more than `limit` bytes."""
    with open_regular(path) as handle, open(handle, "rb", closefd=False) as file:
        size = os.fstat(handle).st_size
        content = file.read(min(limit, size + SPARE) + 1) if size <= limit else b""
    if max(size, len(content)) > limit:
        raise InputError(
            path,
            f"has {max(size, len(content)):,} bytes, and {limit:,} are the most that are read of such a file",
            "it is damaged, or not to be trusted",
        )
    return content


def read_json(path: Path, limit: int = JSON_BYTES, finite: bool = True) -> Any:
    """Parse the JSON file at `path`, of at most `limit` bytes, nested at most `JSON_DEPTH` deep.

    Raises InputError, naming the file and the place, also for NaN and infinities, which JSON lacks and Python accepts.
    `finite` False skips this search, and with it the check of the depth.
    """
    try:
        value = json.loads(read_bytes(path, limit).decode())
    except UnicodeDecodeError:
        raise InputError(path, "does not parse: it is not UTF-8", "copy or download it again") from None
    except json.JSONDecodeError as error:
        raise InputError(
            path,
            f"does not parse: {error.msg} at line {error.lineno}, column {error.colno}",
            "copy or download it again",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise InputError(path, f"does not parse: {error_text(error)}", "copy or download it again") from None
    for place, item in walk(value) if finite else ():
        if place.count("\0") >= JSON_DEPTH:
            raise InputError(path, f"is nested more than {JSON_DEPTH} deep", "copy or download it again")
        if isinstance(item, float) and not math.isfinite(item):
            raise InputError(
                path, f"{place.replace(chr(0), '.')} is {item}, which is no finite number", "copy or download it again"
            )
    return value


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value inside a JSON value with its path of keys and indices, joined by NUL.

    It does not recurse, and goes at most one level beyond `JSON_DEPTH`.
    """
    waiting = [("", 0, value)]
    while waiting:
        place, depth, item = waiting.pop()
        if depth:
            yield place, item
        inside = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        if depth <= JSON_DEPTH + 1:
            waiting += [(f"{place}\0{key}" if depth else str(key), depth + 1, held) for key, held in inside]


def error_text(error: BaseException) -> str:
    """The text of an exception on one line, without control characters, cut to a readable length."""
    text = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", str(error)).split()) or type(error).__name__
    if len(text) <= MESSAGE:
        return text
    return f"{text[:MESSAGE]}…"


@contextmanager
def foreign(blame: Callable[[BaseException], Exception], *passed: type[BaseException]) -> Iterator[None]:
    """Turn any exception of this block into the one that `blame` makes of it, for foreign code on untrusted files,
    where no list of exceptions is complete. Rust's panics, which are no `Exception`, are included.

    fp8q's own errors, those in `passed`, and MemoryError are passed through.
    """
    try:
        yield
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"  # beside it an interrupt, or the end of the program
        if isinstance(error, (Fp8qError, MemoryError, *passed)) or not (isinstance(error, Exception) or panicked):
            raise
        raise blame(error) from None
