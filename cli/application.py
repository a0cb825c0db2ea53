"""The application of all commands, with its help and version, their terminal, and the summary at the end.

Results go to standard output (one JSON object with --json), everything else to standard error. Exit codes: 0 good, 2
wrong usage or input, 3 a gate not met, 4 a runtime or library missing or failed, 130 interrupted (Ctrl-C), 143 stopped
by SIGTERM, 1 anything else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App, Parameter

from .. import __version__
from ..calibrate.ranks.torchrun import process_rank
from ..core.errors import GateError, UnfinishedError
from ..options.declare import OPTIONS
from .arguments import Common

if TYPE_CHECKING:
    from .console import Terminal

app = App(
    name="fp8q",
    help="From a Hugging Face checkpoint to a proven FP8 TensorRT engine, and what it costs in accuracy.",
    help_epilogue=(
        "Exit codes: 0 good, 2 wrong usage or input, 3 a gate not met, 4 a runtime or library missing or failed, 130 "
        "interrupted (Ctrl-C), 143 stopped by SIGTERM, 1 anything else."
    ),
    help_format="plaintext",
    help_flags=("--help", "-h"),
    version=f"fp8q {__version__}",
    group_parameters=OPTIONS,
    # of an option given twice the last counts, as wherever a command is made longer at its end
    default_parameter=Parameter(
        allow_repeating=True, negative=(), show_default=lambda value: None if value in (None, False, ()) else value
    ),
)


def terminal() -> "Terminal":
    """The reporter that draws on this terminal; of several ranks the first alone speaks."""
    from .console import Terminal

    return Terminal(quiet=process_rank().rank > 0)


@contextmanager
def showing(speak: "Terminal", path: Path, common: Common, command: str) -> Iterator[None]:
    """Show what `command` made of the run at `path` when the block ends well, with a gate that was not met, or with a
    runtime that failed beside others; of several ranks the first does.
    """
    from . import views

    if process_rank().rank:
        yield
        return
    try:
        yield
    except (GateError, UnfinishedError):
        views.show_summary(speak, path, common.as_json, command)
        raise
    views.show_summary(speak, path, common.as_json, command)
