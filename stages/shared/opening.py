"""Open a run for a command that works on it: check extras, lock, collect notes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from ...core.errors import Fp8qError, InputError
from ...core.reporter import Reporter
from ...core.run import Run
from ..pipeline.stages import MEASURE
from ..pipeline.steps import CALIBRATE_MODULES, Notes, alone, needs

Given = ParamSpec("Given")
Made = TypeVar("Made")


def open_run(path: Path) -> Run:
    """The run directory at `path`; raises InputError when there is none, or when it measured some of the batches only
    (`--batches`), since everything after measuring needs all.
    """
    run = Run(Path(path))
    if not run.root.exists():
        raise InputError(
            path, "there is no such directory", f"make a run with `fp8q calibrate MODEL --data TEXT --out {path}`"
        )
    if not run.exists():
        if (run.root / "config.json").is_file():
            raise InputError(
                path,
                "is a checkpoint, and a run is wanted here",
                f"make one with `fp8q calibrate {path} --data TEXT --out RUN`, and give its directory",
            )
        raise InputError(
            path,
            "is no fp8q run (there is no run.json)",
            f"make one with `fp8q calibrate MODEL --data TEXT --out {path}`",
        )
    if MEASURE.name in run.record().stages and (batches := run.options(MEASURE).batches):
        raise InputError(
            run.root,
            f"holds what --batches {':'.join(map(str, batches))} measured",
            "add it to the other batches' runs with `fp8q merge`, or run `fp8q calibrate` without --batches",
        )
    return run


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the `path` of the run in the place of RUN in the commands that an error of the block names."""
    try:
        yield
    except Fp8qError as error:
        error.fill_run(Path(path))
        raise


@dataclass(frozen=True)
class Command(Generic[Given, Made]):
    """A function of a run, its notes and further arguments.

    `writes`: it locks the run; `modules`: its imports from the extra `calibrate`.
    """

    function: Callable[Concatenate[Run, Notes, Given], Made]
    writes: bool
    modules: Sequence[str]

    def __call__(self, run: Run, notes: Notes, *given: Given.args, **named: Given.kwargs) -> Made:
        """Call the function, for a caller that has opened and locked the run."""
        return self.function(run, notes, *given, **named)

    def at(self, path: Path, progress: Reporter, *given: Given.args, **named: Given.kwargs) -> Made:
        """Call the function for the run at `path`.

        Raises InputError where there is no run or another process works there; BackendError where a library is missing.
        """
        with naming(path), alone(Run(Path(path))) if self.writes else nullcontext():
            needs("calibrate", self.modules)
            return self.function(open_run(path), Notes(progress), *given, **named)


def command(
    *, writes: bool = True, modules: Sequence[str] = CALIBRATE_MODULES
) -> Callable[[Callable[Concatenate[Run, Notes, Given], Made]], Command[Given, Made]]:
    """Make a `Command` of a function."""
    return lambda function: Command(function, writes, modules)
