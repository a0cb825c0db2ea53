"""Tell which of its two jobs `fp8q compare` was asked for: a run and what answers for it, or two checkpoints."""

from pathlib import Path

from ..core.errors import InputError
from ..core.run import Run
from ..options import CompareOptions, PairOptions
from ..options.declare import first_given


def is_original(path: Path) -> bool:
    """Tell whether `path` is a checkpoint, to be compared with another one, and no run."""
    return not Run(path).exists() and (path / "config.json").is_file()


def candidate_of(original: Path, options: CompareOptions) -> Path:
    """Return the candidate that `options` name for `original`; raise InputError for a server, its options, or none."""
    if options.url is not None:
        raise InputError(
            f"--url {options.url}",
            f"a server is compared with a run, and {original} is a checkpoint",
            "make a run of it with `fp8q calibrate`, or give --model",
        )
    if option := first_given(options, [name for name in options.declared() if name != "model"]):
        raise InputError(option, f"is for a run, and {original} is a checkpoint", "leave it out")
    if options.model is None:
        raise InputError(original, "is a checkpoint, and nothing to compare it with is given", "give --model DIR")
    return options.model


def refuse_for_run(run: Path, options: PairOptions) -> None:
    """Raise InputError for options of two checkpoints where `run` is a run, which has its own text and results."""
    if option := first_given(options, options.declared()):
        raise InputError(
            option,
            f"is for two checkpoints, and {run} is a run or no checkpoint",
            "leave it out, or give the original checkpoint's directory",
        )
