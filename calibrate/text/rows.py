"""Turn the rows of a table into documents: choose the column, and check the values.

A document is a string, a chat that the tokenizer's template renders as one, or the ids of its tokens where a tokenizer
went over it before. Chats and ids are recognized by their column's name and form, so that a table whose only strings
are identifiers is not read as text by mistake.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from ...core.errors import InputError
from ...core.reporter import SILENT, Reporter
from .formats import FORMATS
from .image_rows import check_parts, image_column, image_parts

#: The most that is read of a text, in bytes or characters: some 8 million tokens, eight times the default calibration.
READ_AT_MOST = 32_000_000
#: Rows that are read to find the kind of a data set's columns.
HEAD = 100
#: The names of columns of chats.
CHATS = ("messages", "conversations")
#: The columns of a tokenized data set, by the names that tokenizers give them: ids, and 0 where an id is padding.
IDS = "input_ids"
MASK = "attention_mask"
#: Characters that count for an id, where the characters of a text are limited.
CHARACTERS_PER_ID = 4

Kind = Literal["strings", "chats", "ids", "other"]
Row = Mapping[str, Any]
#: Renders the messages of a row as text; the first argument names the row in errors.
Render = Callable[[str, object], str]


@dataclass(frozen=True)
class Reading:
    """Options of reading a text: its column, its split and the most to read.

    `column` None is `text`, or else the only column of strings; `split` None is `train`, or else the only one. `render`
    None: chats are refused; otherwise they are rendered, and with `chats_first` preferred to a column `text`. `limit`:
    a longer text is read in parts, in bytes or characters. `images`: chats with images are rows of their own, which the
    caller reads; otherwise `render` refuses them.
    """

    column: str | None = None
    split: str | None = None
    render: Render | None = None
    chats_first: bool = True
    limit: int = READ_AT_MOST
    images: bool = False


@dataclass(frozen=True)
class Documents:
    """The documents of a text, in order.

    `chat`: they are rendered chats, which contain their special tokens. `ids`: their tokens, where the text was
    tokenized before, without padding; there are no `texts` then until a tokenizer makes them. `with_images`: the chats
    with images, which are not among `texts`, each with its row.
    """

    texts: list[str]
    chat: bool = False
    ids: list[list[int]] | None = None
    with_images: tuple[tuple[str, object], ...] = ()


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
    """The column that documents are read from; `mask`: the one that says which of its ids are padding; `images`: the
    one with the images of a row.
    """

    name: str
    kind: Kind
    mask: str | None = None
    images: str | None = None

    @property
    def names(self) -> list[str]:
        """The columns to read; images beside strings are not, which most often describe them."""
        images = self.images if self.kind == "chats" else None
        return [name for name in (self.name, self.mask, images) if name is not None]


def column_kind(name: str, value: object) -> Kind:
    """The kind of the column `name`, by one of its values."""
    if isinstance(value, str):
        return "strings"
    if name in CHATS and isinstance(value, list) and value and isinstance(value[0], dict):
        return "chats"
    if name in (IDS, MASK) and isinstance(value, list) and value and type(value[0]) is int:
        return "ids"
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
        return DocumentColumn(chat, "chats", images=image_column(kinds))
    if chat and "text" not in strings:
        raise InputError(
            spec,
            f"holds chats, under `{chat}`",
            "render them by the tokenizer's own template with --chat-template, or name a column of strings `text`",
        )
    if kinds.get(IDS) == "ids" and (reading.column == IDS or (reading.column is None and "text" not in strings)):
        return DocumentColumn(IDS, "ids", MASK if kinds.get(MASK) == "ids" else None)
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
    return DocumentColumn(wanted, "strings", images=image_column(kinds))


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
    ids: list[list[int]] = []
    with_images: list[tuple[str, object]] = []
    characters = 0
    missing = 0
    for where, row in rows:
        value = row.get(column.name)
        if value is None:
            missing += 1
            continue
        images = row.get(column.images) if column.kind == "chats" and column.images is not None else True
        check_parts(spec, where, value, column.images, images)
        if reading.images and column.kind == "chats" and any(True for _ in image_parts(value)):
            with_images.append((where, value))
            characters += len(str(value))
        elif column.kind == "ids":
            ids.append(_unpadded(spec, where, value, None if column.mask is None else row.get(column.mask)))
            characters += CHARACTERS_PER_ID * len(ids[-1])
        else:
            texts.append(_document(spec, where, column, value, reading))
            characters += len(texts[-1])
        if limit is not None and characters >= limit:
            report.note(f"{spec}: only its first {limit:,} characters are read")
            break
    if missing:
        rows_read = missing + len(texts) + len(ids) + len(with_images)
        report.note(f"{spec}: {missing:,} of {rows_read:,} rows have no `{column.name}` and are left out")
    if column.kind == "ids":
        return Documents([], ids=ids)
    return Documents(texts, column.kind == "chats", with_images=tuple(with_images))


def _document(spec: str, where: str, column: DocumentColumn, value: object, reading: Reading) -> str:
    if column.kind != "chats":
        return _checked(spec, where, column.name, value)
    assert reading.render is not None, "chats are chosen where they can be rendered"
    return reading.render(f"{spec}: {where}", value)


def _unpadded(spec: str, where: str, ids: object, mask: object) -> list[int]:
    """Return the ids of a row without those that are padding by its `mask`; None: none are."""
    if not _are_numbers(ids):
        raise InputError(
            spec,
            f"{where} holds {json.dumps(ids, default=str)[:20]} under `{IDS}`, which are no ids of tokens",
            "each must be a list of whole numbers from 0 on",
        )
    if mask is None:
        return list(ids)
    if not _are_numbers(mask) or len(mask) != len(ids):
        raise InputError(
            spec,
            f"{where} has no {MASK} of the length of its {IDS}, {len(ids):,}",
            f"save it with one, or leave the column {MASK} out where nothing is padded",
        )
    return [number for number, attended in zip(ids, mask, strict=True) if attended]


def _are_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


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
