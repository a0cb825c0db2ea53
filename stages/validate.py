"""The stage `validate`: run the held-out text, or another, through the runtimes; check the loss against its limit."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from ..calibrate.text.evaluation import Evaluation, enough_tokens, prompt_of, sha256_of
from ..core.errors import BackendError, InputError, UnfinishedError
from ..core.files import sha256_file, write_document
from ..core.output_folder import WorkFolder
from ..core.reporter import SILENT
from ..core.run import Run
from ..core.run_writer import RunWriter
from ..options import LEAST_WINDOWS, MAX_TOKENS, ONE_TERM_ALONE, RUNTIMES, WITHOUT_GRAPH, ValidateOptions, VerdictLimits
from ..options.form import longest_tail
from ..quantize.checkpoint.card_additions import (
    ACCURACY_MARK,
    COST,
    markdown_message,
    markdown_text,
    state_in_card,
    state_validated,
)
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.scheme import in_two_codes
from ..validate.accuracy.card import card_table, repeating_command
from ..validate.accuracy.decision import decide, noise_floor
from ..validate.accuracy.document import (
    Accuracy,
    ByToken,
    RuntimeAccuracy,
    load_accuracy,
    load_divergences,
    load_token_losses,
    save_accuracy,
)
from ..validate.accuracy.top_logits import save_top_logits
from .corpus import load_tokens
from .other_text import evaluation, positions
from .pipeline.stage import CALIBRATE_MODULES, Key, Notes, arithmetic, device, lacking, note_other_arithmetic
from .pipeline.stages import VALIDATE, ValidateFacts
from .shared.added_runtimes import AddedRun, added_run, drop_outdated, run_added, with_host_runtimes
from .shared.engines import engines_here
from .shared.gates import check_comparable, check_gates
from .shared.model_files import files_of, fp8_files, may_change_card
from .shared.run_images import load_image_rows
from .shared.texts import check_there

#: The paragraph of the model card on how the figures are had again.
REPEATED = """\
In the run that this is the checkpoint of, this repeats them (token ids: SHA-256 {sha256}…):

    {command}

