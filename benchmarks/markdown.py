"""What the tables in docs are made with: a result, and a table of Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from result import RESULTS

Figures = Mapping[str, Any]
MEGABYTE, GIGABYTE = 1e6, 1e9


#: The names of the results that were loaded; `tables` empties it before it makes a table.
LOADED: list[str] = []


def load(name: str, limits: bool = True) -> Any:
    """The result `name`, whose missed limits stand below the table unless `limits` is False: they are of other rows."""
    if limits:
        LOADED.append(name)
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---").replace("--- |\n", "---|\n")
    )


def gigabytes(size: float) -> str:
    """Bytes, as a cell has them."""
    return f"{size / GIGABYTE:.2f} GB"
