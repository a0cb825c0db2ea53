"""The tables of decision 19: what the checks say of healthy and of damaged models."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

#: What is shown of healthy runs, and how.
SHOWN = {
    "product_errors": ("worst GEMM", "{:.1%}"),
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
    """The largest values of healthy runs."""
    rows = [[name, *_healthy(found["checks"])] for name, found in load("doctor")["results"].items()]
    return table(["model", *(title for title, _ in SHOWN.values())], rows)


def damages() -> str:
    """The checks that call a damaged module bad, in all models and in some."""
    rows = []
    for damage, what in DAMAGES.items():
        found = [set(each["damages"][damage]["found_by"]) for each in load("doctor")["results"].values()]
        always = set.intersection(*found)
        rows.append([what, _names(always), _names(set.union(*found) - always)])
    return table(["damage", "found in every model by", "in some by"], rows)


def _healthy(checks: Mapping[str, Any]) -> list[str]:
    return [write.format(checks[check]["value"]).replace("%", " %") for check, (_, write) in SHOWN.items()]


def _names(checks: set[str]) -> str:
    return ", ".join(f"`{check}`" for check in sorted(checks))


DECISION_TABLES = (doctor, damages)
