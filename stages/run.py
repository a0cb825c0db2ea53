"""`fp8q run`: run all stages, one after the other."""

from collections.abc import Callable
from dataclasses import replace

from ..calibrate.ranks.torchrun import process_rank
from ..core.errors import GateError, UnfinishedError
from ..core.reporter import Reporter
from ..core.run import Run
from ..options import ReportOptions, RunOptions
from .build_engine import build_engine
from .calibrate import Calibration, calibrate
from .export import OF_A_GRAPH
from .forms import validate_acceptable
from .pipeline.stage import Notes
from .report import report
from .shared.opening import run_at
from .triton import triton


def run_all(run: Run, notes: Notes, what: Calibration) -> Run:
    """Calibrate, then build, validate, deploy and report.

    GateError and UnfinishedError are raised after everything is written.
    """
    options = what.options.without_idle_graph()
    if options != what.options:
        notes.note(f"--for {options.server}: reads the checkpoint; no graph, engine and Triton repository are made")
    what = replace(what, options=options)
    calibrate(run, notes, what)
    if process_rank().rank == 0:  # the first rank alone does what follows
        _do_all(run, what.options, notes.report)
    return run


def _do_all(run: Run, options: RunOptions, progress: Reporter) -> None:
    """Run all later stages whose input files `run` has; raise their GateError and UnfinishedError at the end."""
    stages: dict[str, Callable[[Run, Notes], object]] = {
        "build-engine": lambda run, notes: build_engine(run, notes, options.engine),
        "validate": lambda run, notes: validate_acceptable(run, notes, options),
        "triton": lambda run, notes: triton(run, notes, options.triton),
        "report": lambda run, notes: report(run, notes, ReportOptions()),
    }
    if options.finds_form and not options.validate.engines:  # an engine is built of the form that is found
        stages = {name: stages[name] for name in ("validate", "build-engine", "triton", "report")}
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
