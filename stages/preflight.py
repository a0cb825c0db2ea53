"""Refuse before the first stage writes what a later stage would refuse.

A run that ends in a refusal after an hour has cost an hour, and leaves a directory that is half complete.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..calibrate.input.untrusted import exists, local_path
from ..calibrate.measure.chain import Chain
from ..calibrate.model.source import Source
from ..calibrate.text.corpus import lower_default
from ..calibrate.text.packing import Packing
from ..core.errors import InputError
from ..core.reporter import SILENT
from ..core.run import Run
from ..export.engine.build import resolve
from ..options import DEFAULT_SEQ_LEN, CalibrateOptions, ExportOptions, RunOptions
from ..quantize.scales.policy import ModelGemms
from ..quantize.sensitivity.backward import check_chain
from ..quantize.sensitivity.first_tokens import WITHOUT_LAYERS
from ..quantize.weights.sequential import check_sequential
from .corpus import Collected
from .costliest import check_costliest
from .export import LEFT_OUT
from .first_tokens import gradients_by_layer
from .measure import streamed
from .other_text import cut_for
from .pipeline.stage import Notes, device
from .shared.adapters import check_attention
from .shared.gates import check_comparable
from .validate import behind_a_prompt, check_accumulator, check_enough, check_runtimes


def check_out(run: Run) -> None:
    """Raise InputError when the directory of `run` can be neither written nor created."""
    above = local_path(run.root).absolute()
    while not exists(above):
        above = above.parent
    if not above.is_dir():
        raise InputError(run.root, f"cannot be made, since {above} is no directory", "name another with --out")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(run.root, "permission denied", "name a directory you may write to")


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
    if options.weighs_first_token and gradients_by_layer(source, options.stream):
        check_chain(source, device(), WITHOUT_LAYERS)
    asking = "--attention fp8" if export.attention == "fp8" else "--q-scale" if options.q_scale else None
    if asking and streamed(source, None, Notes(SILENT)):
        raise InputError(
            asking,
            f"queries are measured with the whole of {source.name} in memory, which does not hold it",
            "leave it out",
        )


def check_later(run: Run, later: RunOptions) -> None:
    """Raise the errors that the options of later stages alone would cause.

    These are a gate without anything to compare, and graphs that no earlier stage writes.
    """
    engine, validate = later.engine, later.validate
    check_comparable(validate.chosen, validate)
    check_accumulator(validate)
    done = run.record().stages
    for precision in (*validate.baselines, *([engine.precision] if engine.precision != "fp8" else [])):
        if f"export-{precision}" not in done:
            raise InputError(
                run.root,
                f"has no graph in {precision}, which is made of a finished run",
                f"leave it out of this one, and run `fp8q export {run.root} --precision {precision}` after it",
            )


def check_graph(run: Run, gemms: ModelGemms, later: RunOptions | None, notes: Notes) -> None:
    """Note that no ONNX graph can be made of the model, and raise InputError for a runtime of `later` stages that needs
    one, also where none is asked for. Otherwise raise what building the engine would: a missing target or runtime.
    """
    left_out = LEFT_OUT if later and not later.export.graph else None
    if later and (reason := gemms.no_graph or left_out):
        check_runtimes(later.validate.runtimes, run, reason)
    elif later:
        resolve(later.engine)
    if gemms.no_graph is not None:
        notes.note(f"{gemms.no_graph}: no ONNX graph can be made of it, and what is written is the checkpoint, model/")


def check_fit(source: Source, collected: Collected, later: RunOptions) -> None:
    """Raise what `later` stages would for options that do not fit model and text: lengths beyond the model's positions,
    sizes that do not fit the length, text shorter than a window.
    """
    engine, validate, limit = later.engine, later.validate, source.served_positions
    length = lower_default("--max-seq-len", engine.max_seq_len, DEFAULT_SEQ_LEN, limit, "the model's positions", SILENT)
    replace(engine, max_seq_len=length)  # its constructor checks the sizes against the length
    packing = Packing(collected.windows.shape[1], tuple(collected.opening.prefix))
    tails = any(rule.form.tail for rule in later.calibrate.form_rules)
    window = validate.context or min(packing.size, limit or packing.size)
    validate = behind_a_prompt(validate, window, tails=tails)
    tokens = cut_for(collected.evaluation, collected.names[1], validate, packing, limit, SILENT)
    check_enough(tokens, validate, Notes(SILENT), "--eval-data")


@contextmanager
def nothing_left(run: Run) -> Iterator[None]:
    """Remove the files that an InputError in this block leaves of a run that did not exist before."""
    fresh, made = not run.exists(), not run.root.exists()
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
