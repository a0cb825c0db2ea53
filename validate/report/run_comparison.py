"""Compare runs: how each was quantized, its loss, its cost, and its difference from the first.

Perplexities of two runs are compared only where both scored the same tokens in the same windows; then token by token,
like a run is with BF16.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calibrate.measure.statistics import load_record
from ...core.columns import Column, Table, count, number_column, size, text_column
from ...core.run import Run
from ...options import ONE
from ...quantize.scales.decisions import Scales, load_scales
from ..accuracy.bootstrap import increase_interval
from ..accuracy.decision import interval_text
from ..accuracy.document import load_accuracy, load_token_losses
from .accuracy_rows import AccuracyRow, accuracy_rows
from .rows import size_rows, wrote
from .tables import ACCURACY_COLUMNS
from .verdict import report_verdict

CACHES = {"": "BF16", "v": "values in FP8", "kv": "FP8"}


#: The columns of the table of accuracy that are shown of each run.
OF_ACCURACY = {"perplexity", "increase", "95 % interval", "KL mean, nats", "top-1 agreement"}


@dataclass(frozen=True)
class RunRow:
    """One run with its `scales`, and the `accuracy` of the runtime that its verdict is on, None where it was not
    evaluated. `than_first`: the interval of its perplexity's relative change over the first run's, where both scored
    the same tokens.
    """

    name: str
    model: str
    same_model: bool
    scales: Scales
    accuracy: AccuracyRow | None = None
    than_first: tuple[float, float] | None = None
    checkpoint_bytes: int | None = None


def run_rows(runs: Sequence[Run]) -> list[RunRow]:
    """A row for each of `runs`; raises InputError for one that has no scales."""
    return [_row(run, name, runs[0]) for run, name in zip(runs, names([run.root for run in runs]), strict=True)]


def names(roots: Sequence[Path]) -> list[str]:
    """Name runs: the last part of their paths, and as many before it as tell them apart."""
    parts = [root.resolve().parts for root in roots]
    for taken in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(path[-taken:]) for path in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _row(run: Run, name: str, first: Run) -> RunRow:
    runtime = report_verdict(run).runtime
    same_model = is_same_model(first, run)
    than_first = None
    if runtime and run.root != first.root and same_model:
        than_first = than(first, run, runtime)
    return RunRow(
        name,
        load_record(run).model.name,
        same_model,
        load_scales(run),
        accuracy=next((row for row in accuracy_rows(run) if row.runtime == runtime), None),
        than_first=than_first,
        checkpoint_bytes=next((row.bytes for row in size_rows(run) if row.what == "FP8 checkpoint"), None),
    )


def is_same_model(first: Run, other: Run) -> bool:
    """Tell whether two runs were made of the same model, by the fingerprint of its weights."""
    return load_record(first).model.fingerprint == load_record(other).model.fingerprint


def terms(scales: Scales) -> str:
    """Describe the codes of activations: `one term`, `two terms`, `a tail of 64`, or the number of GEMMs with each."""
    forms = Counter(scales.forms.values())
    if len(forms) < 2:
        return next(iter(forms), ONE).words
    finer = {form: number for form, number in forms.items() if form != ONE}
    return ", ".join(f"{form.words} in {number} of {len(scales.modules)}" for form, number in finer.items())


def than(first: Run, other: Run, runtime: str) -> tuple[float, float] | None:
    """Return the 95 % interval of the perplexity of `other` over that of `first`, in the same runtime; None where
    either was not evaluated, or on other windows.
    """
    if not all(wrote(run, run.tokens, "validate") for run in (first, other)):
        return None
    protocols = [load_accuracy(run).protocol for run in (first, other)]
    losses = [load_token_losses(run) for run in (first, other)]
    if protocols[0] != protocols[1] or not all(runtime in nll for nll in losses):
        return None
    low, high = increase_interval(losses[0][runtime], losses[1][runtime])
    if low is None or high is None:
        return None
    return (low, high)


def _of_accuracy(column: Column[AccuracyRow]) -> Column[RunRow]:
    """Make a column of runs of one of their accuracies."""

    def value(row: RunRow) -> Any:
        if row.accuracy is None:
            return None
        return column.value(row.accuracy)

    return Column(column.title, value, column.write, column.numeric)


def _rounding(row: RunRow) -> str:
    return " and ".join(sorted({weight.rounding for weight in row.scales.weights.values()})) or "none"


def _cache(row: RunRow) -> str:
    return CACHES[row.scales.cache_parts] + (" by head" if row.scales.per_head else "") + row.scales.cache_left


SCALE_COLUMNS: tuple[Column[RunRow], ...] = (
    Column("activations", lambda row: terms(row.scales), numeric=False),
    Column("rounding", _rounding, numeric=False),
    Column("KV cache", _cache, numeric=False),
    Column("GEMMs in FP8", lambda row: len(row.scales.fp8_gemms), count),
)


def run_table(rows: Sequence[RunRow]) -> Table[RunRow]:
    """Runs side by side; the note explains the columns that are there, and names runs of another model."""
    others = [row for row in rows if not row.same_model]
    notes = []
    if others:
        named = ", ".join(row.name for row in others)
        notes.append(
            f"{named}: made of another model than {rows[0].name}, so that a difference in perplexity is not one of "
            "quantization."
        )
    if any(row.accuracy and row.accuracy.increase_low is not None for row in rows):
        notes.append("“95 % interval”: of the increase over the BF16 model of the same run.")
    if any(row.than_first for row in rows):
        notes.append(
            f"“Than the first”: the 95 % interval of the perplexity’s change over that of {rows[0].name}, token by "
            "token, where both were evaluated on the same windows."
        )
    columns = (
        text_column("run", "name"),
        Column[RunRow]("model", lambda row: row.model if others else None, numeric=False),
        *SCALE_COLUMNS,
        number_column("checkpoint", size, "checkpoint_bytes"),
        *(_of_accuracy(column) for column in ACCURACY_COLUMNS if column.title in OF_ACCURACY),
        number_column("than the first", interval_text, "than_first"),
    )
    return Table(
        "Beside other runs",
        rows,
        columns,
        "No other run was named: `fp8q report RUN --compare OTHER`.",
        " ".join(notes),
    )
