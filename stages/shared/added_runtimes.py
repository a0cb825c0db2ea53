"""Add runtimes to what `validate` wrote, on a host that cannot run those that are there already.

Their rows stand in `accuracy.json` beside those of the machine that calibrated, held against what it kept. The stage's
record gains them as facts, with the inputs that are theirs alone, so that what either machine ran is current on both.

They run on the tokens that the run was validated on, and need no torch.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import __version__
from ...calibrate.text.evaluation import Evaluation, Protocol
from ...core.columns import increase, nats
from ...core.errors import BackendError, InputError
from ...core.files import remove, replacing, write_document
from ...core.output_folder import WorkFolder
from ...core.record import library_versions
from ...core.run import Run
from ...options import RUNTIMES, ValidateOptions
from ...quantize.checkpoint.card_additions import state_validated
from ...validate.accuracy.as_served import by_distance
from ...validate.accuracy.compare import AnyForward, Opener, Outcome, Turns, compare_in_turn, loading
from ...validate.accuracy.document import (
    WITH,
    Accuracy,
    ByToken,
    RuntimeAccuracy,
    load_accuracy,
    load_token_arrays,
    load_token_losses,
    with_adapter,
)
from ...validate.accuracy.session_logits import graph_vocabulary, session_opener
from ...validate.accuracy.stored_reference import StoredReference, against_stored
from ...validate.accuracy.top_logits import TopLogits, arrays_of, load_top_arrays, load_top_logits
from ...validate.report.loss_buckets import by_frequency
from ..pipeline.stage import Key, Notes
from ..pipeline.stages import VALIDATE, HostRuntime, ValidateFacts
from .adapters import adapters_of
from .engines import engines_here, note_without_engines, takes_adapter
from .model_files import files_of, may_change_card
from .texts import Tokens

ValidateKey = Key[ValidateOptions, ValidateFacts]
#: The folder of a call that was killed; no stage is called so, since the one that it adds to is finished.
WORK = "validate-beside"


def validated(run: Run) -> bool:
    """Tell whether `validate` has run, and kept the likeliest tokens of its runtimes."""
    recorded = run.record().stages.get(VALIDATE.name)
    return recorded is not None and run.top_logits.name in recorded.outputs


def host_runtimes(run: Run) -> dict[str, HostRuntime]:
    """The runtimes that were added to what `validate` wrote."""
    return run.facts(VALIDATE).beside or {}


def with_host_runtimes(run: Run, key: ValidateKey) -> ValidateKey:
    """Return `key` with the runtimes that were added since: what they are held against is as it was."""
    if not validated(run):
        return key
    added = host_runtimes(run)
    recorded = run.record().stages[VALIDATE.name].inputs
    inputs = {name: recorded[name] for host_runtime in added.values() for name in host_runtime.inputs}
    facts = key.facts.model_copy(update={"beside": added or None})
    return Key({**key.inputs, **inputs}, key.options, facts)


def outdated_runtimes(run: Run) -> list[str]:
    """The runtimes that were added and whose engines or graphs have been written again since."""
    if not validated(run):
        return []
    record = run.record()
    now = {name: digest for stage in record.stages.values() for name, digest in stage.outputs.items()}
    then = record.stages[VALIDATE.name].inputs
    return [
        runtime
        for runtime, host_runtime in host_runtimes(run).items()
        if any(now.get(name) != then[name] for name in host_runtime.inputs)
    ]


@dataclass(frozen=True)
class AddedRuntimes:
    """Runtimes that ran here: their rows, by adapter (None: without one); all losses and likeliest tokens, by what they
    are called in the files; and what each depends on, name -> SHA-256.
    """

    rows: Mapping[str | None, Mapping[str, RuntimeAccuracy]]
    nll: Mapping[str, npt.NDArray[np.float32]]
    tops: Mapping[str, TopLogits]
    inputs: Mapping[str, Mapping[str, str]]
    seconds: float


def add_runtimes(run: Run, added: AddedRuntimes, without: list[str], notes: Notes) -> None:
    """Write `added` beside what is there, and leave out the runtimes `without`, whose inputs are no longer there."""

    def stays(name: str) -> bool:
        return name.partition(WITH)[0].partition(".")[0] not in without

    accuracy = load_accuracy(run)
    losses = load_token_arrays(run)
    tops = load_top_arrays(run)
    losses = {name: values for name, values in losses.items() if stays(name)} | dict(added.nll)
    tops = {name: values for name, values in tops.items() if stays(name)} | arrays_of(added.tops)
    runtimes, adapters = _rows(accuracy, added, stays)
    with (
        replacing(run.tokens) as token_file,
        replacing(run.top_logits) as top_file,
        replacing(run.accuracy) as document,
    ):
        for path, arrays in ((token_file, losses), (top_file, tops)):
            with open(path, "wb") as handle:
                np.savez(handle, allow_pickle=False, **arrays)
        write_document(document, accuracy.model_copy(update={"runtimes": runtimes, "adapters": adapters}))
    recorded = run.record().stages[VALIDATE.name]
    options, facts = VALIDATE.read(recorded.options, run.record_file)
    gone = {name for runtime in without for name in host_runtimes(run)[runtime].inputs}
    of_other_hosts = {name: host_runtime for name, host_runtime in host_runtimes(run).items() if name not in without}
    of_other_hosts |= {
        name: HostRuntime(
            inputs=sorted(inputs), version=__version__, libraries=library_versions(), seconds=round(added.seconds, 3)
        )
        for name, inputs in added.inputs.items()
    }
    inputs = {name: digest for name, digest in recorded.inputs.items() if name not in gone}
    inputs |= {name: digest for host_runtime in added.inputs.values() for name, digest in host_runtime.items()}
    key = Key(inputs, options, facts.model_copy(update={"beside": of_other_hosts or None}))
    VALIDATE.amend(run, key, [run.accuracy, run.tokens, run.top_logits], notes)
    if may_change_card(run):
        state_validated(run.card, [card_line(name, row) for name, row in runtimes.items() if name in of_other_hosts])


def card_line(name: str, row: RuntimeAccuracy) -> str:
    """State a runtime's perplexity and its distance from BF16, for the model card."""
    line = f"`{name}`: perplexity {row.perplexity:.4f}"
    if row.perplexity_increase is not None:
        line += f", {increase(row.perplexity_increase)} over BF16's"
    if row.stored and "bf16" in row.stored.runtimes:
        line += f"; KL from BF16 at least {nats(row.stored.runtimes['bf16'].kl_nats.mean)} nats a token"
    return line


