"""The three standard streams as they may be handed to a program: closed, full, cut off, in another encoding.

Results that cannot be delivered end the program quietly (`OutputClosedError`, exit code 1): whoever reads has gone, as
`head` does, or the disk is full, and the run itself is whole. Messages that cannot be delivered are lost, and the work
goes on. A character that the encoding lacks is written as its escape.
"""

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: The descriptors of standard input, output and error.
INPUT, OUTPUT, ERROR = range(3)


class OutputClosedError(Exception):
    """Nobody takes what is written to standard output."""


class Results(io.FileIO):
    """Standard output: a refusal is told from those of all other files."""

    def write(self, content: "ReadableBuffer") -> int:
        """Write some bytes; raises OutputClosedError where none is taken."""
        try:
            return super().write(content)
        except OSError as error:
            raise OutputClosedError(str(error)) from error


class Messages(io.FileIO):
    """Standard error: what it refuses is lost."""

    def write(self, content: "ReadableBuffer") -> int:
        """Write some bytes, or lose them."""
        with suppress(OSError):
            return super().write(content)
        return memoryview(content).nbytes


def settle_streams() -> None:
    """Let this process's standard streams be `Results` and `Messages`, and no file ever be opened in place of a closed
    one. The descriptor of standard output is that of standard error from here on, and results have one of their own.
    """
    for descriptor in (INPUT, OUTPUT, ERROR):
        try:
            os.fstat(descriptor)
        except OSError:  # closed; the lowest free one is this: to be read alone, so that writing says it is closed
            os.open(os.devnull, os.O_WRONLY if descriptor == ERROR else os.O_RDONLY)
    sys.stdin = sys.stdin or open(INPUT, closefd=False, encoding="utf-8")  # noqa: SIM115
    results = os.dup(OUTPUT)
    os.dup2(ERROR, OUTPUT)
    sys.stdout = _text(Results(results, "w", closefd=False), sys.stdout)
    sys.stderr = _text(Messages(ERROR, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: TextIO | None) -> TextIO:
    """A text stream over `raw`, in the encoding that Python chose for the one `before`."""
    encoding = before.encoding if before is not None else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True)


def flush() -> None:
    """Deliver what was written to standard output; raises OutputClosedError where nobody takes it."""
    sys.stdout.flush()


def give_up() -> None:
    """Let Python, which flushes again at its end, find nothing to complain of."""
    hole = os.open(os.devnull, os.O_WRONLY)
    os.dup2(hole, sys.stdout.fileno())
    os.close(hole)
