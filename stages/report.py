"""The stage `report`: the run as a page and a notebook, beside other runs."""

from collections.abc import Sequence
from pathlib import Path

from ..core.errors import InputError
from ..core.run import Run
from ..options import PageOptions
from .pipeline.stage import NO_FACTS, Key
from .pipeline.stages import REPORT
from .pipeline.steps import Notes


def report(run: Run, others: Sequence[Run], notes: Notes) -> list[Path]:
    """Write both files of `run`, beside `others`, where they are not current; returns their paths.

    Raises InputError for a run that is put beside itself, or named twice.
    """
    from ..validate.report.report import write_report

    roots = [each.root.resolve() for each in (run, *others)]
    for number, root in enumerate(roots):
        if root in roots[:number]:
            raise InputError(f"--compare {others[number - 1].root}: is in the report already; name each run once")
    inputs = outputs(run) | {
        f"compared {number} {name}": digest
        for number, other in enumerate(others)
        for name, digest in outputs(other).items()
    }
    key = Key(inputs, PageOptions(), NO_FACTS)
    if not REPORT.is_current(run, key):
        with REPORT.writing(run, key, notes) as log:
            log.outputs += write_report(run, notes, others)
    return [run.report_html, run.report_ipynb]


def outputs(run: Run) -> dict[str, str]:
    """Name -> SHA-256 of what all stages but this one wrote."""
    return {
        name: digest
        for stage, record in run.record().stages.items()
        if stage != "report"
        for name, digest in record.outputs.items()
    }