def _rows(
    accuracy: Accuracy, added: AddedRuntimes, stays: Callable[[str], bool]
) -> tuple[dict[str, RuntimeAccuracy], dict[str, dict[str, RuntimeAccuracy]] | None]:
    """The rows that are there and stay, with those that are added: of the model, and of each adapter."""

    def joined(there: Mapping[str, RuntimeAccuracy], adapter: str | None) -> dict[str, RuntimeAccuracy]:
        return {name: row for name, row in there.items() if stays(name)} | dict(added.rows.get(adapter, {}))

    adapters = {adapter: joined(there, adapter) for adapter, there in (accuracy.adapters or {}).items()}
    return joined(accuracy.runtimes, None), adapters or None


def drop_outdated(run: Run, notes: Notes) -> None:
    """Remove the rows of runtimes that were added and whose engines have been built again since, with a note."""
    if names := outdated_runtimes(run):
        notes.note(
            f"{', '.join(names)}: left out of {run.accuracy.name}, since the engine has been built again; run `fp8q "
            f"validate {run.root} --runtimes {','.join(names)}`"
        )
        add_runtimes(run, AddedRuntimes({}, {}, {}, {}, 0.0), names, notes)


def stored_reference(run: Run, evaluation: Evaluation, command: str, adapter: str | None = None) -> StoredReference:
    """Load the stored losses and likeliest tokens of the runtimes on the tokens of `evaluation`, with that adapter on.

    Raises InputError, with the `command` for the machine that calibrated, where it keeps nothing, or of other tokens.
    """
    tops = load_top_logits(run, adapter)
    if reason := differs(load_accuracy(run).protocol, evaluation.protocol):
        raise InputError(run.top_logits, reason, elsewhere(command))
    nll = load_token_losses(run, adapter)
    scored = evaluation.scored
    same = all(values.shape == scored.shape for values in nll.values()) and tops.positions.shape[1] == scored.shape[1]
    if (
        not same
        or not np.array_equal(evaluation.ids[tops.windows], tops.ids)
        or (tops.positions & ~scored[tops.windows]).any()
    ):
        raise InputError(run.top_logits, f"is of other tokens than {run.evaluation} has", elsewhere(command))
    return StoredReference(tops, {name: nll[name] for name in tops.runtimes}, evaluation)


def check_top_logits(run: Run, command: str) -> None:
    """Raise InputError where `validate` has not run, kept nothing, or ran another checkpoint than is there now."""
    if not (validated(run) and run.top_logits.is_file() and run.tokens.is_file() and run.accuracy.is_file()):
        raise InputError(
            run.top_logits, "is missing, and without torch runtimes are held against what is in it", elsewhere(command)
        )
    record = run.record()
    now = {name: digest for stage in record.stages.values() for name, digest in stage.outputs.items()}
    added_inputs = {name for host_runtime in host_runtimes(run).values() for name in host_runtime.inputs}
    for name, digest in record.stages[VALIDATE.name].inputs.items():
        if "." in name and name not in added_inputs and now.get(name) != digest:
            raise InputError(run.top_logits, f"is of another {name} than the run has now", elsewhere(command))


