"""The stage `validate`: run the held-out text, or another, through the runtimes; check the loss against its limit."""

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import BackendError, GateError, InputError, UnfinishedError
from ..core.run import Run
from ..options import FLOAT, NOT_SERVED, ONE_TERM_ALONE, RUNTIMES, WITHOUT_GRAPH, ValidateOptions
from ..quantize.scales.decisions import load_scales
from .corpus import load_tokens
from .other_text import evaluation, positions
from .pipeline.stage import Key
from .pipeline.stages import VALIDATE, ValidateFacts
from .pipeline.steps import Notes, device, note_other_arithmetic
from .shared.adapters import adapters_of
from .shared.engines import engines_here
from .shared.model_files import files_of, fp8_files
from .shared.opening import command
from .shared.sources import source_of

if TYPE_CHECKING:
    from ..validate.accuracy.adapters import Found
    from ..validate.accuracy.compare import Outcome
    from ..validate.accuracy.document import Accuracy
    from ..validate.accuracy.perplexity import Evaluation


@command()
def validate(run: Run, notes: Notes, data: str | None, options: ValidateOptions) -> "Accuracy":
    """Run the held-out text, or `data`, through `options.runtimes`, unless that is done, and return the results.

    After writing the results it raises UnfinishedError for runtimes that failed, and GateError for a runtime that loses
    more than `options.max_ppl_increase`.
    """
    from ..validate.accuracy.document import load_accuracy, save_accuracy
    from ..validate.accuracy.top_logits import save_top_logits

    inputs, options = fp8_files(run, graph=False), with_runtimes(run, options, notes)
    for precision in options.baselines:
        inputs |= files_of(run, precision)
    engines = engines_here(run, options)
    inputs |= {name: digest for engine in engines for name, digest in engine.file.items()}
    check_comparable(options.chosen, options.max_ppl_increase)
    check_accumulator(options)
    options = as_a_server_reads(run, options, notes)
    tokens = evaluation(run, data, options, notes)
    for engine in engines:
        engine.check_windows(tokens)
    key = _key(inputs, options, tokens)
    if not (VALIDATE.is_current(run, key) and has_top_logits(run)):
        note_other_arithmetic(run, notes)
        with VALIDATE.writing(run, key, notes) as log, VALIDATE.working(run, key, notes) as folder:
            found = _evaluate(run, tokens, options, folder, notes)
            adapters, failed = _with_adapters(run, tokens, options, folder, notes)
            found.failed.update(failed)
            explained = _explained(run, tokens, found).model_copy(update={"adapters": adapters or None})
            log.outputs += save_accuracy(run, explained, found.nll, found.kl)
            log.outputs.append(save_top_logits(run, tokens, found.top))
            _tell_card(run, explained)
            log.unfinished = tuple(found.failed)
        if found.failed:
            raise unfinished(found)
    accuracy = load_accuracy(run)
    for what, each in accuracy.each():
        check_numbers(each, what)
        check_increase(each, options.max_ppl_increase, what)
    return accuracy


def _key(inputs: dict[str, str], options: ValidateOptions, tokens: "Evaluation") -> Key[ValidateOptions, ValidateFacts]:
    """Return the key of evaluating `tokens`, with defaults replaced by their values."""
    protocol = tokens.protocol
    resolved = replace(
        options,
        runtimes=options.chosen,
        context=protocol.context,
        stride=protocol.stride,
        accumulator_windows=options.accumulator_windows if options.accumulator else ValidateOptions.accumulator_windows,
    )
    facts = ValidateFacts(prefix=protocol.prefix, overlap=protocol.overlap)
    return Key(inputs | {"tokens": protocol.sha256}, resolved, facts)


def has_top_logits(run: Run) -> bool:
    """Tell whether the validated `run` has the likeliest tokens of its runtimes, which older versions did not keep."""
    return run.top_logits.name in run.record().stages[VALIDATE.name].outputs


def with_runtimes(run: Run, options: ValidateOptions, notes: Notes) -> ValidateOptions:
    """Return `options` with the runtimes that `run` has.

    The default has one-term where the run has two terms, and omits runtimes that need a graph, with a note, where none
    can be made of the model. Raises InputError for one of these that is asked for.
    """
    reason = run.without_graph()
    if options.runtimes is not None:
        if reason:
            check_runtimes(options.runtimes, run, reason)
        return options
    names = (*options.chosen, *((ONE_TERM_ALONE,) if load_scales(run).two_terms else ()))
    if reason:
        left = ", ".join(name for name in names if name not in WITHOUT_GRAPH)
        notes.note(f"{left}: left out, since {run.root} has no ONNX graph")
        names = tuple(name for name in names if name in WITHOUT_GRAPH)
    return replace(options, runtimes=names)


