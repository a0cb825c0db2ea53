"""Tell which of its two jobs `fp8q compare` was asked for: a run and what answers for it, two checkpoints, or
a checkpoint and a server.
"""

from pathlib import Path

from ..core.errors import InputError
from ..core.run import Run
from ..options import CompareOptions, PairOptions
from ..options.declare import first_changed
from ..stages.compare import check_one_subject


def is_original(path: Path) -> bool:
    """Tell whether `path` is a checkpoint, to be compared with another one, and no run."""
    return not Run(path).exists() and (path / "config.json").is_file()


def check_endpoint_options(options: CompareOptions, pair: PairOptions) -> None:
    """Raise InputError for options of a comparison of modules, which a server does not show, or of a checkpoint."""
    if options.model is not None:
        check_one_subject(options)
    if option := first_changed(pair, ["module_windows"]):
        raise InputError(option, "is for two checkpoints: no server shows its modules", "leave it out")


def candidate_of(original: Path, options: CompareOptions) -> Path:
    """Return the candidate that `options` name for `original`; raise InputError for a server's options, or none."""
    if option := first_changed(options, [name for name in options.declared() if name != "model"]):
        raise InputError(option, f"is for a server, and {original} is compared with a checkpoint", "leave it out")
    if options.model is None:
        raise InputError(
            original, "is a checkpoint, and nothing to compare it with is given", "give --model DIR or --url URL"
        )
    return options.model


def refuse_for_run(run: Path, options: PairOptions) -> None:
    """Raise InputError for options of two checkpoints where `run` is a run, which has its own text and results."""
    if option := first_changed(options, options.declared()):
        raise InputError(
            option,
            f"is for two checkpoints, and {run} is a run or no checkpoint",
            "leave it out, or give the original checkpoint's directory",
        )
