"""How the program ends: whatever a command raises is one unwrapped line on standard error and an exit code."""

import os
import sys
import traceback

from cyclopts import CycloptsError

from ..calibrate.ranks.place import place
from ..errors import Fp8qError, InputError
from .commands import launch


def main() -> None:
    """Run the command line; every failure is one unwrapped line on standard error."""
    try:
        here = place()
    except InputError as error:
        sys.exit(complain(str(error), error.exit_code))
    try:
        code = launch(sys.argv[1:])
    except KeyboardInterrupt:
        code = complain("interrupted; what is finished is kept, and the same command goes on from there", 1)
    except CycloptsError as error:
        said, code = str(error), InputError.exit_code
        complain(
            f"{said}{'' if said.endswith(('.', '?')) else '.'} See `fp8q --help`, or --help after a command.", code
        )
    except Fp8qError as error:
        told = here.rank and getattr(error, "told", False)  # by the rank that failed
        code = error.exit_code if told else complain(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:  # noqa: BLE001  # the last line of defence: a traceback helps few
        if os.environ.get("FP8Q_DEBUG"):
            traceback.print_exc()
        code = complain(
            f"{type(error).__name__}: {error} (a fault of fp8q: run again with FP8Q_DEBUG=1 and report what it prints)",
            1,
        )
    # threads of torch may still wait for a rank that is gone, and Python would wait for them
    if code and here.ranks > 1:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def complain(message: str, code: int) -> int:
    """Print one line on standard error; returns `code`."""
    sys.stderr.write(f"fp8q: {' '.join(message.split())}\n")
    return code
