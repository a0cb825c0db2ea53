"""Show the results of `fp8q doctor`: this machine, or the checklist of a run."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, api
from ..core.columns import Column, Table, magnitude, share, text_column
from ..options import DoctorOptions
from ..validate.report.rows import layer_of
from . import doctor

if TYPE_CHECKING:
    from ..validate.advice.checkup import Check, Checkup
    from .console import Terminal

#: Entries of one check that are shown; the rest are counted.
LISTED = 6
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
    found = doctor.examine()
    if as_json:
        sys.stdout.write(json.dumps({"fp8q": __version__, "findings": [asdict(finding) for finding in found]}) + "\n")
    else:
        rows = [(finding.name, finding.version or "missing", finding.good_for, finding.remedy) for finding in found]
        speak.table(f"fp8q {__version__} on this machine", ("what", "version", "good for", "to get it"), rows)


def show_checklist(speak: "Terminal", run: Path, options: DoctorOptions, as_json: bool) -> None:
    """Show the checklist of `run`: the worst last, where a terminal leaves the eye. Raises GateError where one is
    bad.
    """
    from ..validate.advice.checkup import refuse_bad
    from . import views

    found = api.doctor(run, options, speak)
    if as_json:
        views.emit(found.model_dump(by_alias=True, mode="json"))
    else:
        for table in (depth_table(found), check_table(found)):
            if table.rows:
                views.draw_table(speak, table)
        for line in remedies(found):
            speak.say(line)
    refuse_bad(found)


def shown_entries(found: "Checkup") -> "list[Check]":
    """The entries that are shown, the worst first: of one check and verdict the first few."""
    counts: dict[tuple[str, str], int] = {}
    shown = []
    for each in found.checks:
        key = (each.check, each.verdict)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= LISTED:
            shown.append(each)
    return shown


def check_table(found: "Checkup") -> "Table[Check]":
    """Every check, the worst last."""
    columns = (
        text_column("verdict"),
        text_column("check"),
        text_column("module"),
        text_column("found", "said"),
    )
    left = len(found.checks) - len(shown_entries(found))
    ran = f"{found.windows} windows, {found.tokens:,} tokens" if found.windows else "the model was not run"
    title = f"Checklist ({ran}{f'; {left} more entries with --json' if left else ''})"
    return Table(title, shown_entries(found)[::-1], columns, "Nothing to check.")


def remedies(found: "Checkup") -> list[str]:
    """List the commands that help, a line each, the worst last."""
    lines: dict[str, None] = {}
    for each in shown_entries(found):
        if each.remedy:
            lines.setdefault(f"{each.verdict}: {each.module or each.check}: {each.remedy}")
    return [*lines][::-1]


def depth_table(found: "Checkup") -> Table[tuple[int, dict[str, float]]]:
    """Tabulate by depth: the largest value of each decoder layer's modules."""
    layers: dict[int, dict[str, float]] = {}
    for each in found.checks:
        for at in each.by_depth if each.check in BY_DEPTH else []:
            layer = layer_of(at.module)
            if layer is not None and at.value is not None:
                values = layers.setdefault(layer, {})
                values[each.check] = max(at.value, values.get(each.check, 0.0))

    def column(check: str, title: str, write: Callable[[float], str]) -> Column[Any]:
        return Column[Any](title, lambda row: row[1].get(check), write)

    columns = (
        Column[Any]("layer", lambda row: row[0]),
        *(column(check, title, write) for check, (title, write) in BY_DEPTH.items()),
    )
    return Table("By depth", sorted(layers.items()), columns, "The model has no numbered layers.")
