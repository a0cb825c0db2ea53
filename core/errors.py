"""Errors, classified by who can fix the cause; each class has the exit code of the command line.

An error is a value of three parts: the subject, its fault (the rule or the value), and the remedy. Rendered they are
one line, `subject: fault; remedy`, which the command line prints unwrapped, and nothing else. Ctrl-C and SIGTERM raise
none of these, and have exit codes of their own (`cli.signals`).
"""

import copyreg
from pathlib import Path
from typing import Any

from .commands import in_run, name_in_commands

#: The exit codes after Ctrl-C and SIGTERM: 128 plus the signal's number, as in shells.
INTERRUPTED = 130
TERMINATED = 143


class Fp8qError(Exception):
    """A failure that fp8q foresees (exit code 1).

    `subject`: the file, option, tensor or module at fault, or "" if the fault says it. `fault`: what is wrong with it,
    as a clause that follows the subject. `remedy`: what to do about it, or "".
    """

    exit_code = 1

    def __init__(self, subject: str | Path, fault: str, remedy: str = ""):
        """Store the parts."""
        super().__init__(subject, fault, remedy)
        self.subject = str(subject)
        self.fault = fault
        self.remedy = remedy

    def __str__(self) -> str:
        """Render the error as one line."""
        subject = f"{self.subject}: " if self.subject else ""
        if self.remedy:
            return f"{subject}{self.fault}; {self.remedy}"
        return f"{subject}{self.fault}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, since subclasses are made of other arguments."""
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]

    def fill_run(self, root: Path) -> None:
        """Put the path of the run at `root` in the place of RUN in the commands that the error names."""
        self.fault, self.remedy = in_run(self.fault, root), in_run(self.remedy, root)


class InputError(Fp8qError):
    """The arguments or files of the user are wrong; no half-written file is left behind (exit code 2)."""

    exit_code = 2


class NoGraphError(InputError):
    """The run at `root` has no ONNX graph, for a `reason` that follows "since"; the rest of the run is complete."""

    def __init__(self, root: Path, reason: str):
        """Say what runs the checkpoint without a graph."""
        super().__init__(
            root,
            f"has no ONNX graph, since {reason}",
            f"`fp8q generate {name_in_commands(root)} --runtime reference` runs its checkpoint, and "
            f"{root}/model/README.md says what else does",
        )


class GateError(Fp8qError):
    """A threshold that the user set was not met; the results are written all the same (exit code 3)."""

    exit_code = 3


class BackendError(Fp8qError):
    """A runtime or library is missing or failed (exit code 4)."""

    exit_code = 4


class UnfinishedError(BackendError):
    """A runtime failed; the results of the others are written, and the next call goes on (exit code 4)."""


def visible(text: str) -> str:
    """Replace all characters of `text` that are not printable by Python's escapes of them.

    These are controls (C0, C1, of direction, of zero width), the bytes of names that are not UTF-8, and every space but
    the plain one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_want_of_memory(error: BaseException) -> bool:
    """Tell whether `error` is a want of memory, be it Python's, a GPU's or torch's on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "can't allocate memory" in str(error)
