"""Add runtimes to what `validate` wrote, on a host that cannot run those that are there already.

Their rows stand in `accuracy.json` beside those of the machine that calibrated, held against what it kept. The stage's
record gains them as facts, with the inputs that are theirs alone, so that what either machine ran is current on both.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ... import __version__
from ...core.columns import increase, nats
from ...core.errors import InputError
from ...core.files import remove, replacing, write_document
from ...core.record import library_versions
from ...core.run import Run
from ...options import ValidateOptions
from ...quantize.checkpoint.card_additions import state_validated
from ...validate.accuracy.document import (
    WITH,
    Accuracy,
    Protocol,
    RuntimeAccuracy,
    load_accuracy,
    load_token_arrays,
    load_token_losses,
)
from ...validate.accuracy.perplexity import Evaluation
from ...validate.accuracy.stored_reference import StoredReference
from ...validate.accuracy.top_logits import TopLogits, arrays_of, load_top_arrays, load_top_logits
from ..pipeline.stage import Key
from ..pipeline.stages import VALIDATE, BesideRuntime, ValidateFacts
from ..pipeline.steps import Notes
from .model_files import may_change_card

ValidateKey = Key[ValidateOptions, ValidateFacts]
#: The folder of a call that was killed; no stage is called so, since the one that it adds to is finished.
WORK = "validate-beside"


def validated(run: Run) -> bool:
    """Tell whether `validate` has run, and kept the likeliest tokens of its runtimes."""
    recorded = run.record().stages.get(VALIDATE.name)
    return recorded is not None and run.top_logits.name in recorded.outputs


def beside_of(run: Run) -> dict[str, BesideRuntime]:
    """The runtimes that were added to what `validate` wrote."""
    return run.facts(VALIDATE).beside or {}


def with_beside(run: Run, key: ValidateKey) -> ValidateKey:
    """Return `key` with the runtimes that were added since: what they are held against is as it was."""
    if not validated(run):
        return key
    added, recorded = beside_of(run), run.record().stages[VALIDATE.name].inputs
    inputs = {name: recorded[name] for each in added.values() for name in each.inputs}
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
        runtime for runtime, each in beside_of(run).items() if any(now.get(name) != then[name] for name in each.inputs)
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

    accuracy, losses, tops = load_accuracy(run), load_token_arrays(run), load_top_arrays(run)
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
    gone = {name for runtime in without for name in beside_of(run)[runtime].inputs}
    beside = {name: each for name, each in beside_of(run).items() if name not in without}
    beside |= {
        name: BesideRuntime(
            inputs=sorted(inputs), version=__version__, libraries=library_versions(), seconds=round(added.seconds, 3)
        )
        for name, inputs in added.inputs.items()
    }
    inputs = {name: digest for name, digest in recorded.inputs.items() if name not in gone}
    inputs |= {name: digest for each in added.inputs.values() for name, digest in each.items()}
    key = Key(inputs, options, facts.model_copy(update={"beside": beside or None}))
    VALIDATE.amend(run, key, [run.accuracy, run.tokens, run.top_logits], notes)
    if may_change_card(run):
        state_validated(run.card, [card_line(name, row) for name, row in runtimes.items() if name in beside])


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
    own = {name for each in beside_of(run).values() for name in each.inputs}
    for name, digest in record.stages[VALIDATE.name].inputs.items():
        if "." in name and name not in own and now.get(name) != digest:
            raise InputError(run.top_logits, f"is of another {name} than the run has now", elsewhere(command))


def differs(stored: Protocol, asked: Protocol) -> str | None:
    """The first fact in which two evaluations differ; None for the same tokens in the same windows."""
    if stored.sha256 != asked.sha256:
        return f"is of the text {stored.dataset}, and the tokens here are those of {asked.dataset}"
    for name, option in (("context", "--context"), ("stride", "--stride"), ("prompt", "--as-served")):
        theirs, ours = getattr(stored, name), getattr(asked, name)
        if theirs != ours:
            return f"was kept with {option} {'whole windows' if theirs is None else theirs}, not {ours}"
    return "is of windows that begin otherwise" if stored.prefix != asked.prefix else None


def elsewhere(command: str) -> str:
    """The remedy where nothing that fits is kept."""
    return f"run `{command}` on the machine that calibrated it, and copy the run again"


@contextmanager
def working(run: Run, key: Mapping[str, object]) -> Iterator[Path]:
    """A folder with which a killed call goes on; it is removed at the end, and after an error."""
    with run.work(WORK, {**key, "fp8q": __version__, "libraries": library_versions()}) as folder:
        try:
            yield folder
        except Exception:  # not a signal
            remove(folder)
            raise
    remove(folder)
