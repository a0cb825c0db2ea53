"""Open a run for a command that works on it: check extras, lock, collect notes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ...core.errors import Fp8qError, InputError
from ...core.reporter import Reporter
from ...core.run import Run
from ..pipeline.stage import CALIBRATE_MODULES, Notes, alone, needs
from ..pipeline.stages import MEASURE


def open_run(path: str | Path) -> Run:
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
def naming(path: str | Path) -> Iterator[None]:
    """Put the `path` of the run in the place of RUN in the commands that an error of the block names."""
    try:
        yield
    except Fp8qError as error:
        error.fill_run(Path(path))
        raise


@contextmanager
def run_at(
    path: str | Path, progress: Reporter, *, writes: bool = True, modules: Sequence[str] = CALIBRATE_MODULES
) -> Iterator[tuple[Run, Notes]]:
    """Open the run at `path` for a command: its libraries are looked for, then the block gets the run and its notes.

    `writes`: the run is locked during the block; `modules`: the import names of the libraries that the command needs.
    Raises InputError where there is no run or another process works there; BackendError where a library is missing.
    """
    with naming(path), alone(Run(Path(path))) if writes else nullcontext():
        needs("calibrate", modules)
        yield open_run(path), Notes(progress)


@contextmanager
def run_into(out: str | Path, progress: Reporter) -> Iterator[tuple[Run, Notes]]:
    """Open the directory `out` for a command that makes a run in it, or goes on with one, under its lock.

    Raises BackendError where a library of the extra `calibrate` is missing.
    """
    run = Run(Path(out))
    with naming(out), alone(run):
        needs("calibrate", CALIBRATE_MODULES)
        yield run, Notes(progress)
