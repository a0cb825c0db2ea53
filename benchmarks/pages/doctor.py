"""The table of docs/doctor.md."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

#: What is shown of healthy runs, and how.
SHOWN = {
    "product_errors": ("worst product", "{:.1%}"),
    "hidden_states": ("hidden states", "{:.1%}"),
    "attention_logits": ("logit", "{:.0f}"),
    "norm_inputs": ("norm input", "{:.0f}"),
    "cache_tokens": ("token", "{:.1f}×"),
    "amax_jumps": ("jump", "{:.2f}×"),
    "scale": ("scale", "{:.1f} dB"),
    "underflow": ("underflow", "{:.1%}"),
}
DAMAGES = {"outliers": "outlier channels", "scale": "a scale too small", "keys": "saturating keys"}


def doctor() -> str:
    """The largest values of healthy runs, and what finds each damage."""
    rows = [
        [name, *_healthy(found["checks"]), *(_found(found["damages"][damage]) for damage in DAMAGES)]
        for name, found in load("doctor")["results"].items()
    ]
    head = ["model", *(title for title, _ in SHOWN.values()), *DAMAGES.values()]
    return table(head, rows)


def _healthy(checks: Mapping[str, Any]) -> list[str]:
    return [write.format(checks[check]["value"]).replace("%", " %") for check, (_, write) in SHOWN.items()]


def _found(damage: Mapping[str, Any]) -> str:
    return ", ".join(f"`{check}`" for check in damage["found_by"]) or "not found"


TABLES = (doctor,)