def as_a_server_reads(run: Run, options: ValidateOptions, notes: Notes) -> ValidateOptions:
    """Return `options` with the prompt that windows begin with by default: half a window where the run has tails.

    What such a run writes depends on the phase, and no server reads a whole window as a prompt. Without tails, or with
    an accumulator, whole windows stay the default.
    """
    from ..validate.accuracy.perplexity import prompt_of

    tails = load_scales(run).tails.values()
    if not tails or options.as_served is not None or options.accumulator:
        return options
    window = load_tokens(run, run.calibration).shape[1]
    prompt = prompt_of(options.context or min(window, positions(run) or window))
    notes.note(
        f"--as-served: is {prompt}, half a window, since decoded tokens and a prompt's last {max(tails)} have another "
        "form than the rest of the prompt; --as-served N takes another prompt"
    )
    return replace(options, as_served=prompt)


def check_runtimes(runtimes: tuple[str, ...] | None, run: Run, reason: str) -> None:
    """Raise InputError for a named runtime that needs the graph, where the run has none."""
    asked = [name for name in runtimes or () if name not in WITHOUT_GRAPH]
    if asked:
        raise InputError(
            f"--runtimes {asked[0]}: runs an ONNX graph, and {run.root} has none, since {reason}; choose from "
            f"{', '.join(name for name in RUNTIMES if name in WITHOUT_GRAPH)}"
        )


def _evaluate(run: Run, tokens: "Evaluation", options: ValidateOptions, folder: Path, notes: Notes) -> "Outcome":
    """Run `tokens` through the runtimes; `folder` has the results of a killed call.

    Raises BackendError where no runtime works.
    """
    from ..validate.accuracy.adder_cost import compare_sums, cost, sample
    from ..validate.accuracy.compare import BASELINE, Workplace, compare_in_turn
    from ..validate.accuracy.runtimes import openers, vocabulary

    if options.as_served is not None:
        steps = tokens.protocol.context - options.as_served
        notes.note(
            f"--as-served {options.as_served}: each runtime reads the prompt of a window in one call, and "
            f"{steps - 1:,} tokens one by one; batches of windows go together"
        )
    taken = sample(tokens, options.accumulator_windows)
    if options.accumulator:
        notes.note(cost(run, taken, options.accumulator, device()))
    made = openers(options.chosen, run, lambda: source_of(run), device(), prompt=options.as_served)
    found = compare_in_turn(tokens, made, vocabulary(run.model), folder / "windows", notes)
    if options.accumulator:
        baseline = made.get(BASELINE) if BASELINE not in found.failed else None
        sums = compare_sums(run, taken, baseline, options.accumulator, Workplace(device(), folder / "sums", notes))
        found = found.joined(sums)
    if not found.nll:
        raise BackendError("; ".join(found.failed.values()))
    return found


def _with_adapters(
    run: Run, tokens: "Evaluation", options: ValidateOptions, folder: Path, notes: Notes
) -> "tuple[Found, dict[str, str]]":
    """Evaluate each adapter of the run's model; return also the errors of runtimes that failed. Empty without
    adapters.
    """
    if not adapters_of(run):
        return {}, {}
    from ..validate.accuracy.adapters import compare_adapted
    from ..validate.accuracy.compare import Workplace

    return compare_adapted(run, tokens, options.chosen, lambda: source_of(run), Workplace(device(), folder, notes))


def _explained(run: Run, tokens: "Evaluation", found: "Outcome") -> "Accuracy":
    """Explain the loss: by the frequency of tokens in the calibration text, and the first layer without finite
    numbers.
    """
    from ..validate.accuracy.as_served import by_distance
    from ..validate.accuracy.compare import BASELINE
    from ..validate.accuracy.nonfinite import blamed
    from ..validate.report.token_frequency import by_frequency

    accuracy = blamed(run, tokens, found, lambda: source_of(run), device())
    calibration, base = load_tokens(run, run.calibration), found.nll.get(BASELINE)
    runtimes = {
        name: runtime.model_copy(
            update={
                "by_frequency": None
                if runtime.sampled
                else by_frequency(tokens, calibration, found.nll[name], None if name == BASELINE else base),
                "by_distance": by_distance(tokens, found.nll[name], found.kl.get(name)),
            }
        )
        for name, runtime in accuracy.runtimes.items()
    }
    return accuracy.model_copy(update={"runtimes": runtimes})


