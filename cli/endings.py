"""The end of a command: the tables and files that it made, what of the run is outdated now, and the next command."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.commands import stage_command
from ..core.run import Run

#: The tables and files of the run.
TABLES = ("accuracy", "verdict", "engines", "sizes", "stages", "modules")
MODEL = ("model", "model/model.onnx", "model/model.fp32.onnx", "scales.json")
FILES = (
    *MODEL,
    "baselines",
    "engines",
    "accuracy.json",
    "evaluation.json",
    "bench.json",
    "triton",
    "report.html",
    "report.ipynb",
)


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
    "validate": Made(("accuracy", "verdict"), ("accuracy.json",)),
    "triton": Made((), ("triton",)),
    "report": Made(("verdict",), ("report.html", "report.ipynb")),
}


def ending(run: Run) -> list[str]:
    """Say which results of `run` are outdated, with the command of each, and what comes next."""
    from ..validate.report.verdict import next_steps, report_verdict, standing

    stages = run.record().stages
    lines = [
        f"outdated, since the run has changed: {name}; `{stage_command(name, run.root)}` does it again"
        for name in stages
        if run.is_stale(name)
    ]
    if "quantize" in stages and not run.is_stale("quantize"):
        first, *_ = next_steps(report_verdict(run), standing(run))
        lines.append(f"next: `{first.command}`   {first.why}")
    return lines
