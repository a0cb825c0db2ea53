"""Refuse before the first stage writes what a later stage would refuse.

A run that ends in a refusal after an hour has cost an hour, and leaves a directory that is half complete.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..calibrate.input.untrusted import exists, local_path
from ..calibrate.measure.chain import Chain
from ..calibrate.model.source import Source
from ..core.errors import InputError
from ..core.reporter import SILENT
from ..core.run import Run
from ..options import CalibrateOptions, ExportOptions, ScaleOptions
from ..quantize.sensitivity.backward import check_chain
from ..quantize.sensitivity.output_gradients import LayerwiseFirstTokens, OutputMoments
from ..quantize.weights.sequential import check_sequential
from .corpus import Collected
from .costliest import check_costliest
from .gradients import FIRST_TOKENS_PASS
from .measure import check_queries, streamed
from .pipeline.stage import Notes, device
from .shared.adapters import check_attention


def check_out(run: Run) -> None:
    """Raise InputError when the directory of `run` can be neither written nor created."""
    above = directory_above(run)
    if not above.is_dir():
        raise InputError(run.root, f"cannot be made, since {above} is no directory", "name another with --out")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(run.root, "permission denied", "name a directory you may write to")


def directory_above(run: Run) -> Path:
    """Return the directory of `run`, or the one above it that exists."""
    above = local_path(run.root).absolute()
    while not exists(above):
        above = above.parent
    return above


def check_calibrate(source: Source, options: CalibrateOptions, export: ExportOptions) -> None:
    """Raise InputError for a model that has to be streamed and cannot be, and for options that streaming does not
    support.
    """
    if export.precision != "fp8":
        raise InputError(
            f"--precision {export.precision}", "is made of a finished run", "calibrate first, then `fp8q export`"
        )
    check_attention([adapter.name for adapter in source.adapters], export, options)
    if options.weight_rounding == "sequential":
        check_sequential(source, device())
    elif streamed(source, options.stream, Notes(SILENT)):
        Chain(source, device())
    check_costliest(source, options)
    if options.weighs_first_token and FIRST_TOKENS_PASS.goes_by_layer(source, options.stream):
        check_chain(source, device(), LayerwiseFirstTokens.without)
    if options.weighs_outputs:
        check_chain(source, device(), OutputMoments.without)
    asking = "--attention fp8" if export.attention == "fp8" else "--q-scale" if options.q_scale else None
    if asking:
        check_queries(source, asking, Notes(SILENT))


class OnlyPlannedError(Exception):
    """The plan was told, and nothing else was asked for."""


class LaterStages(Protocol):
    """The stages after a calibration: what they would refuse when it is done, and what a call before decided."""

    def check_options(self, run: Run) -> None:
        """Raise the errors that their options alone would cause."""

    def check_graph(self, run: Run, no_graph: str | None) -> None:
        """Raise InputError where they need an ONNX graph and there is none; `no_graph`: why none can be made."""

    def check_fit(self, source: Source, collected: Collected) -> None:
        """Raise InputError for options that do not fit model and text."""

    def plan(self, run: Run, source: Source, collected: Collected, moments: bool, spent: bool) -> None:
        """Tell what each stage takes here, where second `moments` are gathered, and `spent` layer by layer; raises
        InputError for a disk without the room, and OnlyPlannedError where the plan is all that was asked for.
        """

    def chosen_options(self, run: Run) -> ScaleOptions:
        """The options of scales for `run`: of the form that they have found, or those that were asked for."""


@contextmanager
def nothing_left(run: Run) -> Iterator[None]:
    """Remove the files that an InputError in this block leaves of a run that did not exist before."""
    fresh = not run.exists()
    made = not run.root.exists()
    before = set() if made else set(run.root.iterdir())
    try:
        yield
    except InputError:
        if fresh and run.root.is_dir():
            _take_away(run.root, before, made)
        raise


def _take_away(root: Path, before: set[Path], new_directory: bool) -> None:
    if new_directory:
        shutil.rmtree(root, ignore_errors=True)  # a rank may still be writing there
        return
    for path in set(root.iterdir()) - before:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
