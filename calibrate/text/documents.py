"""Read text: a file, a saved data set or a hub data set becomes a list of documents.

A text file is one document; so is each line of JSON and each row of a table (`formats.py`). Files are read strictly: an
error names the byte or the line. Of a file larger than `Reading.limit` parts are read that are evenly spread over it
(`excerpts`).
"""

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.files import regular_file
from ...core.reporter import SILENT, Reporter
from ..input.hub import is_hub_name
from ..input.untrusted import AGAIN, error_text, exists, local_path, read_bytes
from .excerpts import Excerpt, excerpt_note, is_larger, line_pieces, text_pieces
from .formats import SUFFIXES, listed
from .rows import READERS, Documents, Reading, choose_column, column_kinds, documents, reads
from .tables import read_hub, read_saved

FORMS = (
    f"a {listed(SUFFIXES)} file, a directory saved by `datasets`, or a hub data set (name, name:config or "
    "name:config:split)"
)


def load_texts(spec: str, reading: Reading = Reading(), report: Reporter = SILENT) -> list[str]:
    """The texts of the documents that `load_documents` reads."""
    return load_documents(spec, reading, report).texts


def load_documents(spec: str, reading: Reading = Reading(), report: Reporter = SILENT) -> Documents:
    """Read the documents of `spec`, in order: a file of text, a saved `datasets` directory, or a hub data set.

    Raises InputError when it does not exist, cannot be read, or has no text but white space.
    """
    path = local_path(spec)
    reader = READERS.get(path.suffix.lower())
    if path.is_dir():
        if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            raise InputError(
                path, "is no directory that `datasets` saved (no state.json or dataset_dict.json)", f"give {FORMS}"
            )
        loaded = read_saved(path, str(path), reading, report)
    elif exists(path):
        if reader is None:
            raise InputError(spec, f"does not end in {listed(SUFFIXES)}, which tell how to read it", f"give {FORMS}")
        regular_file(path, AGAIN)
        loaded = reader(path, str(path), reading, report)
    elif reader is None and is_hub_name(spec.partition(":")[0]) and spec.count(":") <= 2:
        loaded = read_hub(spec, reading, report)
    else:
        raise InputError(spec, "there is no such file", f"give {FORMS}")
    if not any(text.strip() for text in loaded.texts):
        raise InputError(spec, f"holds no text{' but white space' if any(loaded.texts) else ''}", f"give {FORMS}")
    return loaded


def _decode(path: Path, piece: Excerpt) -> str:
    content, offset = piece.content, piece.offset
    if offset == 0 and content.startswith(BOM_UTF8):
        content, offset = content[len(BOM_UTF8) :], len(BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        likely = "utf-16" if piece.content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "latin1"
        raise InputError(
            path,
            f"is not UTF-8: byte 0x{content[error.start]:02X} at offset {offset + error.start:,}",
            f"convert it, perhaps with `iconv -f {likely} -t utf-8`",
        ) from None
    if (first := content.find(0)) >= 0:
        raise InputError(
            path, f"holds a NUL at offset {offset + first:,}, which is in no text: it is {_likely(content)}"
        )
    return text


def _likely(content: bytes) -> str:
    """Guess the encoding of bytes that contain NULs, and give a remedy.

    In UTF-16 without a byte order mark, every other byte of English text is a NUL.
    """
    even, odd = content[::2].count(0), content[1::2].count(0)
    if 10 * max(even, odd) < len(content):
        return "binary data; give a text"
    return f"perhaps UTF-16; convert it with `iconv -f utf-16{'le' if odd > even else 'be'} -t utf-8`"


@reads("text")
def _txt(path: Path, spec: str, reading: Reading, report: Reporter) -> Documents:
    if not is_larger(path, reading.limit):
        return Documents([_decode(path, Excerpt(0, read_bytes(path, reading.limit)))])
    pieces = list(text_pieces(path, reading.limit))
    report.note(excerpt_note(spec, sum(len(piece.content) for piece in pieces), path.stat().st_size))
    return Documents([_decode(path, piece) for piece in pieces])


@reads("jsonl")
def _jsonl(path: Path, spec: str, reading: Reading, report: Reporter) -> Documents:
    lines = _lines(path, spec, reading, report)
    kinds = column_kinds(row for _, row in _parsed(path, lines))
    if not kinds and not any(True for _ in _parsed(path, lines)):
        return Documents([])
    return documents(spec, _parsed(path, lines), choose_column(spec, kinds, reading), reading, None, report)


def _lines(path: Path, spec: str, reading: Reading, report: Reporter) -> list[tuple[str, str]]:
    """The lines of the file that are read, each with its name in errors."""
    if not is_larger(path, reading.limit):
        lines = _decode(path, Excerpt(0, read_bytes(path, reading.limit))).split("\n")
        return [(f"line {number:,}", line) for number, line in enumerate(lines, 1)]
    pieces = list(line_pieces(path, reading.limit))
    report.note(excerpt_note(spec, sum(len(piece.content) for piece in pieces), path.stat().st_size))
    return [(f"the line at byte {piece.offset:,}", _decode(path, piece).removesuffix("\n")) for piece in pieces]


def _parsed(path: Path, lines: Sequence[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse the nonblank lines on demand, so that other fields than the text take no memory."""
    for where, line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                path, f"{where} is not JSON ({error.msg} at column {error.colno})", "each line must be one object"
            ) from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, deeply nested brackets
            raise InputError(
                path, f"{where} is no JSON that can be read ({error_text(error)})", "each line must be one object"
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                path, f"{where} is no object but {line[:20].strip()}", 'each line must be one like {"text": …}'
            )
        yield where, row
