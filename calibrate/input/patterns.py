"""Match regular expressions from untrusted files within bounds of steps and time.

Python's matcher backtracks: `((((.+)+)+)+)+=` never ends on a name of 40 letters, nor do 24 times `(.?|.?)?`, and
nothing stops it but a signal to the main thread. Loaders match with it all the same. RE2, which cannot backtrack, knows
no look-around, which lists of ignored modules use; `regex`, which has a timeout, took all memory for a few repeats of
repeats; both would be another library on serving hosts. So the expression is parsed by Python's own parser, and the
number of ways in which it can be laid over a text is bounded from above before it is tried: alternatives are added,
what follows one another is multiplied, k repeats of single letters share n letters in at most C(n + k, k) ways, and a
repeat of anything that itself has several ways has their power. Expressions of published checkpoints (`.*mlp.gate$`)
have some thousand ways; with more than `MOST_MATCHES` one is refused. The time of all matches with the expressions of a
file has an end too.
"""

import re
import time
from math import comb
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # the same tree as the matcher's
from typing import Any

from ...core.errors import InputError

#: The most characters of an expression, the most ways in which it may be laid over a text, and the most seconds that
#: the expressions of one file take.
LONGEST = 1000
MOST_MATCHES = 10_000_000
SECONDS = 10.0
TOO_MUCH = "it repeats too much to be tried"


class PatternFile:
    """An untrusted file with expressions, and the processor time that matching with all of them may still take."""

    def __init__(self, path: Path, seconds: float = SECONDS):
        """Name the file for error messages, and allow `seconds`."""
        self.path = path
        self.left = seconds

    def refused(self, expression: str, why: object) -> InputError:
        """The error for an expression of this file."""
        return InputError(
            self.path, f"has the pattern {expression[:80]!r}, which is not read ({why})", "name the modules plainly"
        )


class BoundedPattern:
    """A regular expression from an untrusted file."""

    def __init__(self, expression: str, file: PatternFile, before: str = "", after: str = ""):
        """Compile the `expression` with the trusted parts `before` and `after` around it.

        Raises InputError for one that does not compile, alone or between these, or that no text can be tried with.
        """
        self.expression = expression
        self._file = file
        if len(expression) > LONGEST:
            raise file.refused(expression, TOO_MUCH)
        try:
            re.compile(expression)
            self._compiled = re.compile(f"{before}{expression}{after}")
            self._tree = _parser.parse(self._compiled.pattern)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise file.refused(expression, error) from None
        self._match_counts: dict[int, float] = {}
        self._check(1)

    def matches(self, text: str) -> bool:
        """Tell whether the expression matches `text` from its first letter on; raises InputError for too much work."""
        self._check(len(text))
        begun = time.thread_time()
        matched = self._compiled.match(text) is not None
        self._file.left -= time.thread_time() - begun
        if self._file.left < 0:
            raise self._file.refused(self.expression, f"the patterns of this file take over {SECONDS:.0f} seconds")
        return matched

    def _check(self, length: int) -> None:
        if length not in self._match_counts:
            self._match_counts[length] = match_count(self._tree, length)
        if self._match_counts[length] > MOST_MATCHES:
            raise self._file.refused(self.expression, TOO_MUCH)


def match_count(tree: Any, length: int) -> float:
    """Bound from above in how many ways a parsed expression can be laid over a text of so many letters."""
    bound = 1.0
    repeats = 0
    for operator, argument in tree:
        match str(operator):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT" | "GROUPREF":
                continue
            case "BRANCH":
                bound *= sum(match_count(branch, length) for branch in argument[1])
            case "SUBPATTERN" | "ASSERT" | "ASSERT_NOT":
                bound *= match_count(argument[-1], length)
            case "ATOMIC_GROUP":
                bound *= match_count(argument, length)
            case "GROUPREF_EXISTS":
                bound *= sum(match_count(branch, length) for branch in argument[1:] if branch is not None)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, inner = argument
                if match_count(inner, length) == 1 and inner.getwidth()[0] > 0 and least <= 1 and most > length:
                    repeats += 1
                else:
                    bound *= _repeated(int(least), int(most), match_count(inner, length), inner.getwidth()[0], length)
            case _:
                return float("inf")
        if bound > MOST_MATCHES:
            return float("inf")
    return bound * comb(length + repeats, repeats)


def _repeated(least: int, most: int, matches_once: float, width: int, length: int) -> float:
    """Bound the ways of a repeat from `least` to `most` times of something with `matches_once` ways and at least
    `width` letters; what may be empty is tried `least` times all the same.
    """
    most = min(most, length // width if width else least + length)
    if not width and least > LONGEST:
        return float("inf")
    if matches_once == 1:
        return max(most - least, 0) + 1.0 + (0 if width else least)
    if most * matches_once < 400:
        return sum(matches_once**times for times in range(min(least, most), most + 1))
    return float("inf")
