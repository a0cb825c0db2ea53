"""A run, opened to work on what was made of it: by a command, which asks for its extra, locks, and takes notes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from ...core.errors import InputError
from ...core.reporter import Reporter
from ...core.run import Run
from ..pipeline.stages import MEASURE
from ..pipeline.steps import CALIBRATE_MODULES, Notes, alone, needs

Given = ParamSpec("Given")
Made = TypeVar("Made")


def open_run(path: Path) -> Run:
    """The run directory at `path`; raises InputError when there is none, or when only some of the batches were measured
    into it (`--batches`): everything after measuring is made of all.
    """
    found = Run(Path(path))
    if not found.root.exists():
        raise InputError(
            f"{path}: there is no such directory; make a run with `fp8q calibrate MODEL --data TEXT --out {path}`"
        )
    if not found.exists():
        raise InputError(
            f"{path}: is no fp8q run (there is no run.json); make one with `fp8q calibrate MODEL --data TEXT --out "
            f"{path}`"
        )
    if MEASURE.name in found.record().stages and (batches := found.options(MEASURE).batches):
        raise InputError(
            f"{found.root}: holds what --batches {':'.join(map(str, batches))} measured; add it to the other batches' "
            "runs with `fp8q merge`, or run `fp8q calibrate` without --batches"
        )
    return found


@dataclass(frozen=True)
class Command(Generic[Given, Made]):
    """A function of a run, its notes and what else the command is given.

    `writes`: it works alone on the run; `modules`: what it imports of the extra `calibrate`.
    """

    function: Callable[Concatenate[Run, Notes, Given], Made]
    writes: bool
    modules: Sequence[str]

    def __call__(self, run: Run, notes: Notes, *given: Given.args, **named: Given.kwargs) -> Made:
        """Call the function, for whoever has opened and locked the run."""
        return self.function(run, notes, *given, **named)

    def at(self, path: Path, progress: Reporter, *given: Given.args, **named: Given.kwargs) -> Made:
        """Call the function for the run at `path`. Raises InputError where there is none, or another process works
        there; BackendError where a library is missing.
        """
        with alone(Run(Path(path))) if self.writes else nullcontext():
            needs("calibrate", self.modules)
            return self.function(open_run(path), Notes(progress), *given, **named)


def opens_run(
    *, writes: bool = True, modules: Sequence[str] = CALIBRATE_MODULES
) -> Callable[[Callable[Concatenate[Run, Notes, Given], Made]], Command[Given, Made]]:
    """Make a command of a function: see `Command`."""
    return lambda function: Command(function, writes, modules)
