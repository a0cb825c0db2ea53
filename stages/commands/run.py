"""`fp8q run`: run all stages, one after the other."""

from collections.abc import Callable

from ...calibrate.ranks.torchrun import process_rank
from ...core.errors import GateError, UnfinishedError
from ...core.reporter import Reporter
from ...core.run import Run
from ...options import ReportOptions, RunOptions
from ..build_engine import build_engine
from ..export import OF_A_GRAPH
from ..pipeline.steps import Notes
from ..report import report
from ..shared.opening import run_at
from ..triton import triton
from ..validate import validate
from .calibrate import Calibration, calibrate


def run_all(run: Run, notes: Notes, what: Calibration) -> Run:
    """Calibrate, then build, validate, deploy and report.

    GateError and UnfinishedError are raised after everything is written.
    """
    calibrate(run, notes, what)
    if process_rank().rank == 0:  # the first rank alone does what follows
        _do_all(run, what.options, notes.report)
    return run


def _do_all(run: Run, options: RunOptions, progress: Reporter) -> None:
    """Run all later stages whose input files `run` has; raise their GateError and UnfinishedError at the end."""
    stages: dict[str, Callable[[Run, Notes], object]] = {
        "build-engine": lambda run, notes: build_engine(run, notes, options.engine),
        "validate": lambda run, notes: validate(run, notes, None, options.validate),
        "triton": lambda run, notes: triton(run, notes, options.triton),
        "report": lambda run, notes: report(run, notes, ReportOptions()),
    }
    gates, unfinished = list[GateError](), list[UnfinishedError]()
    for name, stage in stages.items():
        if name in OF_A_GRAPH and run.without_graph():
            progress.note(f"{name}: left out, since {run.root} has no ONNX graph")
            continue
        try:
            with run_at(run.root, progress, modules=()) as (opened, notes):
                stage(opened, notes)
        except GateError as gate:
            gates.append(gate)
        except UnfinishedError as error:
            unfinished.append(error)
    if unfinished:
        raise UnfinishedError("", "; ".join(map(str, [*unfinished, *gates])))
    if gates:
        raise GateError("", "; ".join(map(str, gates)))
