"""Check a Triton repository against everything that is known to keep a server from starting; no server needed.

Rules R119 and R120, about a run's record of its engines and of its repository, are here too.
"""

from pathlib import Path

from ...core.commands import stage_command
from ...core.errors import InputError
from ...core.files import read_document
from ...core.findings import Broken, Finding, enter_rules
from ...core.run import Run
from ...export.engine.info import EngineInfo
from .folder import Repository, open_repository
from .rules import RULES, run_rule

enter_rules(__package__)
#: The names of stages that build engines begin with this.
ENGINES = "build-engine"
__all__ = ["RULES", "lint_engines", "lint_repository"]


def lint_repository(path: Path) -> tuple[Repository, list[Finding]]:
    """Check the repository at `path`; return it and its findings, in the order of the rules' numbers.

    Raises BackendError where Triton's schema is not installed.
    """
    repository = open_repository(path)
    return repository, RULES.findings(repository)


def lint_engines(run: Run) -> list[Finding]:
    """Check the engines and the repository of a run against its record; return the findings."""
    return RULES.findings(run)


@run_rule("R119", "run-engine")
def run_engine(run: Run) -> Broken:
    """The engines of a run are those that were built, of the graphs that are there now, and beside each lies what is
    known of it.
    """
    for stage, record in run.record().stages.items():
        if not stage.startswith(ENGINES):
            continue
        for name in record.outputs:
            try:
                run.require(run.root / name, stage)
                if name.endswith(".json"):
                    read_document(run.root / name, EngineInfo)
            except InputError as error:
                again = f"; run `{stage_command(stage, run.root)}` again" if error.remedy else ""
                yield name, f"{error.fault}{again}"
        if run.is_stale(stage):
            yield (
                run.engines.name,
                f"is of other graphs than there are now; run `{stage_command(stage, run.root)}` again",
            )


@run_rule("R120", "run-repository")
def run_repository(run: Run) -> Broken:
    """The repository of a run was written of the files that are there now."""
    if "triton" in run.record().stages and run.is_stale("triton"):
        yield run.triton.name, f"is of other files than there are now; run `{stage_command('triton', run.root)}` again"
