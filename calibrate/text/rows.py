"""Turn the rows of a table into documents: choose the column, and check the values.

A document is a string, or a chat that the tokenizer's template renders as one. Chats are recognized by their column's
name and form, so that a table whose only strings are identifiers is not read as text by mistake.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...core.errors import InputError
from ...core.reporter import SILENT, Reporter
from .formats import FORMATS

#: The most that is read of a text, in bytes or characters: some 8 million tokens, eight times the default calibration.
READ_AT_MOST = 32_000_000
#: Rows that are read to find the kind of a data set's columns.
HEAD = 100
#: The names of columns of chats.
CHATS = ("messages", "conversations")

Kind = Literal["strings", "chats", "other"]
Row = Mapping[str, Any]
#: Renders the messages of a row as text; the first argument names the row in errors.
Render = Callable[[str, object], str]


@dataclass(frozen=True)
class Reading:
    """Options of reading a text: its column, its split and the most to read.

    `column` None is `text`, or else the only column of strings; `split` None is `train`, or else the only one. `render`
    None: chats are refused; otherwise they are rendered, and with `chats_first` preferred to a column `text`. `limit`:
    a longer text is read in parts, in bytes or characters.
    """

    column: str | None = None
    split: str | None = None
    render: Render | None = None
    chats_first: bool = True
    limit: int = READ_AT_MOST


@dataclass(frozen=True)
class Documents:
    """The documents of a text, in order.

    `chat`: they are rendered chats, which contain their special tokens.
    """

    texts: list[str]
    chat: bool = False


#: Reads a file of text that is called so in errors; raises InputError.
Reader = Callable[[Path, str, Reading, Reporter], Documents]
#: The readers of `FORMATS`, by suffix.
READERS: dict[str, Reader] = {}


def reads(format: str) -> Callable[[Reader], Reader]:
    """Register the function below as the reader of a `format` of `FORMATS`."""

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(FORMATS[format].suffixes, reader))
        return reader

    return register


@dataclass(frozen=True)
class DocumentColumn:
    """The column that documents are read from."""

    name: str
    chat: bool


def column_kind(name: str, value: object) -> Kind:
    """The kind of the column `name`, by one of its values."""
    if isinstance(value, str):
        return "strings"
    if name in CHATS and isinstance(value, list) and value and isinstance(value[0], dict):
        return "chats"
    return "other"


def column_kinds(rows: Iterable[Row]) -> dict[str, Kind]:
    """The kind of each column, by its first value that is neither missing nor an empty list."""
    kinds: dict[str, Kind] = {}
    for row in rows:
        kinds |= {
            name: column_kind(name, value)
            for name, value in row.items()
            if value is not None and value != [] and name not in kinds
        }
    return kinds


def choose_column(spec: str, kinds: Mapping[str, Kind], reading: Reading) -> DocumentColumn:
    """The column to read. Raises InputError naming the columns, or the option that renders chats."""
    strings = [name for name, kind in kinds.items() if kind == "strings"]
    chat = next((name for name in CHATS if kinds.get(name) == "chats" and reading.column is None), None)
    if chat and reading.render and (reading.chats_first or "text" not in strings):
        return DocumentColumn(chat, chat=True)
    if chat and "text" not in strings:
        raise InputError(
            spec,
            f"holds chats, under `{chat}`",
            "render them by the tokenizer's own template with --chat-template, or name a column of strings `text`",
        )
    wanted = reading.column or ("text" if "text" in strings or len(strings) != 1 else strings[0])
    if wanted not in strings:
        columns = (
            "none"
            if not kinds
            else ", ".join(name if kind == "strings" else f"{name} (no strings)" for name, kind in kinds.items())
        )
        raise InputError(
            spec, f"has no column `{wanted}` of strings; its columns are {columns}", "name the one to read `text`"
        )
    return DocumentColumn(wanted, chat=False)


def choose_split(spec: str, splits: list[str], reading: Reading) -> str:
    """The split to read. Raises InputError naming the splits."""
    wanted = reading.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if wanted not in splits:
        raise InputError(spec, f"has no split `{wanted}`", f"it has {', '.join(splits)}")
    return wanted


def documents(
    spec: str,
    rows: Iterable[tuple[str, Row]],
    column: DocumentColumn,
    reading: Reading,
    limit: int | None = None,
    report: Reporter = SILENT,
) -> Documents:
    """The documents under `column` of `rows`, each with its place for messages ("line 3"); missing ones are left out.

    Reading stops at `limit` characters; `report` is told so, and the number of rows that miss theirs. Raises InputError
    for a value that is no text, or no chat.
    """
    texts: list[str] = []
    characters = 0
    missing = 0
    for where, row in rows:
        value = row.get(column.name)
        if value is None:
            missing += 1
            continue
        if column.chat:
            assert reading.render is not None, "chats are chosen where they can be rendered"
            texts.append(reading.render(f"{spec}: {where}", value))
        else:
            texts.append(_checked(spec, where, column.name, value))
        characters += len(texts[-1])
        if limit is not None and characters >= limit:
            report.note(f"{spec}: only its first {limit:,} characters are read")
            break
    if missing:
        report.note(f"{spec}: {missing:,} of {missing + len(texts):,} rows have no `{column.name}` and are left out")
    return Documents(texts, column.chat)


def fault(value: str) -> str | None:
    """Name the characters of `value` that are not allowed in text, or None: halves of surrogate pairs, which JSON can
    escape, and NUL, which occurs in binary data and in UTF-16 that was read as UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character"
    if "\0" in value:
        return "a NUL, which is in no text"
    return None


def _checked(spec: str, where: str, column: str, value: object) -> str:
    wrong = fault(value) if isinstance(value, str) else None
    if isinstance(value, str) and wrong is None:
        return value
    if wrong and "NUL" in wrong:
        raise InputError(
            spec, f"{where} holds {wrong}, under `{column}`", "take it out, or convert what it was made from to UTF-8"
        )
    shown = json.dumps(value, default=str)[:20]
    raise InputError(
        spec,
        f"{where} holds {shown} under `{column}`, which is no text",
        f"each {'row' if where.startswith('row') else 'line'} must hold a string there",
    )
