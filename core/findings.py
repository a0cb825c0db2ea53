"""The findings of a lint: a rule that is broken, where, and what to do, in one line; the same of graphs, repositories
and checkpoints.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from .errors import visible

#: The longest name of a node, value or tensor in characters (F314), of what a line shows of one, and of a message.
LONGEST_TEXT, LONGEST_SHOWN, LONGEST_MESSAGE = 4096, 200, 1000
#: How many places of one rule are listed: a file may break it a million times.
MOST_PLACES = 1000
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A rule that a graph breaks: at which `node` (or tensor, or the graph: ""), of which `module`, and what to do.

    `message` is one line of printable characters, and node and module are no longer than names are (F314), whatever
    the file holds. `places`: how many this finding stands for, 1 but for the last of a rule that is broken everywhere.
    """

    rule: str
    name: str
    severity: Severity
    node: str
    module: str | None
    message: str
    places: int = 1

    def __str__(self) -> str:
        """As one line."""
        node = shortened(visible(self.node), LONGEST_SHOWN)
        return f"{self.rule} {self.name}: {node}{': ' if node else ''}{self.message}"


def shortened(text: str, longest: int) -> str:
    """A text without its middle where it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … ({len(text):,} characters) … {text[-longest // 4 :]}"


def places(findings: Iterable[Finding]) -> int:
    """In how many places rules are broken."""
    return sum(finding.places for finding in findings)


#: A place where a rule is broken: node (or tensor) and message.
Broken = Iterator[tuple[str, str]]


def list_findings(
    rule: tuple[str, str, Severity], broken: Broken, module: Callable[[str], str | None]
) -> Iterator[Finding]:
    """The places where a rule (its number, name and severity) is broken: the first ones, and how many more."""
    places_left = iter(broken)

    def found(node: str, message: str, count: int = 1) -> Finding:
        node = shortened(node, LONGEST_TEXT)
        line = shortened(visible(shortened(message, LONGEST_MESSAGE)), LONGEST_MESSAGE)  # an escape is up to ten long
        return Finding(*rule, node, module(node), line, count)

    for node, message in islice(places_left, MOST_PLACES):
        yield found(node, message)
    if more := sum(1 for _ in places_left):
        yield found("", f"{more:,} more places break this rule; mend those that are listed first", more)