def differs(stored: Protocol, asked: Protocol) -> str | None:
    """The first fact in which two evaluations differ; None for the same tokens in the same windows."""
    if stored.sha256 != asked.sha256:
        return f"is of the text {stored.dataset}, and the tokens here are those of {asked.dataset}"
    for name, option in (("context", "--context"), ("stride", "--stride"), ("prompt", "--as-served")):
        theirs = getattr(stored, name)
        ours = getattr(asked, name)
        if theirs != ours:
            return f"was kept with {option} {'whole windows' if theirs is None else theirs}, not {ours}"
    if stored.prefix != asked.prefix:
        return "is of windows that begin otherwise"
    return None


def elsewhere(command: str) -> str:
    """The remedy where nothing that fits is kept."""
    return f"run `{command}` on the machine that calibrated it, and copy the run again"


@contextmanager
def working(run: Run, key: Mapping[str, object]) -> Iterator[Path]:
    """A folder with which a killed call goes on; it is removed at the end, and after an error."""
    with WorkFolder(run.root, WORK).opened({**key, "fp8q": __version__, "libraries": library_versions()}) as folder:
        try:
            yield folder
        except Exception:  # not a signal
            remove(folder)
            raise
    remove(folder)


@dataclass(frozen=True)
class AddedRun:
    """Runtimes to hold against what the run keeps: the `options` that ask for them, on the stored protocol, and the
    `calibration` windows int64 [windows, seq_len]. `adapted`: what is kept with each adapter on.
    """

    run: Run
    options: ValidateOptions
    reference: StoredReference
    calibration: Tokens
    adapted: Mapping[str, StoredReference]


def as_stored(run: Run, options: ValidateOptions) -> ValidateOptions:
    """Return `options` with the windows that the run was validated on, where none are asked for."""
    if not validated(run):
        return options
    stored = load_accuracy(run).protocol
    return replace(
        options,
        context=options.context or stored.context,
        stride=options.stride or (None if options.context else stored.stride),
        as_served=options.as_served or stored.prompt,
    )


def there_command(run: Run, options: ValidateOptions) -> str:
    """The command that makes what is to be kept, on the machine that calibrated."""
    asked = {"--context": options.context, "--stride": options.stride, "--as-served": options.as_served}
    return " ".join(
        [f"fp8q validate {run.root}", *(f"{name} {value}" for name, value in asked.items() if value is not None)]
    )


def added_run(
    run: Run, options: ValidateOptions, calibration: Tokens, evaluate: Callable[[ValidateOptions], Evaluation]
) -> AddedRun:
    """Find what the run keeps for the runtimes of `options`; `evaluate` cuts the windows that options describe.

    Raises InputError, with the command for the machine that calibrated, where nothing that fits is kept.
    """
    command = there_command(run, options)
    check_top_logits(run, command)
    asked = as_stored(run, options)
    tokens = evaluate(asked)
    adapted = {name: stored_reference(run, tokens, command, name) for name in adapters_of(run)}
    return AddedRun(run, asked, stored_reference(run, tokens, command), calibration, adapted)


def run_added(asked: AddedRun, notes: Notes) -> tuple[list[str], dict[str, str]]:
    """Run the runtimes that are not there yet and write their rows; return their names, and why some failed.

    A runtime of which anything fails is not written. Raises BackendError where none works.
    """
    run = asked.run
    inputs = runtime_inputs(asked)
    todo = [name for name in asked.options.chosen if not is_there(run, name, inputs[name])]
    if not todo:
        return [], {}
    start = time.monotonic()
    key = {"inputs": inputs, "stored": run.record().stages[VALIDATE.name].outputs}
    turns = _opened(asked, todo)
    _note(asked, todo, notes)
    with working(run, {**key, "runtimes": todo}) as folder:
        rows, nll, tops, failed = _taken(asked, turns, folder, notes)
        ran = [name for name in todo if not any(outcome.partition(WITH)[0] == name for outcome in failed)]
        if not ran:
            raise BackendError("", "; ".join(failed.values()))

        def of(named: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in named.items() if name.partition(WITH)[0] in ran}

        added = {name: inputs[name] for name in ran}
        outcome = {adapter: of(of_adapter) for adapter, of_adapter in rows.items()}
        add_runtimes(run, AddedRuntimes(outcome, of(nll), of(tops), added, time.monotonic() - start), [], notes)
    return ran, failed