Of this directory alone `fp8q compare` measures what a server makes of it, by windows and arithmetic of its own: other
figures."""
#: The tokens that a CPU decodes by default: the paired rise of perplexity is known to half a percent by then.
DECODED_ON_CPU = 2048
#: A context below which windows are too short to advise.
SHORTEST = 32


def validate(
    run: Run, notes: Notes, data: str | None, options: ValidateOptions, lasting: WorkFolder | None = None
) -> Accuracy:
    """Run the held-out text, or `data`, through `options.runtimes`, unless that is done, and return the results.

    Needles that are asked for come first. Runtimes that all need no torch are added to what is there, where that is of
    the same tokens. `lasting`: the folder that keeps what the float model gives, for other forms of the run. After
    writing the results it raises UnfinishedError for runtimes that failed, and GateError for a runtime that loses more
    than the limits of `options` that were asked for.
    """
    if options.needles is not None:
        from .needles import ask_needles

        ask_needles(run, notes, options)
    drop_outdated(run, notes)
    if added := _added_run(run, notes, data, options):
        return _add(added, notes)
    check_torch(options)
    return _run_all(run, notes, data, options, lasting)


def _run_all(
    run: Run, notes: Notes, data: str | None, options: ValidateOptions, lasting: WorkFolder | None
) -> Accuracy:
    """Run all of `options.runtimes`, unless that is done, and return the results in place of those before."""
    if data is not None:
        check_there(data)
    inputs = fp8_files(run, graph=False)
    options = with_runtimes(run, options, notes)
    for precision in options.baselines:
        inputs |= files_of(run, precision)
    rows = None if data is not None else load_image_rows(run)
    if rows is not None:
        inputs[run.images.name] = sha256_file(run.images)
    engines = engines_here(run, options)
    inputs |= {name: digest for engine in engines for name, digest in engine.file.items()}
    check_comparable(options.chosen, options)
    check_accumulator(options)
    from .validate_runtimes import (  # loads torch: refuse before
        check_stream,
        evaluate_adapters,
        evaluate_images,
        evaluate_runtimes,
        explain_loss,
    )

    options = as_a_server_reads(run, options, notes)
    check_stream(options)
    tokens = evaluation(run, data, options, notes)
    check_enough(tokens, options, notes)
    for engine in engines:
        engine.check_windows(tokens)
    key = _key(inputs, options, tokens)
    if not (VALIDATE.is_current(run, key, with_host_runtimes(run, key)) and has_top_logits(run)):
        note_other_arithmetic(run, notes)
        with ExitStack() as work:
            log = work.enter_context(VALIDATE.writing(run, key, notes))
            folder = work.enter_context(VALIDATE.working(run, key, notes))
            shared = work.enter_context(lasting.opened(_float_key(run, tokens))) if lasting else None
            outcome = evaluate_runtimes(run, tokens, options, folder, notes, shared)
            adapted = evaluate_adapters(run, tokens, options, folder, notes)
            outcome.failed.update(adapted.failed)
            images = evaluate_images(run, rows, options, folder, notes)
            parts = {"adapters": adapted.rows or None, "images": images}
            explained = explain_loss(run, tokens, outcome).model_copy(update=parts)
            judged = decide(explained, outcome.nll, options, outcome.kl)
            explained = explained.model_copy(update={"verdict": judged})
            log.outputs += save_accuracy(run, explained, outcome.nll | adapted.nll, outcome.kl)
            log.outputs.append(save_top_logits(run, tokens, outcome.top | adapted.top))
            if may_change_card(run):
                state_validated(run.card, [])
            _tell_card(run, explained, outcome.nll, outcome.kl, options)
            log.unfinished = tuple(outcome.failed)
        if outcome.failed:
            raise unfinished(outcome.failed, outcome.nll)
    accuracy = judge_again(run, options)
    check_gates(run, accuracy, options)
    return accuracy


def _added_run(run: Run, notes: Notes, data: str | None, options: ValidateOptions) -> AddedRun | None:
    """Find what the run keeps for runtimes that need no torch; None where others are asked for.

    Where it keeps nothing that fits, they run by themselves (None), or InputError is raised where torch is missing.
    """
    if not options.without_torch:
        return None
    missing = lacking(CALIBRATE_MODULES)
    if missing and data is not None:
        raise BackendError(
            f"--data {data}",
            f"is read and tokenized by libraries of which {missing} is not installed",
            "leave it out, to evaluate on the text that was held out, or install them with `pip install "
            "'fp8q[calibrate]'`",
        )
    with_runtimes(run, options, notes)
    fp8_files(run)
    try:
        added = added_run(
            run,
            options,
            load_tokens(run, run.calibration),
            lambda chosen: evaluation(run, data, chosen, notes if missing else SILENT),
        )
    except InputError:
        if missing:
            raise
        return None
    check_enough(added.reference.evaluation, options, notes)
    return added


def _add(added: AddedRun, notes: Notes) -> Accuracy:
    """Run what is not there yet beside what is, and return all results."""
    ran, failed = run_added(added, notes)
    if failed:
        raise unfinished(failed, ran)
    accuracy = judge_again(added.run, added.options)
    named = {"bf16", "fp32", *added.options.chosen}

    def asked(rows: Mapping[str, RuntimeAccuracy]) -> dict[str, RuntimeAccuracy]:
        return {name: row for name, row in rows.items() if name in named}

    adapters = {adapter: asked(rows) for adapter, rows in (accuracy.adapters or {}).items()}
    shown = accuracy.model_copy(update={"runtimes": asked(accuracy.runtimes), "adapters": adapters or None})
    verdict = decide(shown, load_token_losses(added.run), added.options, load_divergences(added.run))
    check_gates(added.run, shown.model_copy(update={"verdict": verdict}), added.options)
    return accuracy


def check_torch(options: ValidateOptions) -> None:
    """Raise BackendError where a runtime is asked for that needs a library which is not installed."""
    if missing := lacking(CALIBRATE_MODULES):
        asked = [name for name in options.chosen if name in WITHOUT_GRAPH] or [*options.chosen]
        raise BackendError(
            "",
            f"{missing} is not installed and the runtime {asked[0]} needs it",
            "install it with `pip install 'fp8q[calibrate]'`, or give --runtimes onnxruntime, or an engine's: they "
            "are held against what the run keeps of the others",
        )


def judge_again(run: Run, limits: VerdictLimits) -> Accuracy:
    """Return the run's accuracy with the verdict by `limits`, which is written where it was by others."""
    accuracy = load_accuracy(run)
    nll = load_token_losses(run)
    kl = load_divergences(run)
    judged = accuracy.model_copy(update={"verdict": decide(accuracy, nll, limits, kl)})
    if judged.verdict != accuracy.verdict:
        with RunWriter(run).amending(VALIDATE.name, run.accuracy):
            write_document(run.accuracy, judged)
        _tell_card(run, judged, nll, kl, limits)
    return judged


