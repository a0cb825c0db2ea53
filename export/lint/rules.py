"""The rules of `lint`: what a finding is, and the register that every rule enters under its number.

A rule is a function from the graph, and what is promised of it, to the places where it is broken. Its docstring says
why the rule is there.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from ...errors import visible
from .. import names
from .indexed import Indexed
from .tensors import Array

#: The longest name of a node, value or tensor in characters (F314), of what a line shows of one, and of a message.
LONGEST_TEXT, LONGEST_SHOWN, LONGEST_MESSAGE = 4096, 200, 1000
#: How many places of one rule are listed: a file may break it a million times.
MOST_PLACES = 1000
Severity = Literal["error", "warning"]
Scope = Literal["any", "promised", "foreign"]


@dataclass(frozen=True)
class Promise:
    """What a graph must keep: the modules on FP8 with the scale of their input (None: not known), and scales [output
    channels] of weights.

    `attention`: the products of attention on FP8, by node, with the scales of both sides. `two_terms`: the modules,
    and the products of attention by node, whose (first) input is two codes a value; None where that is not known.
    """

    input_scales: Mapping[str, float | None]
    weight_scales: Mapping[str, Array] = field(default_factory=dict)
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    two_terms: Collection[str] | None = None


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
Check = Callable[[Indexed], Broken]
PromiseCheck = Callable[[Indexed, Promise], Broken]


@dataclass(frozen=True)
class Rule:
    """A rule under its number.

    `scope`: for any graph, one of which something is `promised` (its check is given that too), or others' (`foreign`).
    """

    number: str
    name: str
    severity: Severity
    check: Callable[..., Broken]
    scope: Scope

    @property
    def why(self) -> str:
        """The reason for the rule: its function's docstring."""
        return self.check.__doc__ or ""

    def findings(self, graph: Indexed, promise: Promise | None) -> Iterator[Finding]:
        """Where the graph breaks the rule: the first places, and how many more."""
        if self.scope != "any" and (promise is None) != (self.scope == "foreign"):
            return
        broken = self.check(graph, promise) if self.scope == "promised" else self.check(graph)

        def module(node: str) -> str | None:
            return names.module_of(node) or _owner(node, graph) or names.scope_of(node)

        yield from listed((self.number, self.name, self.severity), broken, module)


def listed(rule: tuple[str, str, Severity], broken: Broken, module: Callable[[str], str | None]) -> Iterator[Finding]:
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


def _owner(tensor: str, graph: Indexed) -> str | None:
    """The module whose parameter a tensor is."""
    return tensor.rpartition(".")[0] or None if tensor in graph.initializers else None


#: Number -> rule, in the order of their numbers once all rules are imported (`lint` does so).
RULES: dict[str, Rule] = {}


def rule(
    number: str, name: str, severity: Severity = "error", scope: Literal["any", "foreign"] = "any"
) -> Callable[[Check], Check]:
    """Enter a rule that needs only the graph."""

    def enter(check: Check) -> Check:
        _enter(Rule(number, name, severity, check, scope))
        return check

    return enter


def promise_rule(number: str, name: str, severity: Severity = "error") -> Callable[[PromiseCheck], PromiseCheck]:
    """Enter a rule that holds the graph against what is promised of it."""

    def enter(check: PromiseCheck) -> PromiseCheck:
        _enter(Rule(number, name, severity, check, "promised"))
        return check

    return enter


def _enter(entry: Rule) -> None:
    assert entry.number not in RULES, f"rule {entry.number} is entered twice"
    RULES[entry.number] = entry
