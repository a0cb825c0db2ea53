"""Tabulate the checks of `fp8q doctor RUN` and of a training log: verdict, module, value, and the remedies."""

from collections.abc import Sequence

from ...core.columns import Table, text_column
from .checkup import Check

#: Entries of one check that are shown; the rest are counted.
LISTED = 6


def shown_entries(checks: Sequence[Check]) -> list[Check]:
    """The entries that are shown, the worst first: of one check and verdict the first few."""
    counts: dict[tuple[str, str], int] = {}
    shown = []
    for each in checks:
        key = (each.check, each.verdict)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= LISTED:
            shown.append(each)
    return shown


def check_table(checks: Sequence[Check], ran: str) -> Table[Check]:
    """Tabulate every check, the worst last; `ran` tells in the title on what they were measured."""
    columns = (
        text_column("verdict"),
        text_column("check"),
        text_column("module"),
        text_column("found", "said"),
    )
    left = len(checks) - len(shown_entries(checks))
    title = f"Checklist ({ran}{f'; {left} more entries with --json' if left else ''})"
    return Table(title, shown_entries(checks)[::-1], columns, "Nothing to check.")


def remedies(checks: Sequence[Check]) -> list[str]:
    """List what helps, a line each, the worst last."""
    lines: dict[str, None] = {}
    for each in shown_entries(checks):
        if each.remedy:
            lines.setdefault(f"{each.verdict}: {each.module or each.check}: {each.remedy}")
    return [*lines][::-1]
