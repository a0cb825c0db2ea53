"""A run, opened to work on what was made of it: the one place that says it is none, or only a part of one."""

from pathlib import Path

from ...core.errors import InputError
from ...core.run import Run
from ..pipeline.stages import MEASURE


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
