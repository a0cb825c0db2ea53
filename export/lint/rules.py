"""The registry of rules for graphs, by number.

A rule is a function from a graph, and what `scales.json` expects of it, to the places where the graph breaks the rule.
Its docstring gives the reason, which `fp8q lint --explain` and docs/lint.md show. CONTRIBUTING.md has the recipe for a
new rule.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ...core.findings import Broken, Finding, Severity, first_places
from ...options import BF16, Form
from ...quantize.scales.scheme import modules_in
from ..onnx_file import names
from ..onnx_file.indexed import Indexed
from ..onnx_file.tensors import Array

Scope = Literal["any", "promised", "foreign"]
#: Scope -> the graphs that it means, as `fp8q lint --explain` says it.
SCOPES: Mapping[Scope, str] = MappingProxyType(
    {"any": "any graph", "promised": "a run's graph", "foreign": "a graph of which nothing is expected"}
)


@dataclass(frozen=True)
class Expectation:
    """The FP8 forms that a run expects of its graph.

    `input_scales`: the modules on FP8, with the scale of their input (None: not known). `weight_scales`: module -> the
    scales of its weight [output channels].
    `attention`: the attention GEMMs on FP8, by node, with the scales of both sides. `cache`: the cached tensors
    (`<attention>.k`, `<attention>.v`) on FP8 codes -> their scales, float32 [1] or [heads, 1, 1] (None: not known).
    `forms`: the modules, and the attention GEMMs by node, of which the form of the (first) input is known -> that form.
    """

    input_scales: Mapping[str, float | None]
    weight_scales: Mapping[str, Array] = field(default_factory=dict)
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cache: Mapping[str, Array | None] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """The modules whose GEMM runs on FP8 codes on both sides."""
        return list(self.input_scales)

    @property
    def weights_alone(self) -> list[str]:
        """The modules whose weight is codes and whose input is BF16."""
        return modules_in(self.forms, BF16)


Check = Callable[[Indexed], Broken]
ExpectationCheck = Callable[[Indexed, Expectation], Broken]


@dataclass(frozen=True)
class Rule:
    """A rule with its number, name and severity.

    `scope`: `any` graph, a run's graph (`promised`: the check takes the Expectation too), or any other graph
    (`foreign`).
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

    @property
    def applies_to(self) -> str:
        """The graphs that the rule is for."""
        return SCOPES[self.scope]

    def findings(self, graph: Indexed, expected: Expectation | None) -> Iterator[Finding]:
        """Yield a finding for each of the first places where the graph breaks the rule, and one for the rest."""
        if self.scope != "any" and (expected is None) != (self.scope == "foreign"):
            return
        broken = self.check(graph, expected) if self.scope == "promised" else self.check(graph)

        def module(node: str) -> str | None:
            return names.module_of(node) or _owner(node, graph) or names.scope_of(node)

        yield from first_places((self.number, self.name, self.severity), broken, module)


def _owner(tensor: str, graph: Indexed) -> str | None:
    """The module whose parameter a tensor is."""
    return tensor.rpartition(".")[0] or None if tensor in graph.initializers else None


#: Number -> rule, once all rules are imported (`check` does so).
RULES: dict[str, Rule] = {}


def rule(
    number: str, name: str, severity: Severity = "error", scope: Literal["any", "foreign"] = "any"
) -> Callable[[Check], Check]:
    """Register a rule that needs only the graph."""

    def enter(check: Check) -> Check:
        _enter(Rule(number, name, severity, check, scope))
        return check

    return enter


def expectation_rule(
    number: str, name: str, severity: Severity = "error"
) -> Callable[[ExpectationCheck], ExpectationCheck]:
    """Register a rule that compares a run's graph with `scales.json` and `attention.json`."""

    def enter(check: ExpectationCheck) -> ExpectationCheck:
        _enter(Rule(number, name, severity, check, "promised"))
        return check

    return enter


def _enter(entry: Rule) -> None:
    assert entry.number not in RULES, f"rule {entry.number} is entered twice"
    RULES[entry.number] = entry
