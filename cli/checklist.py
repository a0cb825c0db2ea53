"""Show the results of `fp8q doctor`: this machine, or the checklist of a run."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, api
from ..core.columns import Column, Table, magnitude, share
from ..options import DoctorOptions
from ..validate.advice.checkup import check_table, remedies
from ..validate.report.rows import layer_of
from . import doctor

if TYPE_CHECKING:
    from ..validate.advice.checkup import Checkup
    from .console import Terminal

#: The checks that the table by depth has, and how each is written.
BY_DEPTH = {
    "norm_inputs": ("norm input", magnitude),
    "attention_logits": ("logit", magnitude),
    "saturation": ("saturation", share),
    "underflow": ("underflow", share),
    "product_errors": ("worst product's error", share),
    "hidden_states": ("hidden states' error", share),
}


def machine(speak: "Terminal", as_json: bool) -> None:
    """Show what is here."""
    findings = doctor.examine()
    if as_json:
        sys.stdout.write(
            json.dumps({"fp8q": __version__, "findings": [asdict(finding) for finding in findings]}) + "\n"
        )
    else:
        rows = [(finding.name, finding.version or "missing", finding.good_for, finding.remedy) for finding in findings]
        speak.table(f"fp8q {__version__} on this machine", ("what", "version", "good for", "to get it"), rows)


def show_checklist(speak: "Terminal", run: Path, options: DoctorOptions, as_json: bool) -> None:
    """Show the checklist of `run`: the worst last, where a terminal leaves the eye. Raises GateError where one is
    bad.
    """
    from ..validate.advice.checkup import refuse_bad
    from . import views

    outcome = api.doctor(run, options, speak)
    if as_json:
        views.emit(outcome.model_dump(by_alias=True, mode="json"))
    else:
        ran = f"{outcome.windows} windows, {outcome.tokens:,} tokens" if outcome.windows else "the model was not run"
        for table in (depth_table(outcome), check_table(outcome.checks, ran)):
            if table.rows:
                views.draw_table(speak, table)
        for line in remedies(outcome.checks):
            speak.say(line)
    refuse_bad(outcome)


def depth_table(checkup: "Checkup") -> Table[tuple[int, dict[str, float]]]:
    """Tabulate by depth: the largest value of each decoder layer's modules."""
    layers: dict[int, dict[str, float]] = {}
    for check in checkup.checks:
        for at in check.by_depth if check.check in BY_DEPTH else []:
            layer = layer_of(at.module)
            if layer is not None and at.value is not None:
                values = layers.setdefault(layer, {})
                values[check.check] = max(at.value, values.get(check.check, 0.0))

    def column(check: str, title: str, write: Callable[[float], str]) -> Column[Any]:
        return Column[Any](title, lambda row: row[1].get(check), write)

    columns = (
        Column[Any]("layer", lambda row: row[0]),
        *(column(check, title, write) for check, (title, write) in BY_DEPTH.items()),
    )
    return Table("By depth", sorted(layers.items()), columns, "The model has no numbered layers.")
