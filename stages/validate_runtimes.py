"""Run evaluation windows through the runtimes that `fp8q validate` names, some of which need torch."""

from functools import partial
from pathlib import Path

from ..calibrate.model.source import Source
from ..calibrate.text.evaluation import Evaluation
from ..core.columns import duration
from ..core.errors import BackendError
from ..core.run import Run
from ..options import ValidateOptions
from ..quantize.checkpoint.narrowing import rounded_remark
from ..quantize.reading.run_checkpoint import vocabulary_size
from ..validate.accuracy.adder_cost import compare_sums, cost, sample
from ..validate.accuracy.as_served import by_distance
from ..validate.accuracy.bootstrap import increase_halves
from ..validate.accuracy.compare import BASELINE, FLOAT32, Outcome, Workplace, compare_in_turn, windows_at_once
from ..validate.accuracy.document import Accuracy
from ..validate.accuracy.nonfinite import blamed
from ..validate.accuracy.runtimes import AdapterOutcome, Loading, compare_adapted, openers
from ..validate.report.loss_buckets import by_frequency, by_position
from .corpus import load_tokens
from .cpu_time import STEP_TOKENS, token_seconds
from .other_text import positions
from .pipeline.stage import Notes, device
from .shared.adapters import adapters_of
from .shared.engines import note_without_engines, takes_adapter
from .shared.sources import source_of


def evaluate_runtimes(run: Run, tokens: Evaluation, options: ValidateOptions, folder: Path, notes: Notes) -> Outcome:
    """Run `tokens` through the runtimes; `folder` has the results of a killed call.

    Raises BackendError where no runtime works.
    """
    if options.as_served is not None:
        steps = tokens.protocol.context - options.as_served
        notes.note(
            f"--as-served {options.as_served}: each runtime reads the prompt of a window in one call, and "
            f"{steps - 1:,} tokens one by one; batches of windows go together{_decoding_time(run, tokens, options)}"
        )
    taken = sample(tokens, options.accumulator_windows)
    if options.accumulator:
        notes.note(cost(run, taken, options.accumulator, device()))
    asked = Loading(run, partial(_source_with_note, run, notes), device(), prompt=options.as_served)
    made = openers(options.chosen, asked)
    outcome = compare_in_turn(tokens, made, vocabulary_size(run), folder / "windows", notes)
    if options.accumulator:
        baseline = made.get(BASELINE) if BASELINE not in outcome.failed else None
        sums = compare_sums(run, taken, baseline, options.accumulator, Workplace(device(), folder / "sums", notes))
        outcome = outcome.joined(sums)
    if not outcome.nll:
        raise BackendError("", "; ".join(outcome.failed.values()))
    return outcome


def _decoding_time(run: Run, tokens: Evaluation, options: ValidateOptions) -> str:
    """The time of decoding on this CPU, by that of calibrating, after a semicolon; empty where that says nothing."""
    if (token := token_seconds(run)) is None:
        return ""
    windows, context = tokens.ids.shape
    batch = windows_at_once(context, options.as_served, vocabulary_size(run))
    steps = -(-windows // batch) * (context - (options.as_served or 0) - 1)
    seconds = len(options.chosen) * token * (windows * context + STEP_TOKENS * steps)
    return f"; {len(options.chosen) * steps:,} steps, some {duration(seconds)} here, by the time of calibrating"


def _source_with_note(run: Run, notes: Notes) -> Source:
    """Open the source of `run`; note the tensors that the run has in a narrower type than transformers keeps."""
    source = source_of(run)
    remark = rounded_remark(source, run.model)
    if remark is not None and remark not in notes.lines:
        notes.note(remark)
    return source


def evaluate_adapters(
    run: Run, tokens: Evaluation, options: ValidateOptions, folder: Path, notes: Notes
) -> AdapterOutcome:
    """Evaluate each adapter of the run's model; empty without adapters."""
    if not (names := adapters_of(run)):
        return AdapterOutcome()
    note_without_engines(run, options, notes)
    chosen = {name: tuple(runtime for runtime in options.chosen if takes_adapter(run, runtime, name)) for name in names}
    return compare_adapted(run, tokens, chosen, lambda: source_of(run), Workplace(device(), folder, notes))


def explain_loss(run: Run, tokens: Evaluation, outcome: Outcome) -> Accuracy:
    """Explain the loss: by the frequency of tokens in the calibration text, and the first layer without finite
    numbers.
    """
    accuracy = blamed(run, tokens, outcome, lambda: source_of(run), device())
    calibration = load_tokens(run, run.calibration)
    base = outcome.nll.get(BASELINE)
    fp32 = accuracy.runtimes.get(FLOAT32)
    runtimes = {}
    for name, runtime in accuracy.runtimes.items():
        nll = outcome.nll[name]
        kl = outcome.kl.get(name)
        before = None if name == BASELINE else base
        parts: dict[str, object] = {"by_distance": by_distance(tokens, nll, kl)}
        if not runtime.sampled:
            parts |= {
                "by_frequency": by_frequency(tokens, calibration, nll, before),
                "by_position": by_position(nll, before, kl),
                "increase_halves": None if before is None else increase_halves(before, nll),
            }
            if fp32 and name != FLOAT32:
                parts["perplexity_over_fp32"] = runtime.perplexity / fp32.perplexity - 1
        runtimes[name] = runtime.model_copy(update=parts)
    return accuracy.model_copy(update={"runtimes": runtimes, "positions": positions(run)})
