"""The table of docs/kv-cache.md."""

from collections.abc import Mapping

from markdown import load, table

from pages.real import kv_cache_heads, kv_cache_real

#: The rows that can be chosen; the result also has other bases of keys, which docs/decisions/0041 rejects.
ROWS = (
    "K",
    "V",
    "K and V",
    "K and V, a scale per head",
    "K and V, without the layer that loses most",
    "for comparison: all W8A8 products, cache wide",
)


def kv_cache() -> str:
    """KL of the cache alone, by what of it is FP8, and of all products beside it."""
    models: Mapping[str, Mapping[str, float]] = load("kv_cache")["kl_mean_nats_times_1e6"]
    rows = [
        [row.replace("cache wide", "cache in FP32"), *(f"{found[row]:.0f}" for found in models.values())]
        for row in ROWS
    ]
    return table(["KL, nats × 10⁶", *models], rows)


TABLES = (kv_cache_real,)
DECISION_TABLES, HEAD_TABLES = (kv_cache,), (kv_cache_heads,)
