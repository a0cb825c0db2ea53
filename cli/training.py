"""Show a training log: `fp8q inspect LOG` and `fp8q report LOG`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .. import api
from ..core.errors import InputError
from ..options import GradientFormat
from ..options.declare import Options, first_changed

if TYPE_CHECKING:
    from .console import Terminal


def takes_log(path: Path, gradients: GradientFormat | None) -> bool:
    """Tell whether `path` is a training log; raises InputError for --gradients with anything else."""
    from ..quantize.training.training_log import is_log

    if is_log(path):
        return True
    if gradients is not None:
        raise InputError(
            f"--gradients {gradients}",
            f"is for a training log, and {path} has no training.jsonl",
            "`fp8q.api.watch` writes one",
        )
    return False


def refuse_run_options(options: Options, names: Iterable[str], **others: object) -> None:
    """Raise InputError for an option that is for a run, and was given with a training log."""
    option = first_changed(options, names) or next((f"--{name}" for name, value in others.items() if value), None)
    if option:
        raise InputError(option.split()[0], "is for a run, and this is a training log", "leave it out")


def show_log(speak: "Terminal", path: Path, gradients: GradientFormat, as_json: bool) -> None:
    """Show the log at `path` by depth, and the checklist: the worst last, where a terminal leaves the eye."""
    from ..validate.advice.checkup import check_table
    from ..validate.report.training_page import advice, ran, sentence, training_depth_table
    from . import views

    inspected = api.inspect_training(path, gradients)
    if as_json:
        views.emit(inspected.checkup.model_dump(by_alias=True, mode="json"))
        return
    checks = inspected.checkup.checks
    for table in (training_depth_table(inspected.log, gradients), check_table(checks, ran(inspected.checkup))):
        if table.rows:
            views.draw_table(speak, table)
    for line in (*advice(checks)[::-1], f"{sentence(inspected.checkup)}."):
        speak.say(line)


def show_page(speak: "Terminal", path: Path, gradients: GradientFormat, as_json: bool) -> None:
    """Write the page of the log at `path`, and tell where it is."""
    from . import views

    written = api.report_training(path, gradients)
    if as_json:
        views.emit({"page": str(written)})
    else:
        speak.say(f"Wrote {written}.")
