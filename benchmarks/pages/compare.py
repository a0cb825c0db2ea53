"""The tables of docs/compare.md: what real servers were told to be, wrong and right servers of SmolLM2, and the files
that others make.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from markdown import gigabytes, load, table

from fp8q.core.columns import increase


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


def wrong_models() -> str:
    """By the codes of inputs: how many servers of other models, and of the validated one, pass; which of the others,
    each with its KL; and the KL of the furthest right server.
    """
    results: Mapping[str, Mapping[str, Mapping[str, Any]]] = load("wrong_models")["results"]
    lines = []
    for codes, servers in results.items():
        other, right = servers["other"], servers["right"]
        passing = {name: row for name, row in other.items() if row["passes"]}
        listed = [f"{name} ({row['kl_nats']:.1g})" for name, row in sorted(passing.items(), key=_by_distance)]
        lines.append(
            [
                codes,
                f"{len(passing)} of {len(other)}",
                "; ".join(listed),
                f"{sum(row['passes'] for row in right.values())} of {len(right)}",
                f"{max(row['kl_nats'] for row in right.values()):.1g}",
            ]
        )
    passed = "other models that pass"
    return table(
        ["inputs", passed, "which (KL, nats)", "right servers that pass", "KL of the furthest of these"], lines
    )


def made_by_others() -> str:
    """A row for each file that others make: its loss on each model, and what lint says of the first model's file."""
    models = dict(chain.from_iterable(load(f"made_by_others{part}")["results"].items() for part in ("_smollm2", "")))
    first = next(iter(models.values()))
    lines = []
    for maker, row in first.items():
        servers = [f"{server} {', '.join(rules)}" for server, rules in row["lint"].items() if rules]
        lines.append([maker, *(_loss(rows[maker]) for rows in models.values()), "; ".join(servers)])
    return table(["made by", *models, "lint for servers"], lines)


def _loss(row: Mapping[str, Any]) -> str:
    """Rise of perplexity, KL and flips; in brackets where weights alone were measured."""
    rise, kl = increase(row["perplexity_increase"]), f"{1e6 * row['kl_nats']['mean']:,.0f}"
    loss = f"{rise}, {kl}, {row['flips']['mean']:.1%}"
    return f"({loss})" if row["loaded_by"] == "fp8q" else loss


def compare_memory() -> str:
    """The peak of anonymous memory of whole models and layer by layer, and the most that the latter holds on disk."""
    result = load("compare_memory")
    lines = [
        [
            str(pair["layers"]),
            gigabytes(pair["checkpoint_bytes"]),
            *(gigabytes(pair[way]["peak_anonymous_bytes"]) for way in ("whole", "streamed")),
            gigabytes(pair["streamed"]["state_bytes"]),
        ]
        for pair in result["checkpoints"]
    ]
    return table(["layers", "checkpoint", "peak, whole", "peak, `--stream`", "on disk, `--stream`"], lines)


def _by_distance(entry: tuple[str, Mapping[str, Any]]) -> float:
    distance: float = entry[1]["kl_nats"]
    return distance


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    distance = f"{row['kl']:,.1f}" if row["kl"] < 1e5 else f"{row['kl']:,.0f}"
    return distance if row["right"] else f"**`{row['verdict']}`** {distance}"


def _between(values: list[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


TABLES = (compare_memory,)
DECISION_TABLES = (compare, wrong_models)
FILE_TABLES = (made_by_others,)
