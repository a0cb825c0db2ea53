"""Rules R119 and R120: what a run's record says of its engines and of its repository."""

from ...core.commands import stage_command
from ...core.errors import InputError
from ...core.files import read_document
from ...core.findings import Broken
from ...core.run import Run
from ...export.engine.info import EngineInfo
from .rules import run_rule

ENGINES = "build-engine"


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
