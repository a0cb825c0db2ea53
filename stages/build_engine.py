"""The stages `build-engine` and `build-engine-<precision>`: an engine for each target, with its proof."""

from collections.abc import Iterable
from dataclasses import replace

from ..calibrate.text.corpus import lower_default
from ..core.errors import InputError
from ..core.run import Run
from ..export.engine.build import build_engines, resolve
from ..export.engine.info import EngineInfo, check_share, load_engines
from ..options import DEFAULT_SEQ_LEN, EngineOptions
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.scheme import tails_of
from .other_text import positions
from .pipeline.stage import NO_FACTS, Key, Notes
from .pipeline.stages import build_engine_stage
from .shared.adapters import check_adapter, note_base_alone
from .shared.model_files import files_of


def build_engine(run: Run, notes: Notes, options: EngineOptions) -> list[EngineInfo]:
    """Build the engines of `options.precision` where they are not current, and return their records.

    Raises GateError, after all is written, for an engine of FP8 with too few FP8 GEMMs.
    """
    run.refuse_without_graph()
    check_adapter(run, options.adapter)
    if options.adapter is None:
        note_base_alone(run, "these engines run", notes)
    options = resolve(options)
    precision = options.precision
    stage = build_engine_stage(options.precision, options.adapter)
    inputs = files_of(run, precision)
    scales = load_scales(run) if precision == "fp8" else None
    max_seq_len = lower_default(
        "--max-seq-len", options.max_seq_len, DEFAULT_SEQ_LEN, positions(run), "the model's positions", notes
    )
    options = replace(options, max_seq_len=max_seq_len)
    if scales is not None:
        _check_calls(tails_of(scales.forms).values(), options, max_seq_len)
    key = Key(inputs, options, NO_FACTS)
    if not stage.is_current(run, key):
        with stage.writing(run, key, notes) as log:
            forms = {module: scales.forms[module] for module in scales.weights} if scales else {}
            log.outputs += build_engines(run, forms, options, notes)
    built = load_engines(run, precision, options.adapter)
    if precision == "fp8":
        check_share(built, options.min_fp8_share)
    return built


def _check_calls(lengths: Iterable[int], options: EngineOptions, max_seq_len: int) -> None:
    """Raise InputError where an engine takes no call that is longer than the run's tail, of these `lengths`."""
    longest = options.max_prompt or max_seq_len
    tail = max(lengths, default=0)
    if longest <= tail:
        option = "--max-prompt" if options.max_prompt else "--max-seq-len"
        raise InputError(
            f"{option} {longest}",
            f"no call is longer than the run's tail of {tail} positions, so all would be in two terms throughout",
            "give more, or choose a shorter one with `fp8q scales RUN --exact-tail N`",
        )
