"""Errors, classified by who can fix the cause; each class has the exit code of the command line.

A message names the subject, the rule or the value, and the remedy, in one line. The command line prints it unwrapped
and nothing else. Ctrl-C and SIGTERM raise none of these, and have exit codes of their own (`cli.signals`).
"""

#: The exit codes after Ctrl-C and SIGTERM: 128 plus the signal's number, as in shells.
INTERRUPTED, TERMINATED = 130, 143


class Fp8qError(Exception):
    """A failure that fp8q foresees (exit code 1)."""

    exit_code = 1


class InputError(Fp8qError):
    """The arguments or files of the user are wrong; no half-written file is left behind (exit code 2)."""

    exit_code = 2


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
