"""Run runtimes that need no torch on the tokens that the run was validated on, and add them to what is there."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ... import __version__
from ...core.errors import BackendError
from ...core.run import Run
from ...options import ValidateOptions, graph_runtime
from ..pipeline.stages import VALIDATE
from ..pipeline.steps import Notes
from .added_runtimes import (
    AddedRuntimes,
    add_runtimes,
    beside_of,
    check_top_logits,
    stored_reference,
    validated,
    working,
)
from .engines import engines_here
from .model_files import files_of
from .texts import Tokens

if TYPE_CHECKING:
    from ...validate.accuracy.compare import AnyForward, Opener, Outcome
    from ...validate.accuracy.document import RuntimeAccuracy
    from ...validate.accuracy.perplexity import Evaluation
    from ...validate.accuracy.stored_reference import StoredReference


@dataclass(frozen=True)
class BesideRun:
    """Runtimes to hold against what the run keeps: the `options` that ask for them, on the stored protocol, and the
    `calibration` windows int64 [windows, seq_len].
    """

    run: Run
    options: ValidateOptions
    reference: "StoredReference"
    calibration: Tokens


def as_stored(run: Run, options: ValidateOptions) -> ValidateOptions:
    """Return `options` with the windows that the run was validated on, where none are asked for."""
    from ...validate.accuracy.document import load_accuracy

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
    run: Run, options: ValidateOptions, calibration: Tokens, evaluate: "Callable[[ValidateOptions], Evaluation]"
) -> BesideRun:
    """Find what the run keeps for the runtimes of `options`; `evaluate` cuts the windows that options describe.

    Raises InputError, with the command for the machine that calibrated, where nothing that fits is kept.
    """
    command = there_command(run, options)
    check_top_logits(run, command)
    asked = as_stored(run, options)
    return BesideRun(run, asked, stored_reference(run, evaluate(asked), command), calibration)


def run_beside(asked: BesideRun, notes: Notes) -> "Outcome | None":
    """Run the runtimes that are not there yet and write their rows; None where all are there.

    Raises BackendError where none of them works.
    """
    from ...validate.accuracy.compare import compare_in_turn, loading
    from ...validate.accuracy.session_logits import graph_vocabulary, session_opener

    run, reference = asked.run, asked.reference
    tokens, inputs = reference.evaluation, own_inputs(asked)
    todo = [name for name in asked.options.chosen if not is_there(run, name, inputs[name])]
    if not todo:
        return None
    shape = tokens.protocol.prompt, tokens.protocol.context
    made: dict[str, Opener] = {name: session_opener(name, run, None, *shape) for name in todo}
    # what does not load is one line, before anything is said or written
    made[todo[0]] = handed_over(loading(todo[0], made[todo[0]]), made[todo[0]])
    first = next(iter(reference.tops.runtimes.values()))
    notes.note(
        f"{', '.join(todo)}: held against {', '.join(reference.nll)} as the run keeps them: losses of all "
        f"{tokens.protocol.tokens:,} tokens, and the {first.tokens.shape[1]} likeliest at {len(first.rest):,}"
    )
    start = time.monotonic()
    key = {"inputs": inputs, "stored": run.record().stages[VALIDATE.name].outputs, "runtimes": todo}
    with working(run, key) as folder:
        found = compare_in_turn(tokens, made, graph_vocabulary(run), folder / "windows", notes, reference.way)
        if not found.nll:
            raise BackendError("; ".join(found.failed.values()))
        rows = explained(asked, found)
        seconds = time.monotonic() - start
        add_runtimes(
            run,
            AddedRuntimes({None: rows}, found.nll, found.top, {name: inputs[name] for name in rows}, seconds),
            [],
            notes,
        )
    return found


def handed_over(opened: "AnyForward", again: "Opener") -> "Opener":
    """Load a runtime that is `opened` already: it is handed over once, and let go; later it is loaded `again`."""
    waiting = [opened]
    return lambda: waiting.pop() if waiting else again()


def own_inputs(asked: BesideRun) -> dict[str, dict[str, str]]:
    """List the inputs of each runtime that no other one of the run reads, name -> SHA-256: its engine, or graphs of
    another precision.

    Raises InputError for an engine that the windows are too long for.
    """
    run, engines = asked.run, {engine.name: engine for engine in engines_here(asked.run, asked.options)}
    for engine in engines.values():
        engine.check_windows(asked.reference.evaluation)
    recorded = run.record().stages[VALIDATE.name].inputs
    others = {name for each in beside_of(run).values() for name in each.inputs}
    found = {}
    for name in asked.options.chosen:
        precision = graph_runtime(name)[1]
        files = engines[name].file if name in engines else {} if precision == "fp8" else files_of(run, precision)
        found[name] = {file: digest for file, digest in files.items() if file in others or file not in recorded}
    return found


def is_there(run: Run, runtime: str, inputs: Mapping[str, str]) -> bool:
    """Tell whether a runtime's row is there, of these inputs and this version."""
    from ...validate.accuracy.document import load_accuracy

    if runtime not in load_accuracy(run).runtimes:
        return False
    recorded, added = run.record().stages[VALIDATE.name], beside_of(run).get(runtime)
    if added is None:
        return True  # the machine that calibrated ran it
    return added.version == __version__ and all(recorded.inputs.get(name) == digest for name, digest in inputs.items())


def explained(asked: BesideRun, found: "Outcome") -> "dict[str, RuntimeAccuracy]":
    """The rows of what ran, with the loss by the frequency of tokens and by distance from the prompt."""
    from ...validate.accuracy.as_served import by_distance
    from ...validate.accuracy.stored_reference import against_stored
    from ...validate.report.token_frequency import by_frequency

    tokens, base = asked.reference.evaluation, asked.reference.nll.get("bf16")
    return {
        name: row.model_copy(
            update={
                "by_frequency": by_frequency(tokens, asked.calibration, found.nll[name], base),
                "by_distance": by_distance(tokens, found.nll[name], None),
            }
        )
        for name, row in against_stored(found, asked.reference).items()
    }
