"""Hold a Triton repository against everything that is known to keep a server from starting; no server needed."""

from pathlib import Path

from ...core.findings import Finding
from ...core.run import Run
from . import rules_config, rules_files, rules_python, rules_run, rules_tensors  # noqa: F401  # enter their rules
from .folder import Repository, open_repository
from .rules import RULES

__all__ = ["RULES", "lint_engines", "lint_repository"]


def lint_repository(path: Path) -> tuple[Repository, list[Finding]]:
    """The repository at `path` and the rules that it breaks, in the order of their numbers.

    Raises BackendError where Triton's schema is not installed.
    """
    repository = open_repository(path)
    return repository, _broken(repository)


def lint_engines(run: Run) -> list[Finding]:
    """The rules that the engines and the repository of a run break, as what its stages wrote."""
    return _broken(run)


def _broken(held: Repository | Run) -> list[Finding]:
    rules = [RULES[number] for number in sorted(RULES) if (RULES[number].scope == "run") == isinstance(held, Run)]
    return [finding for rule in rules for finding in rule.findings(held)]
