"""The registry of rules R1xx for Triton repositories and runs, as `export.lint.rules` is for graphs.

A rule is a function from a model, the whole repository, or a run, to the places where it is broken, each a file in the
repository. Its docstring gives the reason.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from ...core.findings import Broken, Ruleset, Severity
from ...core.run import Run
from .folder import ModelFolder, Repository

#: For any repository; for the Python models that fp8q wrote; for its plain engines.
Scope = Literal["any", "text", "engine"]
#: Scope -> the files that it means, as `fp8q lint --explain` says it.
SCOPES: Mapping[Scope, str] = MappingProxyType(
    {"any": "any repository", "text": "fp8q's Python model", "engine": "fp8q's plain engine"}
)
Check = Callable[[Repository], Broken]
ModelCheck = Callable[[ModelFolder], Broken]
RunCheck = Callable[[Run], Broken]
Either = Callable[[Repository | Run], Broken]


RULES: Ruleset[[Repository | Run]] = Ruleset(lambda place, subject: None)


def repository_rule(number: str, name: str, severity: Severity = "error") -> Callable[[Check], Check]:
    """Register a rule of a whole repository."""
    return RULES.enter((number, name, severity), SCOPES["any"], _of_repositories)


def model_rule(
    number: str, name: str, severity: Severity = "error", scope: Scope = "any"
) -> Callable[[ModelCheck], ModelCheck]:
    """Register a rule that is checked for each model of a scope whose configuration parses."""

    def adapt(check: ModelCheck) -> Either:
        def every(repository: Repository) -> Broken:
            for model in repository.models:
                if model.config is not None and _is_in(model, scope):
                    yield from check(model)

        return _of_repositories(every)

    return RULES.enter((number, name, severity), SCOPES[scope], adapt)


def run_rule(number: str, name: str) -> Callable[[RunCheck], RunCheck]:
    """Register a rule of a run."""

    def adapt(check: RunCheck) -> Either:
        return lambda subject: check(subject) if isinstance(subject, Run) else iter(())

    return RULES.enter((number, name, "error"), "a run", adapt)


def _of_repositories(check: Check) -> Either:
    return lambda subject: iter(()) if isinstance(subject, Run) else check(subject)


def _is_in(model: ModelFolder, scope: Scope) -> bool:
    return scope == "any" or (model.is_text if scope == "text" else model.is_engine)
