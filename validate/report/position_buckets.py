"""Compute the loss and the divergence by a token's position in its window, up to the longest that was evaluated.

The buckets double in length, from 1 to 32 up: what a cache of codes adds grows with the tokens behind a position, if it
grows, and a plot by equal steps shows a long window's first thousand positions as one point.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.columns import Column, Table, count, increase, nats, number_column
from ...core.run import Run
from ...options import FLOAT
from ..accuracy.decision import BF16
from ..accuracy.document import Accuracy, PositionBucket, load_accuracy
from .rows import wrote

#: Positions of the first bucket; each further one reaches twice as far.
FIRST = 32


@dataclass(frozen=True)
class PositionRow:
    """Tokens at positions `first` to `last`: BF16's perplexity, runtime -> its increase, runtime -> KL from BF16."""

    first: int
    last: int
    tokens: int
    perplexity: float
    increases: Mapping[str, float]
    divergences: Mapping[str, float]


def doubling_spans(context: int) -> Iterator[tuple[int, int]]:
    """The first and the last position of each bucket of a window of `context` tokens, counted from 1."""
    first, last = 1, FIRST
    while first <= context:
        yield first, min(last, context)
        first, last = last + 1, 2 * last


def by_position(
    nll: npt.NDArray[np.float32], base: npt.NDArray[np.float32] | None, kl: npt.NDArray[np.float32] | None
) -> list[PositionBucket]:
    """Mean of `nll` [windows, context] (nats; NaN: not scored) in each bucket, how much more it is than `base`, BF16's,
    and the mean of `kl`, from BF16. Buckets without a scored token are left out.
    """
    found = []
    for first, last in doubling_spans(nll.shape[1]):
        inside = slice(first - 1, last)
        scored = ~np.isnan(nll[:, inside])
        if not scored.any():
            continue
        loss = nll[:, inside][scored].mean(dtype=np.float64)
        before = None if base is None else base[:, inside][scored].mean(dtype=np.float64)
        found.append(
            PositionBucket(
                first=first,
                last=last,
                tokens=int(scored.sum()),
                nll_nats=float(loss),
                nll_increase_nats=None if before is None else float(loss - before),
                kl_mean_nats=None if kl is None else float(kl[:, inside][scored].mean(dtype=np.float64)),
            )
        )
    return found


def position_rows(run: Run) -> list[PositionRow]:
    """The evaluation's tokens by their position; none where that is not known, or of one bucket alone."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    runtimes = load_accuracy(run).runtimes
    of_base = runtimes[BF16].by_position if BF16 in runtimes else None
    rows = []
    for number, each in enumerate(of_base or []):
        others = {
            name: found.by_position[number]
            for name, found in runtimes.items()
            if found.by_position and name not in FLOAT
        }
        rows.append(
            PositionRow(
                each.first,
                each.last,
                each.tokens,
                float(np.exp(each.nll_nats)),
                {n: float(np.expm1(o.nll_increase_nats)) for n, o in others.items() if o.nll_increase_nats is not None},
                {name: other.kl_mean_nats for name, other in others.items() if other.kl_mean_nats is not None},
            )
        )
    return rows if len(rows) > 1 else []


def position_table(rows: Sequence[PositionRow], note: str = "") -> Table[PositionRow]:
    """Tabulate perplexity and KL by position; `note`: on the positions that were not evaluated."""

    def increase_of(name: str) -> Column[PositionRow]:
        return Column(name, lambda row: row.increases.get(name), increase)

    def divergence_of(name: str) -> Column[PositionRow]:
        return Column(f"KL of {name}, nats", lambda row: row.divergences.get(name), nats)

    columns = (
        Column[PositionRow]("position", lambda row: f"{row.first:,} to {row.last:,}"),
        number_column("tokens", count),
        Column[PositionRow]("BF16’s perplexity", lambda row: row.perplexity, "{:.4f}".format),
        *map(increase_of, dict.fromkeys(name for row in rows for name in row.increases)),
        *map(divergence_of, dict.fromkeys(name for row in rows for name in row.divergences)),
    )
    return Table("By position in the window", rows, columns, "Not evaluated yet: run `fp8q validate RUN`.", note)


def not_covered(accuracy: Accuracy) -> str:
    """Name the model's positions that no window reached, and the command that does; empty where there are none."""
    context, positions = accuracy.protocol.context, accuracy.positions
    if positions is None or context >= positions:
        return ""
    return (
        f"Positions {context + 1:,} to {positions:,} of the model were not evaluated, since windows have {context:,} "
        f"tokens: `fp8q validate RUN --context {positions}` reaches them, on a text of that length."
    )


def is_flat(rows: Sequence[PositionRow]) -> bool:
    """Tell whether no runtime's KL rises along the window: in no bucket beyond the first is it more than a quarter
    above that of all tokens.
    """
    for name in {name for row in rows for name in row.divergences}:
        known = [(row.divergences[name], row.tokens) for row in rows if name in row.divergences]
        mean = sum(kl * tokens for kl, tokens in known) / sum(tokens for _, tokens in known)
        if any(kl > 1.25 * mean for kl, _ in known[1:]):
            return False
    return True