def _opened(asked: AddedRun, todo: list[str]) -> dict[str | None, dict[str, Opener]]:
    """The functions that load the runtimes `todo`, by adapter; the first is loaded already, so that what does not load
    is one line, before anything is said or written.
    """
    protocol = asked.reference.evaluation.protocol
    turns: dict[str | None, dict[str, Opener]] = {}
    for adapter in (None, *asked.adapted):
        names = [name for name in todo if adapter is None or takes_adapter(asked.run, name, adapter)]
        turns[adapter] = {
            name: session_opener(name, asked.run, adapter, protocol.prompt, protocol.context) for name in names
        }
    turns[None][todo[0]] = handed_over(loading(todo[0], turns[None][todo[0]]), turns[None][todo[0]])
    return turns


def _note(asked: AddedRun, todo: list[str], notes: Notes) -> None:
    reference = asked.reference
    first = next(iter(reference.tops.runtimes.values()))
    notes.note(
        f"{', '.join(todo)}: held against {', '.join(reference.nll)} as the run keeps them: losses of all "
        f"{reference.evaluation.protocol.tokens:,} tokens, and the {first.tokens.shape[1]} likeliest at "
        f"{len(first.rest):,}"
    )
    note_without_engines(asked.run, asked.options, notes)


def _taken(
    asked: AddedRun, turns: Mapping[str | None, Mapping[str, Opener]], folder: Path, notes: Notes
) -> tuple[dict[str | None, dict[str, RuntimeAccuracy]], ByToken, dict[str, TopLogits], dict[str, str]]:
    """Run all turns: the rows by adapter, and losses, likeliest tokens and failures by the names in the files."""
    rows: dict[str | None, dict[str, RuntimeAccuracy]] = {}
    nll: dict[str, Any] = {}
    tops: dict[str, TopLogits] = {}
    failed: dict[str, str] = {}
    for number, (adapter, made) in enumerate(turns.items()):
        reference = asked.adapted[adapter] if adapter else asked.reference
        tokens = reference.evaluation
        size = graph_vocabulary(asked.run)
        if made:
            comparison = compare_in_turn(
                Turns(tokens, made, size, folder / f"windows-{number}", reference.token_measure), notes
            )
            rows[adapter] = against_stored(comparison, reference) if adapter else explained(asked, comparison)
            nll |= {with_adapter(name, adapter): values for name, values in comparison.nll.items()}
            tops |= {with_adapter(name, adapter): top for name, top in comparison.top.items()}
            failed |= {with_adapter(name, adapter): why for name, why in comparison.failed.items()}
    return rows, nll, tops, failed


def handed_over(opened: AnyForward, again: Opener) -> Opener:
    """Load a runtime that is `opened` already: it is handed over once, and let go; later it is loaded `again`."""
    waiting = [opened]
    return lambda: waiting.pop() if waiting else again()


def runtime_inputs(asked: AddedRun) -> dict[str, dict[str, str]]:
    """List the inputs of each runtime that no other one of the run reads, name -> SHA-256: its engine, or graphs of
    another precision.

    Raises InputError for an engine that the windows are too long for.
    """
    run = asked.run
    engines = engines_here(asked.run, asked.options)
    for engine in engines:
        engine.check_windows(asked.reference.evaluation)
    recorded = run.record().stages[VALIDATE.name].inputs
    others = {name for host_runtime in host_runtimes(run).values() for name in host_runtime.inputs}
    inputs = {}
    for name in asked.options.chosen:
        precision = RUNTIMES[name].precision
        files = {} if precision == "fp8" or name in asked.options.engines else files_of(run, precision)
        for engine in engines:
            files |= engine.file if engine.name.partition(WITH)[0] == name else {}
        inputs[name] = {file: digest for file, digest in files.items() if file in others or file not in recorded}
    return inputs


def is_there(run: Run, runtime: str, inputs: Mapping[str, str]) -> bool:
    """Tell whether a runtime's row is there, of these inputs and this version."""
    if runtime not in load_accuracy(run).runtimes:
        return False
    recorded = run.record().stages[VALIDATE.name]
    added = host_runtimes(run).get(runtime)
    if added is None:
        return True  # the machine that calibrated ran it
    return added.version == __version__ and all(recorded.inputs.get(name) == digest for name, digest in inputs.items())


def explained(asked: AddedRun, outcome: Outcome) -> dict[str, RuntimeAccuracy]:
    """The rows of what ran, with the loss by the frequency of tokens and by distance from the prompt."""
    tokens = asked.reference.evaluation
    base = asked.reference.nll.get("bf16")
    return {
        name: row.model_copy(
            update={
                "by_frequency": by_frequency(tokens, asked.calibration, outcome.nll[name], base),
                "by_distance": by_distance(tokens, outcome.nll[name], None),
            }
        )
        for name, row in against_stored(outcome, asked.reference).items()
    }
