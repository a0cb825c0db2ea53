"""The table of docs/compare.md: what real servers were told to be."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table


def compare() -> str:
    """Each server's expected verdict, and for each model the distance from the nearest runtime, or another verdict."""
    results: Mapping[str, Mapping[str, Mapping[str, Any]]] = load("compare")["results"]
    cases = list(dict.fromkeys(case for rows in results.values() for case in rows))
    lines = []
    for case in cases:
        asked = [rows[case] for rows in results.values() if case in rows]
        lines.append(
            [
                asked[0]["server"],
                case,
                f"`{asked[0]['expected']}`",
                *(_cell(rows.get(case)) for rows in results.values()),
                _between([round(each["seconds"]) for each in asked]),
            ]
        )
    head = ["server", "of what", "expected", *(f"{name}, 10⁻⁶ nats" for name in results)]
    return table([*head, "seconds"], lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    distance = f"{row['kl']:,.1f}" if row["kl"] < 1e5 else f"{row['kl']:,.0f}"
    return distance if row["right"] else f"**`{row['verdict']}`** {distance}"


def _between(values: list[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


TABLES = (compare,)
