"""The registry of rules for graphs, by number.

A rule is a function from a graph, and what `scales.json` expects of it, to the places where the graph breaks the rule.
Its docstring gives the reason, which `fp8q lint --explain` and docs/lint.md show. CONTRIBUTING.md has the recipe for a
new rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...core.findings import Broken, Ruleset, Severity
from ...options import BF16, Form
from ...quantize.scales.scheme import modules_in
from ..onnx_file import names
from ..onnx_file.indexed import Indexed
from ..onnx_file.tensors import Array

#: The graphs that rules are for, as `fp8q lint --explain` says it.
OF_A_RUN = "a run's graph"
FOREIGN = "a graph of which nothing is expected"


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


def _module(node: str, graph: Indexed, expected: Expectation | None) -> str | None:
    owner = node.rpartition(".")[0] if node in graph.initializers else None
    return names.module_of(node) or owner or names.scope_of(node)


RULES: Ruleset[[Indexed, Expectation | None]] = Ruleset(_module)


def rule(number: str, name: str, severity: Severity = "error", foreign: bool = False) -> Callable[[Check], Check]:
    """Register a rule that needs only the graph: any, or one that is `foreign`, of which nothing is expected."""

    def adapt(check: Check) -> Callable[[Indexed, Expectation | None], Broken]:
        return lambda graph, expected: iter(()) if foreign and expected else check(graph)

    return RULES.enter((number, name, severity), FOREIGN if foreign else "any graph", adapt)


def expectation_rule(
    number: str, name: str, severity: Severity = "error"
) -> Callable[[ExpectationCheck], ExpectationCheck]:
    """Register a rule that compares a run's graph with `scales.json` and `attention.json`."""

    def adapt(check: ExpectationCheck) -> Callable[[Indexed, Expectation | None], Broken]:
        return lambda graph, expected: check(graph, expected) if expected else iter(())

    return RULES.enter((number, name, severity), OF_A_RUN, adapt)
