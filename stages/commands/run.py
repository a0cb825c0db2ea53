"""`fp8q run`: run all stages, one after the other."""

from collections.abc import Callable
from pathlib import Path

from ...calibrate.ranks.torchrun import process_rank
from ...core.errors import GateError, UnfinishedError
from ...core.reporter import Reporter
from ...core.run import Run
from ...options import ReportOptions
from ..build_engine import build_engine
from ..export import OF_A_GRAPH
from ..pipeline.steps import alone
from ..report import report
from ..triton import triton
from ..validate import validate
from .calibrate import Calibration, calibrate


def run_all(out: Path, what: Calibration, progress: Reporter) -> Run:
    """Calibrate, then build, validate, deploy and report, under the lock of the run directory `out`.

    GateError and UnfinishedError are raised after everything is written.
    """
    options = what.options
    later: dict[str, Callable[[], object]] = {
        "build-engine": lambda: build_engine.at(out, progress, options.engine),
        "validate": lambda: validate.at(out, progress, None, options.validate),
        "triton": lambda: triton.at(out, progress, options.triton),
        "report": lambda: report.at(out, progress, ReportOptions()),
    }
    with alone(Run(Path(out))):
        run = calibrate(out, what, progress)
        if process_rank().rank == 0:  # the first rank alone does what follows
            _do_all(run, later, progress)
    return run


def _do_all(run: Run, steps: dict[str, Callable[[], object]], progress: Reporter) -> None:
    """Run all `steps` whose input files `run` has; raise their GateError and UnfinishedError at the end."""
    gates, unfinished = list[GateError](), list[UnfinishedError]()
    for name, step in steps.items():
        if name in OF_A_GRAPH and run.without_graph():
            progress.note(f"{name}: left out, since {run.root} has no ONNX graph")
            continue
        try:
            step()
        except GateError as gate:
            gates.append(gate)
        except UnfinishedError as error:
            unfinished.append(error)
    if unfinished:
        raise UnfinishedError("", "; ".join(map(str, [*unfinished, *gates])))
    if gates:
        raise GateError("", "; ".join(map(str, gates)))