def _key(inputs: dict[str, str], options: ValidateOptions, tokens: Evaluation) -> Key[ValidateOptions, ValidateFacts]:
    """Return the key of evaluating `tokens`, with defaults replaced by their values."""
    protocol = tokens.protocol
    resolved = replace(
        options,
        runtimes=options.chosen,
        context=protocol.context,
        stride=protocol.stride,
        max_tokens=None if protocol.of_tokens is None else protocol.tokens,
        accumulator_windows=options.accumulator_windows if options.accumulator else ValidateOptions.accumulator_windows,
    )
    facts = ValidateFacts(prefix=protocol.prefix, overlap=protocol.overlap)
    return Key(inputs | {"tokens": protocol.sha256}, resolved, facts)


def _float_key(run: Run, tokens: Evaluation) -> dict[str, object]:
    """Everything that the float model gives of `tokens` depends on."""
    return {"model": run.record().model, "tokens": tokens.protocol.model_dump(mode="json"), **arithmetic()}


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
    names = (*options.chosen, *((ONE_TERM_ALONE,) if in_two_codes(load_scales(run).forms) else ()))
    if reason:
        left = ", ".join(name for name in names if name not in WITHOUT_GRAPH)
        notes.note(f"{left}: left out, since {run.root} has no ONNX graph")
        names = tuple(name for name in names if name in WITHOUT_GRAPH)
    return replace(options, runtimes=names)


def as_a_server_reads(run: Run, options: ValidateOptions, notes: Notes) -> ValidateOptions:
    """Return `options` with the prompt that windows begin with by default: half a window where the run has a tail; and
    with the most tokens that are decoded behind a prompt.

    What such a run writes depends on the phase, and no server reads a whole window as a prompt. Without a tail, or
    with an accumulator, whole windows stay the default.
    """
    tail = longest_tail(load_scales(run).forms.values())
    calibrated = load_tokens(run, run.calibration).shape[1]
    window = options.context or min(calibrated, positions(run) or calibrated)
    served = behind_a_prompt(options, window, tail)
    prompt = served.as_served
    most = served.max_tokens
    if prompt is None:
        return options
    capped = most is not None and options.max_tokens is None
    fewer = f"on a CPU {most:,} tokens are decoded at most, --max-tokens N takes others" if capped else ""
    if options.as_served is None:
        half = ", half a window" if prompt == prompt_of(window) else f" of {window}"
        notes.note(
            f"--as-served: is {prompt}{half}, since decoded tokens and a prompt's last {tail} have another "
            f"form than the rest of the prompt; --as-served N takes another prompt{fewer and f'; {fewer}'}"
        )
    elif fewer:
        notes.note(f"--as-served {prompt}: {fewer}")
    return served


