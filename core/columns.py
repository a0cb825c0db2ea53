"""Tables with typed columns, the same on the command line, in HTML and in notebooks.

Numbers have three or four significant digits, the precision with which they are known; shares are in percent, sizes in
decimal units, and a value that does not apply is empty, not zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


def share(fraction: float) -> str:
    """Format a fraction in percent: 0.9712 -> `97.12 %`, 0.00416 -> `0.42 %`, 3e-5 -> `0.003 %`, 0 -> `0`.

    A fraction above zero is never written as zero.
    """
    percent = 100 * fraction
    if percent in {0, 100}:
        return f"{percent:.0f} %" if percent else "0"
    if percent >= 1:
        return f"{percent:.2f} %"
    if percent >= 1e-4:
        return f"{percent:.2g} %"
    return "<0.0001 %"


def increase(fraction: float) -> str:
    """Format a relative change with its sign: 0.0031 -> `+0.31 %`."""
    return f"{100 * fraction:+.2f} %".replace("-", "−")


def decibels(value: float) -> str:
    """Format a ratio in dB with one decimal; an infinite ratio is `exact`."""
    if value == float("inf"):
        return "exact"
    return f"{value:.1f}".replace("-", "−")


def noise(value: float | None) -> str:
    """Format the decibels of a tensor that has a scale, for a sentence; None is `exact`."""
    if value is None:
        return "exact"
    return f"{decibels(value)} dB"


def magnitude(value: float) -> str:
    """Format a non-negative number with four significant digits."""
    return f"{value:.4g}"


def nats(value: float) -> str:
    """Format a divergence in nats with three significant digits."""
    return f"{value:.3g}"


def count(value: int) -> str:
    """Format a whole number with separators."""
    return f"{value:,}"


def size(value: float) -> str:
    """Format bytes in decimal units: 8_130_000 -> `8.13 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    """Format seconds for reading: `0.4 s`, `2 min 5 s`, `1 h 3 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table: `value` gets a quantity from a row (None: does not apply), `write` formats it.

    Numbers are aligned right. `wide`: a terminal of 80 columns has no room for it.
    """

    title: str
    value: Callable[[Row], Any]
    write: Callable[[Any], str] = str
    numeric: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """The text of one cell, and the value that it is sorted by."""

    text: str
    value: str | float | None
    numeric: bool


def number_column(title: str, write: Callable[[Any], str], field: str | None = None) -> Column[Any]:
    """Make a column of a row's `field`, a number, which is called like the `title` where none is named."""
    return Column(title, attrgetter(field or title), write)


def text_column(title: str, field: str | None = None) -> Column[Any]:
    """Make a column of a row's `field`, a text, which is called like the `title` where none is named."""
    return Column(title, attrgetter(field or title), numeric=False)


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows and columns under a title.

    `missing`: the text in place of an empty table, with the command to run; `note`: a remark below the table.
    """

    title: str
    rows: Sequence[Row]
    all_columns: tuple[Column[Row], ...]
    missing: str
    note: str = ""

    @property
    def columns(self) -> tuple[Column[Row], ...]:
        """The columns in which at least one row has a value."""
        return tuple(column for column in self.all_columns if any(column.value(row) is not None for row in self.rows))

    def cells(self) -> list[list[Cell]]:
        """The cells of each row, in the order of `columns`."""
        columns = self.columns
        return [[_cell(column, row) for column in columns] for row in self.rows]

    def _repr_html_(self) -> str:
        """Render the table for a notebook."""
        if not self.rows:
            return f"<p><b>{escape(self.title)}.</b> {escape(self.missing)}</p>"
        head = "".join(
            f'<th style="text-align:{_align(column.numeric)}">{escape(column.title)}</th>' for column in self.columns
        )
        body = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:{_align(cell.numeric)}">{escape(cell.text)}</td>' for cell in row)
            + "</tr>\n"
            for row in self.cells()
        )
        caption = f"<caption>{escape(self.title)}</caption>"
        note = f"\n<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>{note}"


def _align(numeric: bool) -> str:
    return "right" if numeric else "left"


def _cell(column: Column[Row], row: Row) -> Cell:
    value = column.value(row)
    return Cell("" if value is None else column.write(value), value, column.numeric)
