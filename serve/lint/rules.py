"""The registry of rules R1xx for Triton repositories and runs, as `export.lint.rules` is for graphs.

A rule is a function from a model, or the whole repository, to the places where it is broken, each a file in the
repository. Its docstring gives the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ...core.findings import Broken, Finding, Severity, first_places
from ...core.run import Run
from .folder import ModelFolder, Repository

#: For any repository; for the Python models that fp8q wrote; for its plain engines; for a run.
Scope = Literal["any", "text", "engine", "run"]
#: Scope -> the files that it means, as `fp8q lint --explain` says it.
SCOPES: Mapping[Scope, str] = MappingProxyType(
    {"any": "any repository", "text": "fp8q's Python model", "engine": "fp8q's plain engine", "run": "a run"}
)
Check = Callable[[Repository], Broken]
RunCheck = Callable[[Run], Broken]


@dataclass(frozen=True)
class RepositoryRule:
    """A rule with its number, name, severity, scope and reason."""

    number: str
    name: str
    severity: Severity
    check: Callable[[Any], Broken]
    scope: Scope
    why: str

    @property
    def applies_to(self) -> str:
        """The files that the rule is for."""
        return SCOPES[self.scope]

    def findings(self, held: Repository | Run) -> Iterator[Finding]:
        """Yield the places where a repository, or a run, breaks the rule."""
        return first_places((self.number, self.name, self.severity), self.check(held), lambda _: None)


#: Number -> rule, once all rules are imported (`check` does so).
RULES: dict[str, RepositoryRule] = {}


def repository_rule(number: str, name: str, severity: Severity = "error") -> Callable[[Check], Check]:
    """Register a rule of a whole repository."""

    def enter(check: Check) -> Check:
        _enter(RepositoryRule(number, name, severity, check, "any", check.__doc__ or ""))
        return check

    return enter


def model_rule(
    number: str, name: str, severity: Severity = "error", scope: Scope = "any"
) -> Callable[[Callable[[ModelFolder], Broken]], Callable[[ModelFolder], Broken]]:
    """Register a rule that is checked for each model of a scope whose configuration parses."""

    def enter(check: Callable[[ModelFolder], Broken]) -> Callable[[ModelFolder], Broken]:
        def every(repository: Repository) -> Broken:
            for model in repository.models:
                if model.config is not None and _is_in(model, scope):
                    yield from check(model)

        _enter(RepositoryRule(number, name, severity, every, scope, check.__doc__ or ""))
        return check

    return enter


def run_rule(number: str, name: str) -> Callable[[RunCheck], RunCheck]:
    """Register a rule of a run."""

    def enter(check: RunCheck) -> RunCheck:
        _enter(RepositoryRule(number, name, "error", check, "run", check.__doc__ or ""))
        return check

    return enter


def _is_in(model: ModelFolder, scope: Scope) -> bool:
    return scope == "any" or (model.is_text if scope == "text" else model.is_engine)


def _enter(rule: RepositoryRule) -> None:
    assert rule.number not in RULES, f"rule {rule.number} is entered twice"
    RULES[rule.number] = rule
