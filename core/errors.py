"""Errors, classified by who can mend them: each class carries the exit code of the command line.

A message names what, the rule or value found, and the remedy, in one line; the command line prints it
unwrapped and nothing else. Ctrl-C and SIGTERM raise none of these, and have exit codes of their own (`cli.signals`).
"""

#: The exit codes after Ctrl-C and SIGTERM: 128 and the signal's number, as shells have it.
INTERRUPTED, TERMINATED = 130, 143


class Fp8qError(Exception):
    """Any failure fp8q foresees (exit code 1)."""

    exit_code = 1


class InputError(Fp8qError):
    """The arguments or the files given are wrong; nothing half-written is left behind (exit code 2)."""

    exit_code = 2


class GateError(Fp8qError):
    """A threshold the user set was not met; the results are written all the same (exit code 3)."""

    exit_code = 3


class BackendError(Fp8qError):
    """A runtime or library is missing or failed (exit code 4)."""

    exit_code = 4


class UnfinishedError(BackendError):
    """A runtime failed; what the others found is written, and the next call goes on (exit code 4)."""


def visible(text: str) -> str:
    """`text` with all that is no printable character as Python's escape of it: controls (C0, C1, of direction, of zero
    width), the bytes of names that are not UTF-8, every space but the plain one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
