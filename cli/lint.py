"""Show what `fp8q lint` found, or explain its rules."""

from pathlib import Path

from .. import api
from ..core.errors import InputError
from ..options import LintOptions
from ..stages.lint import check_findings, explain_rules
from . import views


def show_lint(path: Path | None, run: Path | None, options: LintOptions, explain: str | None, as_json: bool) -> None:
    """Lint `path`, held against what `run` expects and what a server of `options` does, and show the findings; or
    explain the rules of the code `explain`.

    Raises InputError for both or neither of them, and GateError for findings that are errors.
    """
    if explain is not None and path is None:
        views.show_rules(explain_rules(explain), as_json)
        return
    if path is None or explain is not None:
        raise InputError("", "lint takes either a PATH or --explain CODE", "name one of them")
    linted = api.lint(path, run, options)
    views.linted(linted, as_json)
    check_findings(linted)
