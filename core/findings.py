"""The rules and findings of a lint, of graphs, repositories, checkpoints and servers alike: a broken rule, its place,
and the remedy, in one line.

A rule is one decorated function in a file `rules_…` of its lint's package; nothing lists it again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pkgutil import iter_modules
from typing import Concatenate, Generic, Literal, ParamSpec, TypeVar

from .errors import visible

#: The most characters of a name of a node, value or tensor (F314), of a name in a line, and of a message.
LONGEST_TEXT = 4096
LONGEST_SHOWN = 200
LONGEST_MESSAGE = 1000
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


#: What the rules of a lint are checked for: a graph and what is expected of it, a checkpoint, a repository …
Subject = ParamSpec("Subject")
Check = TypeVar("Check", bound=Callable[..., Broken])


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """A rule of a lint with its number, name, severity, the subjects that it `applies_to`, and the reason.

    `check` yields the places where a subject breaks it, `module` returns the module that a place belongs to.
    """

    number: str
    name: str
    severity: Severity
    applies_to: str
    why: str
    check: Callable[Subject, Broken]
    module: Callable[Concatenate[str, Subject], str | None]

    def findings(self, *subject: Subject.args, **named: Subject.kwargs) -> Iterator[Finding]:
        """Yield a finding for each of the first places where the subject breaks the rule, and one for the rest."""
        places_left = self.check(*subject, **named)

        def finding(node: str, message: str, count: int = 1) -> Finding:
            node = shortened(node, LONGEST_TEXT)
            line = shortened(
                visible(shortened(message, LONGEST_MESSAGE)), LONGEST_MESSAGE
            )  # an escape is up to ten long
            module = self.module(node, *subject, **named)
            return Finding(self.number, self.name, self.severity, node, module, line, count)

        for node, message in islice(places_left, MOST_PLACES):
            yield finding(node, message)
        if more := sum(1 for _ in places_left):
            yield finding("", f"{more:,} more places break this rule; mend those that are listed first", more)


class Ruleset(dict[str, Rule[Subject]], Generic[Subject]):
    """The rules of one lint by number, once the files with them are imported (`enter_rules`)."""

    def __init__(self, module: Callable[Concatenate[str, Subject], str | None]):
        """Begin without rules; `module` returns the module that a place of a subject belongs to."""
        super().__init__()
        self.module = module

    def enter(
        self,
        head: tuple[str, str, Severity],
        applies_to: str,
        adapt: Callable[[Check], Callable[Subject, Broken]],
        sources: str = "",
    ) -> Callable[[Check], Check]:
        """Return a decorator that registers a rule with the number, name and severity of `head`.

        The docstring of the decorated function, and the `sources`, are the reason; `adapt` makes a check of it.
        """
        number, *_ = head

        def register(check: Check) -> Check:
            assert number not in self, f"rule {number} is entered twice"
            why = (check.__doc__ or "").strip() + sources
            self[number] = Rule(*head, applies_to, why, adapt(check), self.module)
            return check

        return register

    def findings(self, *subject: Subject.args, **named: Subject.kwargs) -> list[Finding]:
        """Return the findings of all rules in the order of their numbers."""
        return [finding for number in sorted(self) for finding in self[number].findings(*subject, **named)]


def enter_rules(package: str) -> None:
    """Import every module `rules_…` of a package; each enters its rules in the registry of the package."""
    for module in iter_modules(import_module(package).__path__):
        if module.name.startswith("rules_"):
            import_module(f"{package}.{module.name}")
