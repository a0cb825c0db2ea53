"""The end of a command: the tables and files that it made, what of the run is outdated now, and the next command."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.record import stage_command
from ..core.run import Run

#: The tables and files of the run.
TABLES = ("accuracy", "engines", "sizes", "stages", "modules")
MODEL = ("model", "model/model.onnx", "model/model.fp32.onnx", "scales.json")
FILES = (*MODEL, "baselines", "engines", "accuracy.json", "bench.json", "triton", "report.html", "report.ipynb")


@dataclass(frozen=True)
class Made:
    """The tables and files that a command makes."""

    tables: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


#: Command -> what it makes; `run` makes everything.
MADE: Mapping[str, Made] = {
    "run": Made(TABLES, FILES),
    "calibrate": Made(("sizes", "stages", "modules"), MODEL),
    "scales": Made(("modules",), MODEL),
    "merge": Made(("sizes", "modules"), MODEL),
    "export": Made(("sizes",), (*MODEL[:3], "baselines")),
    "build-engine": Made(("engines",), ("engines",)),
    "validate": Made(("accuracy",), ("accuracy.json",)),
    "triton": Made((), ("triton",)),
    "report": Made((), ("report.html", "report.ipynb")),
}
#: The stages that follow calibration, with what each is for.
FOLLOWING: Mapping[str, str] = {
    "validate": "tells whether it is still the same model",
    "build-engine": "builds the engine, and proves what it runs in FP8",
    "triton": "writes the Triton model repository",
    "report": "shows the results to others",
}
#: Those that need a graph.
OF_GRAPHS = frozenset(("build-engine", "triton"))


def ending(run: Run) -> list[str]:
    """Say which results of `run` are outdated, with the command of each, and what comes next."""
    stages = run.record().stages
    stale = [name for name in stages if run.is_stale(name)]
    lines = [
        f"outdated, since the run has changed: {name}; `{stage_command(name, run.root)}` does it again"
        for name in stale
    ]
    wanted = [name for name in FOLLOWING if not (name in OF_GRAPHS and run.without_graph())]
    missing = next((name for name in wanted if name not in stages), None)
    if "quantize" not in stages:
        return lines
    if missing is not None:
        return [*lines, f"next: `{stage_command(missing, run.root)}` {FOLLOWING[missing]}"]
    if stale:
        return lines
    serve = f"vllm serve {run.model}" if run.without_graph() else f"fp8q serve {run.root}"
    return [f"next: `{serve}` serves the model"]
