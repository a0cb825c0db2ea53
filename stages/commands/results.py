"""Results of a run for a notebook to display: the report's tables, plots and continuations, and the verdict."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shared.opening import open_run

if TYPE_CHECKING:
    from ...core.columns import Table
    from ...validate.accuracy.continuations import Continuations
    from ...validate.accuracy.document import Verdict
    from ...validate.report.plots import Plot


def report_tables(path: Path, compare: Sequence[Path] = ()) -> "dict[str, Table[Any]]":
    """The report's tables of the run at `path`, compared with the runs at `compare`; a notebook displays each."""
    from ...validate.report.report import report_tables

    return report_tables(open_run(path), [open_run(other) for other in compare])


def report_verdict(path: Path) -> "Verdict":
    """The verdict on whether the model of the run at `path` is good enough in FP8; a notebook displays it."""
    from ...validate.report.verdict import report_verdict

    return report_verdict(open_run(path))


def report_continuations(path: Path) -> "Continuations":
    """Load the continuations that BF16 and FP8 of the run at `path` wrote from the same prompts; a notebook displays
    them.
    """
    from ...validate.report.report import report_continuations

    return report_continuations(open_run(path))


def report_plots(path: Path) -> "dict[str, Plot]":
    """The report's plots of the run at `path`; a notebook displays each."""
    from ...validate.report.drawings import report_plots

    return report_plots(open_run(path))
