"""Run evaluation windows through the runtimes that `fp8q validate` names, some of which need torch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from ..calibrate.measure.chain import LayerChain
from ..calibrate.model.decoder import NoChainError
from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.processor import placeholder
from ..calibrate.model.source import Source
from ..calibrate.text.evaluation import Evaluation
from ..core.columns import duration
from ..core.errors import BackendError, InputError
from ..core.reporter import SILENT
from ..core.run import Run
from ..options import WITHOUT_GRAPH, ValidateOptions
from ..quantize.checkpoint.narrowing import rounded_remark
from ..quantize.reading.run_checkpoint import vocabulary_size
from ..validate.accuracy.adder_cost import compare_sums, cost, sample
from ..validate.accuracy.as_served import by_distance
from ..validate.accuracy.bootstrap import increase_halves
from ..validate.accuracy.compare import (
    BASELINE,
    FLOAT32,
    Opener,
    Outcome,
    Turns,
    Workplace,
    compare_in_turn,
    lasting_runtimes,
    windows_at_once,
)
from ..validate.accuracy.document import Accuracy, ImageAccuracy
from ..validate.accuracy.nonfinite import blamed
from ..validate.accuracy.runtimes import (
    AdapterOutcome,
    Loading,
    Opening,
    compare_adapted,
    held_type,
    layer_chain,
    openers,
)
from ..validate.accuracy.seen_text import SeenText
from ..validate.pair.streamed import PairStream, StreamedWindows, check_disk
from ..validate.report.loss_buckets import by_frequency, by_position
from .corpus import load_tokens
from .cpu_time import STEP_TOKENS, token_seconds
from .image_inputs import row_inputs
from .measure import LayersNeed, streams_layers
from .other_text import positions
from .pipeline.stage import Notes, device
from .shared.adapters import adapters_of
from .shared.engines import note_without_engines, takes_adapter
from .shared.run_images import ImageRows
from .shared.sources import source_of


def evaluate_runtimes(
    run: Run, tokens: Evaluation, options: ValidateOptions, folder: Path, notes: Notes, lasting: Path | None = None
) -> Outcome:
    """Run `tokens` through the runtimes; `folder` has the results of a killed call, and `lasting` those of the float
    model, for other forms of the run.

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
    source = cache(partial(_source_with_note, run, notes))
    asked = Loading(run, source, device(), prompt=options.as_served)
    known = lasting_runtimes(lasting) if lasting else set()
    with opening(tokens, options, notes, known)(options.chosen, asked, folder) as made:
        turns = Turns(tokens, made, vocabulary_size(run), folder / "windows", lasting=lasting)
        outcome = compare_in_turn(turns, notes)
    if options.accumulator:
        baseline = made.get(BASELINE) if BASELINE not in outcome.failed else None
        sums = compare_sums(run, taken, baseline, options.accumulator, Workplace(device(), folder / "sums", notes))
        outcome = outcome.joined(sums)
    if not outcome.nll:
        raise BackendError("", "; ".join(outcome.failed.values()))
    return outcome


def check_stream(options: ValidateOptions) -> None:
    """Raise InputError for --stream of windows that are decoded, or with an accumulator."""
    if options.stream and (options.as_served is not None or options.accumulator):
        other = "--accumulator" if options.accumulator else f"--as-served {options.as_served}"
        raise InputError(
            "--stream", f"runs whole windows through a layer, and {other} the whole model", "leave one out"
        )


