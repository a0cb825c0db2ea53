"""The table of docs/adapters.md: what FP8 costs an adapter, merged and beside the base."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

#: Row -> the runtime of the result.
ROWS = {
    "merged, then FP8": "merged",
    "FP8 base, adapter beside it": "beside",
    "the base, with its own scales": "base",
    "the base, with scales that serve the adapter": "base, scales that serve the adapter",
}


def adapters() -> str:
    """KL of each mode, and what the base loses by sharing its scales."""
    models: Mapping[str, Mapping[str, Any]] = load("adapter")["results"]
    rows = [
        [row, *(f"{found['kl_mean_nats_times_1e6'][name]:.0f}" for found in models.values())]
        for row, name in ROWS.items()
    ]
    return table(["KL, nats × 10⁶", *models], rows)


TABLES = (adapters,)
