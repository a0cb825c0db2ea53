"""The accuracy of a run as rows: every runtime that was evaluated, with the interval of its increase over BF16."""

from dataclasses import dataclass, fields
from typing import Any

from ...core.columns import share
from ...core.run import Run
from ..accuracy.bootstrap import increase_interval, paired
from ..accuracy.document import RuntimeAccuracy, load_accuracy, load_token_losses
from .rows import wrote


@dataclass(frozen=True)
class AccuracyRow:
    """One runtime on the evaluation text; against BF16: the increase with its 95 % interval, KL, agreement.

    Shares are fractions. `windows`: how many the interval is of, None in BF16's own row; where they are too few there
    is no interval. `tokens`: scored, where only some windows were run; `kl_sums_nats`: against the same with sums in
    FP32. `kl_least_nats`: where BF16 ran elsewhere, what KL is at least by what the run keeps of it, which `stored`
    describes.
    """

    runtime: str
    perplexity: float
    nll_nats: float
    perplexity_increase: float | None = None
    increase_low: float | None = None
    increase_high: float | None = None
    windows: int | None = None
    kl_mean_nats: float | None = None
    kl_p99_nats: float | None = None
    top1_agreement: float | None = None
    top5_agreement: float | None = None
    kl_fp32_nats: float | None = None
    tokens: int | None = None
    kl_sums_nats: float | None = None
    kl_least_nats: float | None = None
    stored: str | None = None


#: The fields of a row that come from `accuracy.json`.
NUMBERS = {field.name for field in fields(AccuracyRow)} - {"stored"}


def accuracy_rows(run: Run) -> list[AccuracyRow]:
    """Every runtime that was evaluated, BF16 first; the interval of the increase is found from the paired tokens."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    accuracy = load_accuracy(run)
    nll = load_token_losses(run)
    rows = []
    for name, runtime in accuracy.runtimes.items():
        low = None
        high = None
        windows = None
        if runtime.perplexity_increase is not None and {name, "bf16"} <= nll.keys():
            low, high = increase_interval(nll["bf16"], nll[name])
            windows = len(paired(nll["bf16"], nll[name]))
        numbers = runtime.model_dump(include=NUMBERS) | stored_numbers(runtime)
        rows.append(AccuracyRow(name, increase_low=low, increase_high=high, windows=windows, **numbers))
    return sorted(rows, key=lambda row: row.runtime != "bf16")


def adapter_rows(run: Run) -> list[AccuracyRow]:
    """Return the accuracy with each adapter on, against BF16 with it; without an interval, since the losses of tokens
    are not stored.
    """
    if not wrote(run, run.accuracy, "validate"):
        return []
    return [
        AccuracyRow(f"{name}{suffix}", **runtime.model_dump(include=NUMBERS) | stored_numbers(runtime))
        for suffix, evaluated in load_accuracy(run).with_adapters()[1:]
        for name, runtime in evaluated.runtimes.items()
    ]


def image_rows(run: Run) -> list[AccuracyRow]:
    """Return the accuracy on held-out rows with images, without an interval."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    images = load_accuracy(run).images
    return [
        AccuracyRow(f"{name} on images", **runtime.model_dump(include=NUMBERS) | {"tokens": images.tokens})
        for name, runtime in (images.runtimes if images else {}).items()
        if images
    ]


def stored_numbers(runtime: RuntimeAccuracy) -> dict[str, Any]:
    """Return the fields of a runtime that was compared with stored results, of BF16 or else of the first stored
    runtime; empty for a runtime that ran on the same host as the others.
    """
    if not runtime.stored:
        return {}
    name = "bf16" if "bf16" in runtime.stored.runtimes else next(iter(runtime.stored.runtimes))
    distance = runtime.stored.runtimes[name]
    where = f"the {runtime.stored.top} likeliest tokens at {runtime.stored.positions:,} positions"
    return {
        "kl_least_nats": distance.kl_nats.mean,
        "top1_agreement": distance.top1_agreement,
        "stored": f"held against what the run keeps of {name}, {where}; all others have {share(distance.rest)} of the "
        "probability there, and KL is at least what is shown",
    }