def _tell_card(run: Run, accuracy: "Accuracy") -> None:
    """Write into the model card what one term costs, where that was measured.

    A card that is an output in the record, as those of earlier versions are, stays as it is.
    """
    from ..quantize.checkpoint.model_card import COST, markdown_text, state_in_card

    recorded = run.record().stages["quantize"].outputs
    if (cost := accuracy.one_term_cost) and str(run.card.relative_to(run.root)) not in recorded:
        state_in_card(run.card, COST, f"{cost} (`fp8q validate`: {markdown_text(accuracy.protocol.told)}).")


def unfinished(found: "Outcome") -> UnfinishedError:
    """Make the error for runtimes that failed, with their reasons and what happens to the results of the others."""
    again = " and ".join(found.failed)
    return UnfinishedError(
        f"{'; '.join(found.failed.values())}; what {', '.join(found.nll)} gave is written, and the same command tries "
        f"{again} again: free memory or give a smaller --context, or leave {again} out of --runtimes"
    )


def check_accumulator(options: ValidateOptions) -> None:
    """Raise InputError for an accumulator without the reference, or of windows that are decoded."""
    if options.accumulator and options.as_served is not None:
        raise InputError(f"--as-served {options.as_served}: --accumulator runs whole windows; leave one of the two out")
    if options.accumulator and "reference" not in options.chosen:
        raise InputError(
            f"--accumulator {options.accumulator}: is of the runtime reference, and the runtimes are "
            f"{', '.join(options.chosen)}; add reference to --runtimes"
        )


def check_comparable(runtimes: tuple[str, ...], limit: float | None) -> None:
    """Raise InputError when `runtimes` include nothing to compare with the `limit`."""
    if limit is not None and ("bf16" not in runtimes or NOT_SERVED.issuperset(runtimes)):
        raise InputError(
            f"--max-ppl-increase {limit:.2%}: needs bf16 and an FP8 runtime to compare, and the runtimes are "
            f"{', '.join(runtimes)}; add what is missing to --runtimes"
        )


def check_numbers(accuracy: "Accuracy", what: str = "") -> None:
    """Raise InputError for a float model without a finite perplexity, and GateError for another runtime without one.

    The files of the float model are at fault then. `what` follows the runtime's name in the message.
    """
    for name, runtime in sorted(accuracy.runtimes.items(), key=lambda named: named[0] not in NOT_SERVED):
        if isfinite(runtime.perplexity):
            continue
        bad, where = (
            f"{name}{what}: perplexity is {runtime.perplexity} on {accuracy.protocol.dataset}",
            runtime.not_finite,
        )
        if where:
            bad += f", first at position {where.position} of window {where.window} (from 0)"
            bad += f", by the output of {where.module}" if where.module else ""
        if name in FLOAT or (where and where.bf16):
            raise InputError(
                f"{bad}: the model gives no finite numbers before anything is quantized; check its config.json and its "
                "weights"
            )
        known = where is None or where.bf16 is not None
        theirs = "and BF16's is a number" if known else "and BF16's is not known, since its checkpoint is gone"
        raise GateError(f"{bad}, {theirs}; `fp8q inspect` shows what stands out, keep modules in BF16 with --skip")


def check_increase(accuracy: "Accuracy", limit: float | None, what: str = "") -> None:
    """Raise GateError when the perplexity of a complete runtime is over BF16's by more than `limit` (a fraction), or
    not finite.

    Raises InputError when there is nothing to compare with the limit.
    """
    if limit is None:
        return
    check_comparable(tuple(accuracy.runtimes), limit)
    increases = {
        name: runtime.perplexity_increase
        for name, runtime in accuracy.runtimes.items()
        if name not in NOT_SERVED and not runtime.sampled
    }
    for name, increase in increases.items():
        runtime = accuracy.runtimes[name]
        if increase is not None and not increase <= limit:
            raise GateError(
                f"{name}{what}: perplexity {runtime.perplexity:.4f} is {increase:.2%} above BF16's, more than "
                f"--max-ppl-increase {limit:.2%}; `fp8q tune RUN --max-ppl-increase {limit:.2%}` finds the cheapest "
                "mix that meets it"
            )
