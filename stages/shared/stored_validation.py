"""Run runtimes that need no torch on the tokens that the run was validated on, and add them to what is there."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...core.errors import BackendError
from ...core.run import Run
from ...options import ValidateOptions, graph_runtime
from ...validate.accuracy.as_served import by_distance
from ...validate.accuracy.compare import AnyForward, Opener, Outcome, compare_in_turn, loading
from ...validate.accuracy.document import WITH, ByToken, RuntimeAccuracy, load_accuracy, with_adapter
from ...validate.accuracy.perplexity import Evaluation
from ...validate.accuracy.session_logits import graph_vocabulary, session_opener
from ...validate.accuracy.stored_reference import StoredReference, against_stored
from ...validate.accuracy.top_logits import TopLogits
from ...validate.report.loss_buckets import by_frequency
from ..pipeline.stages import VALIDATE
from ..pipeline.steps import Notes
from .adapters import adapters_of
from .added_runtimes import (
    AddedRuntimes,
    add_runtimes,
    beside_of,
    check_top_logits,
    stored_reference,
    validated,
    working,
)
from .engines import engines_here, note_without_engines, takes_adapter
from .model_files import files_of
from .texts import Tokens


@dataclass(frozen=True)
class BesideRun:
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


def beside_run(
    run: Run, options: ValidateOptions, calibration: Tokens, evaluate: Callable[[ValidateOptions], Evaluation]
) -> BesideRun:
    """Find what the run keeps for the runtimes of `options`; `evaluate` cuts the windows that options describe.

    Raises InputError, with the command for the machine that calibrated, where nothing that fits is kept.
    """
    command = there_command(run, options)
    check_top_logits(run, command)
    asked = as_stored(run, options)
    tokens = evaluate(asked)
    adapted = {name: stored_reference(run, tokens, command, name) for name in adapters_of(run)}
    return BesideRun(run, asked, stored_reference(run, tokens, command), calibration, adapted)


def run_beside(asked: BesideRun, notes: Notes) -> tuple[list[str], dict[str, str]]:
    """Run the runtimes that are not there yet and write their rows; return their names, and why some failed.

    A runtime of which anything fails is not written. Raises BackendError where none works.
    """
    run, inputs = asked.run, own_inputs(asked)
    todo = [name for name in asked.options.chosen if not is_there(run, name, inputs[name])]
    if not todo:
        return [], {}
    start, key = time.monotonic(), {"inputs": inputs, "stored": run.record().stages[VALIDATE.name].outputs}
    turns = _opened(asked, todo)
    _note(asked, todo, notes)
    with working(run, {**key, "runtimes": todo}) as folder:
        rows, nll, tops, failed = _taken(asked, turns, folder, notes)
        ran = [name for name in todo if not any(each.partition(WITH)[0] == name for each in failed)]
        if not ran:
            raise BackendError("", "; ".join(failed.values()))

        def of(named: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in named.items() if name.partition(WITH)[0] in ran}

        added = {name: inputs[name] for name in ran}
        each = {adapter: of(of_adapter) for adapter, of_adapter in rows.items()}
        add_runtimes(run, AddedRuntimes(each, of(nll), of(tops), added, time.monotonic() - start), [], notes)
    return ran, failed


def _opened(asked: BesideRun, todo: list[str]) -> dict[str | None, dict[str, Opener]]:
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


def _note(asked: BesideRun, todo: list[str], notes: Notes) -> None:
    reference = asked.reference
    first = next(iter(reference.tops.runtimes.values()))
    notes.note(
        f"{', '.join(todo)}: held against {', '.join(reference.nll)} as the run keeps them: losses of all "
        f"{reference.evaluation.protocol.tokens:,} tokens, and the {first.tokens.shape[1]} likeliest at "
        f"{len(first.rest):,}"
    )
    note_without_engines(asked.run, asked.options, notes)


def _taken(
    asked: BesideRun, turns: Mapping[str | None, Mapping[str, Opener]], folder: Path, notes: Notes
) -> tuple[dict[str | None, dict[str, RuntimeAccuracy]], ByToken, dict[str, TopLogits], dict[str, str]]:
    """Run all turns: the rows by adapter, and losses, likeliest tokens and failures by the names in the files."""
    rows = dict[str | None, dict[str, RuntimeAccuracy]]()
    nll, tops, failed = dict[str, Any](), dict[str, TopLogits](), dict[str, str]()
    for number, (adapter, made) in enumerate(turns.items()):
        reference = asked.adapted[adapter] if adapter else asked.reference
        tokens, size = reference.evaluation, graph_vocabulary(asked.run)
        if made:
            found = compare_in_turn(tokens, made, size, folder / f"windows-{number}", notes, reference.token_measure)
            rows[adapter] = against_stored(found, reference) if adapter else explained(asked, found)
            nll |= {with_adapter(name, adapter): values for name, values in found.nll.items()}
            tops |= {with_adapter(name, adapter): top for name, top in found.top.items()}
            failed |= {with_adapter(name, adapter): why for name, why in found.failed.items()}
    return rows, nll, tops, failed


def handed_over(opened: AnyForward, again: Opener) -> Opener:
    """Load a runtime that is `opened` already: it is handed over once, and let go; later it is loaded `again`."""
    waiting = [opened]
    return lambda: waiting.pop() if waiting else again()


def own_inputs(asked: BesideRun) -> dict[str, dict[str, str]]:
    """List the inputs of each runtime that no other one of the run reads, name -> SHA-256: its engine, or graphs of
    another precision.

    Raises InputError for an engine that the windows are too long for.
    """
    run, engines = asked.run, engines_here(asked.run, asked.options)
    for engine in engines:
        engine.check_windows(asked.reference.evaluation)
    recorded = run.record().stages[VALIDATE.name].inputs
    others = {name for each in beside_of(run).values() for name in each.inputs}
    found = {}
    for name in asked.options.chosen:
        precision = graph_runtime(name)[1]
        files = {} if precision == "fp8" or name in asked.options.engines else files_of(run, precision)
        for engine in engines:
            files |= engine.file if engine.name.partition(WITH)[0] == name else {}
        found[name] = {file: digest for file, digest in files.items() if file in others or file not in recorded}
    return found


def is_there(run: Run, runtime: str, inputs: Mapping[str, str]) -> bool:
    """Tell whether a runtime's row is there, of these inputs and this version."""
    if runtime not in load_accuracy(run).runtimes:
        return False
    recorded, added = run.record().stages[VALIDATE.name], beside_of(run).get(runtime)
    if added is None:
        return True  # the machine that calibrated ran it
    return added.version == __version__ and all(recorded.inputs.get(name) == digest for name, digest in inputs.items())


def explained(asked: BesideRun, outcome: Outcome) -> dict[str, RuntimeAccuracy]:
    """The rows of what ran, with the loss by the frequency of tokens and by distance from the prompt."""
    tokens, base = asked.reference.evaluation, asked.reference.nll.get("bf16")
    return {
        name: row.model_copy(
            update={
                "by_frequency": by_frequency(tokens, asked.calibration, outcome.nll[name], base),
                "by_distance": by_distance(tokens, outcome.nll[name], None),
            }
        )
        for name, row in against_stored(outcome, asked.reference).items()
    }
