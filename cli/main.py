"""End the program: whatever a command raises is one unwrapped line on standard error and an exit code."""

import os
import signal
import sys
import traceback

from ..core.errors import INTERRUPTED, BackendError, Fp8qError, InputError, is_want_of_memory
from .signals import deafen, handle_signals, line


def main() -> None:
    """Run the command line in this process, which is its own: signals and streams are set up for it, and it ends here.

    Nothing is imported before the signals are: half of a short command's time is imports.
    """
    handle_signals()
    from . import console, streams

    streams.settle_streams()
    console.tame_warnings()
    code = command()
    deafen()
    # threads of torch may still wait for a rank that is gone, and Python would wait for them
    if code and os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)
    sys.exit(code)


def command() -> int:
    """Run the command that `sys.argv` holds; every failure is one unwrapped line on standard error. Returns the exit
    code.
    """
    from . import streams
    from .console import complain

    try:
        code = _run()
        streams.flush()
    except BaseException as error:  # noqa: BLE001  # not all that libraries raise is an Exception: a panic in Rust is none
        code, line = ended(error)
        if line is not None:
            complain(line)
        try:
            streams.flush()
        except streams.OutputClosedError:
            streams.give_up()
    return code


def _run() -> int:
    """Run the command; returns its exit code, or raises what it does."""
    from ..calibrate.ranks.torchrun import process_rank

    process_rank()  # variables that make no sense
    for argument in sys.argv[1:]:
        if not argument.isascii() and any("\udc80" <= character <= "\udcff" for character in argument):
            raise InputError(
                argument, "is no text in UTF-8, and names are kept in files that are", "rename what is called so"
            )
    from .launch import launch

    return launch(sys.argv[1:])


def ended(error: BaseException) -> tuple[int, str | None]:
    """The exit code for what a command raised, and the line to say; None where all has been said, or there is nobody to
    say it to.
    """
    from cyclopts import CycloptsError, MissingArgumentError
    from safetensors import SafetensorError

    from ..core.files import refusal
    from .streams import OutputClosedError

    if isinstance(error, OSError | SafetensorError) and (refused := refusal(error)):
        error = refused
    if isinstance(error, Fp8qError):
        return error.exit_code, None if _reported_by_other_rank(error) else str(error)
    if isinstance(error, OutputClosedError):
        return 1, None
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, line(signal.SIGINT)
    if isinstance(error, SystemExit):
        return int(error.code or 0), None
    if isinstance(error, MissingArgumentError) and not error.keyword and error.argument and error.command_chain:
        help_page = f"fp8q {' '.join(error.command_chain)} --help"
        return InputError.exit_code, f"{error.argument.name} is missing; `{help_page}` has examples"
    if isinstance(error, CycloptsError):
        said = str(error)
        end = "" if said.endswith((".", "?")) else "."
        return InputError.exit_code, f"{said}{end} See `fp8q --help`, or --help after a command."
    if os.environ.get("FP8Q_DEBUG"):
        traceback.print_exception(error)
    if remedy := exhausted(error):
        return BackendError.exit_code, remedy
    kind = type(error).__name__
    return 1, f"{kind}: {error} (a fault of fp8q: run again with FP8Q_DEBUG=1 and report what it prints)"


def exhausted(error: BaseException) -> str | None:
    """The line for a want of memory, whoever tells it, or of Python's stack; None for anything else."""
    if isinstance(error, RecursionError):
        return (
            "something read is nested more deeply than Python can follow (RecursionError); FP8Q_DEBUG=1 shows where, "
            "simplify that file"
        )
    if is_want_of_memory(error):
        return (
            f"there is not enough memory ({str(error).strip() or 'MemoryError'}); give the process more, calibrate "
            "with --stream or a smaller --batch-size, or validate with a smaller --context"
        )
    return None


def _reported_by_other_rank(error: BaseException) -> bool:
    """Tell whether another rank has said it, on its own standard error."""
    from ..calibrate.ranks.torchrun import process_rank

    return bool(getattr(error, "reported", False)) and process_rank().rank > 0
