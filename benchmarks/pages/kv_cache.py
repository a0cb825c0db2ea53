"""The table of docs/kv-cache.md."""

from collections.abc import Mapping

from markdown import load, table


def kv_cache() -> str:
    """KL of the cache alone, by what of it is FP8, and of all products beside it."""
    models: Mapping[str, Mapping[str, float]] = load("kv_cache")["kl_mean_nats_times_1e6"]
    rows = [[row, *(f"{found[row]:.0f}" for found in models.values())] for row in next(iter(models.values()))]
    return table(["KL, nats × 10⁶", *models], rows)


TABLES = (kv_cache,)
