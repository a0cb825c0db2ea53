"""Tabulate the loss of decoded tokens by their distance from the prompt's end.

A form that depends on the phase reads a prompt otherwise than it decodes. What that does to the answer is largest right
behind the prompt, so that the mean over all decoded tokens does not show it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.columns import Column, Table, count, nats, number_column
from ...core.run import Run
from ..accuracy.document import load_accuracy
from .rows import wrote


@dataclass(frozen=True)
class DistanceRow:
    """The decoded tokens `first` to `last` behind a prompt, counted from 1: runtime -> mean KL from BF16, in nats."""

    first: int
    last: int
    tokens: int
    divergences: Mapping[str, float]


def distance_rows(run: Run) -> list[DistanceRow]:
    """The evaluation's decoded tokens by their distance from the prompt's end; none where whole windows were run."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    parts: dict[tuple[int, int, int], dict[str, float]] = {}
    for name, found in load_accuracy(run).runtimes.items():
        for each in found.by_distance or []:
            of = parts.setdefault((each.first, each.last, each.tokens), {})
            if each.kl_mean_nats is not None:
                of[name] = each.kl_mean_nats
    return [DistanceRow(*part, of) for part, of in parts.items()]


def distance_table(rows: Sequence[DistanceRow]) -> Table[DistanceRow]:
    """Tabulate the KL from BF16 of each runtime, near the prompt and far from it."""
    columns = (
        Column[DistanceRow]("behind the prompt", lambda row: f"{row.first:,} to {row.last:,}", numeric=False),
        number_column("tokens", count),
        *(_divergence_of(name) for name in dict.fromkeys(name for row in rows for name in row.divergences)),
    )
    missing = "Whole windows were run: `fp8q validate RUN --as-served PROMPT` decodes them behind a prompt."
    return Table("KL from BF16 by the distance from the prompt, nats", rows, columns, missing)


def _divergence_of(runtime: str) -> Column[DistanceRow]:
    return Column(runtime, lambda row: row.divergences.get(runtime), nats)