def opening(
    tokens: Evaluation, options: ValidateOptions, notes: Notes, known: Collection[str] = frozenset()
) -> Opening:
    """Return what opens the runtimes that `tokens` go through: whole models, or, where memory does not hold them or
    `options` say so, their decoder layers one after the other. The results of those that are `known` are there.

    A model that is no chain of layers is run as a whole, with a note, unless layers were asked for.
    """

    @contextmanager
    def opened(names: tuple[str, ...], asked: Loading, folder: Path) -> Iterator[Mapping[str, Opener]]:
        made = openers(names, asked)
        in_torch = [name for name in made if name in WITHOUT_GRAPH and name not in known]
        if not in_torch or not go_by_layer(in_torch, asked.source, options, notes):
            yield made
            return
        try:
            chains = {name: layer_chain(name, asked) for name in in_torch}
        except NoChainError as error:
            if options.stream:
                raise InputError(
                    error.subject,
                    f"{error.reason}, so it cannot be validated layer by layer",
                    "give --no-stream, and memory for whole models",
                ) from error
            notes.note(f"{error.reason}, so it cannot go layer by layer: validating with whole models")
            yield made
            return
        with _layered(chains, tokens, asked, folder, notes) as streamed:
            yield {**made, **streamed}

    return opened


@contextmanager
def _layered(
    chains: Mapping[str, LayerChain], tokens: Evaluation, asked: Loading, folder: Path, notes: Notes
) -> Iterator[Mapping[str, Opener]]:
    """Run `tokens` through the layers of all `chains`, with hidden states in `folder`; give what opens the modules
    behind them.
    """
    at_once = windows_at_once(tokens.ids.shape[1], None, vocabulary_size(asked.run))
    windows = StreamedWindows.cut(tokens.ids, at_once, np.empty(0, np.int64))
    (states := folder / "layers").mkdir(exist_ok=True)
    outputs = {name: chain.layer_output for name, chain in chains.items()}
    check_disk(states, outputs, windows, folder, "give a smaller --max-tokens")
    stream = PairStream(chains, windows, states)
    stream.run(notes, "Evaluating")
    with stream.openers() as streamed:
        yield streamed


def go_by_layer(names: Sequence[str], opened: Callable[[], Source], options: ValidateOptions, notes: Notes) -> bool:
    """Tell whether the runtimes `names` of torch go layer by layer, of the source `opened`: as `options` say, or
    where memory does not hold the largest of them. Windows that are decoded, and accumulators, need whole models.
    """
    if options.as_served is not None or options.accumulator:
        return False
    source = opened()
    sizes = {name: held_type(name, source).itemsize for name in names}
    largest = max(sizes, key=lambda name: sizes[name])
    need = LayersNeed(weight_bytes(source) // 2 * sizes[largest], f"{largest} takes {{}}", "validating")
    return streams_layers(options.stream, need, notes)


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
    workplace = Workplace(device(), folder, notes)
    return compare_adapted(run, tokens, chosen, lambda: source_of(run), workplace, opening(tokens, options, notes))


def evaluate_images(
    run: Run, rows: ImageRows | None, options: ValidateOptions, folder: Path, notes: Notes
) -> ImageAccuracy | None:
    """Run the held-out `rows` with images through the runtimes of torch; None where there are none, or where memory
    does not hold the whole models that they need, with a note.

    Raises InputError for an image that is gone or has changed, and BackendError for a runtime that fails.
    """
    names = [name for name in options.chosen if name in WITHOUT_GRAPH]
    if rows is None or not rows.evaluation or not names:
        return None
    source = source_of(run)
    if go_by_layer(names, lambda: source, replace(options, as_served=None, accumulator=None), Notes(SILENT)):
        notes.note("rows with images are not validated: they run through whole models, which memory does not hold")
        return None
    seen = SeenText(
        f"{len(rows.evaluation)} rows with images", row_inputs(source, rows.evaluation), placeholder(source)
    )
    tokens = seen.evaluation()
    made = seen.openers(names, Loading(run, lambda: source, device()))
    outcome = compare_in_turn(Turns(tokens, made, vocabulary_size(run), folder / "images"), notes)
    if outcome.failed:
        raise BackendError("rows with images", "; ".join(outcome.failed.values()))
    scored = tokens.protocol.tokens
    return ImageAccuracy(rows=len(rows.evaluation), tokens=scored, runtimes=outcome.accuracy.runtimes)


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
