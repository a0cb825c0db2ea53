"""The findings of a lint, of graphs, repositories and checkpoints alike: a broken rule, its place, and the remedy, in
one line.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pkgutil import iter_modules
from typing import Literal

from .errors import visible

#: The most characters of a name of a node, value or tensor (F314), of a name in a line, and of a message.
LONGEST_TEXT, LONGEST_SHOWN, LONGEST_MESSAGE = 4096, 200, 1000
#: The most places that are listed for one rule: a file may break it a million times.
MOST_PLACES = 1000
#: `note`: the file alone does not show that anything is wrong.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A broken rule: its `node` (a tensor, or "" for the whole file), its `module`, and a `message` with the remedy.

    `message` is one line of printable characters; node and module are at most as long as names may be (F314), whatever
    the file contains. `places`: the number of places that this finding counts; 1, except for the last finding of a rule
    that is broken too often to list.
    """

    rule: str
    name: str
    severity: Severity
    node: str
    module: str | None
    message: str
    places: int = 1

    def __str__(self) -> str:
        """Format the finding in one line."""
        node = shortened(visible(self.node), LONGEST_SHOWN)
        return f"{self.rule} {self.name}: {node}{': ' if node else ''}{self.message}"


def shortened(text: str, longest: int) -> str:
    """Cut the middle out of a text of more than `longest` characters."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … ({len(text):,} characters) … {text[-longest // 4 :]}"


def places(findings: Iterable[Finding]) -> int:
    """The number of places at which rules are broken."""
    return sum(finding.places for finding in findings)


#: Places where a rule is broken: node (or tensor) and message of each.
Broken = Iterator[tuple[str, str]]


def first_places(
    rule: tuple[str, str, Severity], broken: Broken, module: Callable[[str], str | None]
) -> Iterator[Finding]:
    """The places where a rule (its number, name and severity) is broken: the first ones, and how many more."""
    places_left = iter(broken)

    def finding(node: str, message: str, count: int = 1) -> Finding:
        node = shortened(node, LONGEST_TEXT)
        line = shortened(visible(shortened(message, LONGEST_MESSAGE)), LONGEST_MESSAGE)  # an escape is up to ten long
        return Finding(*rule, node, module(node), line, count)

    for node, message in islice(places_left, MOST_PLACES):
        yield finding(node, message)
    if more := sum(1 for _ in places_left):
        yield finding("", f"{more:,} more places break this rule; mend those that are listed first", more)


def enter_rules(package: str) -> None:
    """Import every module `rules_…` of a package; each enters its rules in the registry of the package."""
    for module in iter_modules(import_module(package).__path__):
        if module.name.startswith("rules_"):
            import_module(f"{package}.{module.name}")
