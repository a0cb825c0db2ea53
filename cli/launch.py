"""Understand the words of a command line, and run the command that they are."""

import sys
from collections.abc import Callable, Sequence
from inspect import BoundArguments

from cyclopts import App, ArgumentCollection

from ..calibrate.ranks.torchrun import process_rank
from ..core.errors import InputError
from . import config
from .commands import app

#: The commands that several processes can run together.
TOGETHER = ("calibrate", "distill", "run")
#: The flags that show a help; the last shows every option.
HELP_FLAGS = frozenset(("--help", "-h", "--help-all"))

for position, name in enumerate(app):
    app[name].sort_key = position  # the help lists the commands as they stand in their file, not by name


def launch(words: Sequence[str]) -> int:
    """Run the command that `words` are; returns an exit code.

    Raises cyclopts' CycloptsError for wrong usage, beside all that a command raises.
    """
    if HELP_FLAGS.intersection(words):
        from .help_pages import set_help

        words = set_help(app, words)
    if not words:
        app.help_print([])
        return InputError.exit_code
    action, call, understood = understand(words)
    for name, arguments in understood.items():
        if (ranks := process_rank().ranks) > 1 and name not in TOGETHER:
            raise InputError(
                f"fp8q {name}",
                f"is the work of one process, and {ranks} ranks were started",
                "run it without torchrun, or unset RANK",
            )
        if getattr(call.arguments.get("common"), "print_config", False):
            sys.stdout.write(config.written(arguments, call, name) if process_rank().rank == 0 else "")
            return 0
    action(*call.args, **call.kwargs)
    return 0


def understand(words: Sequence[str]) -> tuple[Callable[..., None], BoundArguments, dict[str, ArgumentCollection]]:
    """The function that `words` call and what they call it with, options from a file included; and the command's
    arguments by its name (none for --help and --version, which are no commands).
    """
    understood: dict[str, ArgumentCollection] = {}

    def from_file(_: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        config.fill(arguments, commands[0])
        understood[commands[0]] = arguments

    app.config = (from_file,)
    action, call, _ = app.parse_args(words, exit_on_error=False, print_error=False, help_on_error=False)
    call.apply_defaults()
    return action, call, understood
