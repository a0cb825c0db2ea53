"""Compare runs: how each was quantized, its loss, its cost, and its difference from the first.

Perplexities of two runs are compared only where both scored the same tokens in the same windows; then token by token,
like a run is with BF16.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...calibrate.measure.statistics import load_record
from ...core.columns import Column, Table, count, increase, nats, number_column, share, size, text_column
from ...core.run import Run
from ...options import ONE
from ...quantize.scales.decisions import Scales, load_scales
from ..accuracy.bootstrap import increase_interval
from ..accuracy.decision import interval_text
from ..accuracy.document import load_accuracy, load_token_losses
from .accuracy_rows import accuracy_rows
from .rows import SizeRow, size_rows, wrote
from .verdict import report_verdict

CACHES = {"": "BF16", "v": "values in FP8", "kv": "FP8"}


@dataclass(frozen=True)
class RunRow:
    """One run with the accuracy of its worst FP8 runtime, None where it was not evaluated. `than_first`: the interval
    of its perplexity's relative change over the first run's, where both scored the same tokens. `products`: the GEMMs
    in FP8, of `all_products`.
    """

    name: str
    model: str
    same_model: bool
    activations: str
    weights: str
    cache: str
    products: int
    all_products: int
    verdict: str
    runtime: str | None = None
    perplexity: float | None = None
    perplexity_increase: float | None = None
    increase_interval: tuple[float, float] | None = None
    kl_mean_nats: float | None = None
    top1_agreement: float | None = None
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
    scales, accuracy = load_scales(run), accuracy_rows(run)
    verdict = report_verdict(run)
    row = next((row for row in accuracy if row.runtime == verdict.runtime), None)
    low, high = (row.increase_low, row.increase_high) if row else (None, None)
    checkpoint: SizeRow | None = next(
        (size_row for size_row in size_rows(run) if size_row.what == "FP8 checkpoint"), None
    )
    return RunRow(
        name,
        model=load_record(run).model.name,
        same_model=is_same_model(first, run),
        activations=terms(scales),
        weights=" and ".join(sorted({weight.rounding for weight in scales.weights.values()})) or "none",
        cache=CACHES[scales.cache_parts] + (" by head" if scales.per_head else "") + scales.cache_left,
        products=len(scales.fp8_gemms),
        all_products=len(scales.fp8_gemms) + len(scales.skipped),
        verdict=verdict.kind,
        runtime=verdict.runtime,
        perplexity=row.perplexity if row else None,
        perplexity_increase=row.perplexity_increase if row else None,
        increase_interval=None if low is None or high is None else (low, high),
        kl_mean_nats=row.kl_mean_nats if row else None,
        top1_agreement=row.top1_agreement if row else None,
        than_first=than(first, run, verdict.runtime)
        if verdict.runtime and run.root != first.root and is_same_model(first, run)
        else None,
        checkpoint_bytes=checkpoint.bytes if checkpoint else None,
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
    return None if low is None or high is None else (low, high)


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
    if any(row.increase_interval for row in rows):
        notes.append("“95 % interval”: of the increase over the BF16 model of the same run.")
    if any(row.than_first for row in rows):
        notes.append(
            f"“Than the first”: the 95 % interval of the perplexity’s change over that of {rows[0].name}, token by "
            "token, where both were evaluated on the same windows."
        )
    columns = (
        text_column("run", "name"),
        Column[RunRow]("model", lambda row: row.model if others else None, numeric=False),
        text_column("activations"),
        text_column("rounding", "weights"),
        text_column("KV cache", "cache"),
        number_column("GEMMs in FP8", count, "products"),
        number_column("checkpoint", size, "checkpoint_bytes"),
        Column[RunRow]("perplexity", lambda row: row.perplexity, "{:.4f}".format),
        number_column("increase", increase, "perplexity_increase"),
        number_column("95 % interval", interval_text, "increase_interval"),
        number_column("KL mean, nats", nats, "kl_mean_nats"),
        number_column("top-1 agreement", share, "top1_agreement"),
        number_column("than the first", interval_text, "than_first"),
    )
    return Table(
        "Beside other runs",
        rows,
        columns,
        "No other run was named: `fp8q report RUN --compare OTHER`.",
        " ".join(notes),
    )