def behind_a_prompt(options: ValidateOptions, window: int, tail: int) -> ValidateOptions:
    """Return `options` with the prompt of a `window`, half of it where none was asked for and the run has a `tail`; and
    on a CPU, where each decoded token is a pass of its own, with only as many of them as an interval needs, whatever
    the prompt is.
    """
    prompt = options.as_served
    most = options.max_tokens
    on_cpu = False
    if prompt is None and (not tail or options.accumulator):
        return options
    if most is None:
        on_cpu = device() == "cpu"
    if prompt is None:
        prompt = prompt_of(window)
        if on_cpu:
            prompt = max(prompt, window - -(-DECODED_ON_CPU // LEAST_WINDOWS))
    if on_cpu and prompt < window:
        most = most_decoded(window, prompt)
    return replace(options, as_served=prompt, max_tokens=most)


def most_decoded(window: int, prompt: int) -> int:
    """The tokens that a CPU decodes behind a `prompt` in windows of `window` tokens: `DECODED_ON_CPU`, but no more
    prompts than the windows of `MAX_TOKENS`, since each of these is read too, and `LEAST_WINDOWS` in any case.
    """
    windows = -(-DECODED_ON_CPU // (window - prompt))
    windows = max(LEAST_WINDOWS, min(windows, MAX_TOKENS // window))
    return windows * (window - prompt)


def check_enough(tokens: Evaluation, limits: VerdictLimits, notes: Notes, text: str = "--data") -> None:
    """Raise InputError, before any work, where a limit was asked for and the windows are too few for an interval, and
    so for a verdict that passes; note it where none was. Both name the option that mends it; `text` is that of a text.
    """
    windows = len(tokens.ids)
    protocol = tokens.protocol
    if windows >= LEAST_WINDOWS:
        return
    if (most := enough_tokens(protocol, windows)) is not None:
        remedy = f"--max-tokens {most} takes enough"
    else:
        shorter = protocol.context * windows // LEAST_WINDOWS
        remedy = f"--context {shorter} cuts more" if shorter >= SHORTEST else f"give a longer text by {text}"
    fault = (
        f"{windows} window{' gives' if windows == 1 else 's give'} no interval, so that this cannot end in a verdict "
        f"that passes: {LEAST_WINDOWS} do"
    )
    if limits.asked:
        raise InputError(limits.asked, fault, remedy)
    notes.note(f"{fault}; {remedy}")


def check_runtimes(runtimes: tuple[str, ...] | None, run: Run, reason: str) -> None:
    """Raise InputError for a named runtime that needs the graph, where the run has none."""
    asked = [name for name in runtimes or () if name not in WITHOUT_GRAPH]
    if asked:
        raise InputError(
            f"--runtimes {asked[0]}",
            f"runs an ONNX graph, and {run.root} has none, since {reason}",
            f"choose from {', '.join(name for name in RUNTIMES if name in WITHOUT_GRAPH)}",
        )


def _tell_card(run: Run, accuracy: Accuracy, nll: ByToken, kl: ByToken, limits: VerdictLimits) -> None:
    """Write verdict and numbers into the model card, and what one term costs, where that was measured."""
    if not may_change_card(run):
        return
    protocol = markdown_text(accuracy.protocol.description)
    if verdict := accuracy.verdict:
        said = markdown_message(" ".join(filter(None, (verdict.detail, noise_floor(accuracy)))))
        decision = f"**{markdown_message(verdict.sentence)}.** {said}"
        measured = f"{decision} Measured by `fp8q validate` on {protocol}."
        if table := card_table(accuracy, nll, kl):
            own_text = accuracy.protocol.sha256 == sha256_of(load_tokens(run, run.evaluation))
            command = repeating_command(accuracy, len(next(iter(nll.values()))), limits, own_text)
            again = REPEATED.format(sha256=accuracy.protocol.sha256[:16], command=command)
            measured += f"\n\n{table}\n\n{again}"
        state_in_card(run.card, ACCURACY_MARK, measured)
    if cost := accuracy.one_term_cost:
        state_in_card(run.card, COST, f"{cost} (`fp8q validate`: {protocol}).")


def unfinished(failed: Mapping[str, str], ran: Iterable[str]) -> UnfinishedError:
    """Make the error for runtimes that failed, with their reasons and what happens to the results of those that ran."""
    again = " and ".join(failed)
    return UnfinishedError(
        "",
        "; ".join(failed.values()),
        f"what {', '.join(ran)} gave is written, and the same command tries {again} again: free memory or give a "
        f"smaller --context, or leave {again} out of --runtimes",
    )


def check_accumulator(options: ValidateOptions) -> None:
    """Raise InputError for an accumulator without the reference, or of windows that are decoded."""
    if options.accumulator and options.as_served is not None:
        raise InputError(
            f"--as-served {options.as_served}", "--accumulator runs whole windows", "leave one of the two out"
        )
    if options.accumulator and "reference" not in options.chosen:
        raise InputError(
            f"--accumulator {options.accumulator}",
            f"is of the runtime reference, and the runtimes are {', '.join(options.chosen)}",
            "add reference to --runtimes",
        )
