"""Read text: a file, a saved data set or a hub data set becomes a list of documents.

A text file is one document; so is each line of JSON and each row of a table (`formats.py`), as text, as a chat, or as
tokens that were made before. Files are read strictly: an
error names the byte or the line. Of a file larger than `Reading.limit` parts are read that are evenly spread over it
as `Excerpt`s.

Tables are parquet files, data sets saved by `datasets`, and those on the hub. The cache of `datasets` is not used: a
stale copy there would change scales unnoticed. From a table above the limit of its reading, evenly spread rows are
read; a hub data set arrives over the network in its own order, so the first rows are read.

Corpora are sorted by source and topic, so their beginning does not represent them, and reading a terabyte to calibrate
on a million tokens wastes a day. A file is therefore read at `PIECES` equidistant places, whole lines at each, up to
the limit in all. A file within the limit is read whole.
"""

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ...core.errors import InputError
from ...core.files import regular_file
from ...core.reporter import SILENT, Reporter
from ...core.undo import scratch
from ..input.hub import hub_errors, is_hub_name, network_errors, quiet_hub
from ..input.untrusted import AGAIN, error_text, exists, foreign, local_path, read_bytes
from .formats import SUFFIXES, listed
from .rows import (
    CHATS,
    HEAD,
    IDS,
    MASK,
    READERS,
    Documents,
    Kind,
    Reading,
    Row,
    choose_column,
    choose_split,
    column_kinds,
    documents,
    reads,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet


PIECES = 1024


@dataclass(frozen=True)
class Excerpt:
    """The bytes `content` of a file, which begin at `offset`."""

    offset: int
    content: bytes


def is_larger(path: Path, limit: int) -> bool:
    """Tell whether the file at `path` has more than `limit` bytes."""
    return path.stat().st_size > limit


def excerpt_note(spec: str, read: int, size: int, unit: str = "bytes") -> str:
    """The note that only a part of `spec` is read."""
    return f"{spec}: {read:,} of its {size:,} {unit} are read, evenly spread over it"


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread."""
    most = min(count, most)
    return [number * count // most for number in range(most)]


def text_pieces(path: Path, limit: int) -> Iterator[Excerpt]:
    """Pieces of a text file, together about `limit` bytes.

    They begin and end with lines, or between two characters where a line is too long.
    """
    size = path.stat().st_size
    share = max(limit // PIECES, 1)
    with open(path, "rb") as handle:
        for offset in _seek_lines(handle, size, share):
            content = handle.read(share)
            if content and not content.endswith(b"\n"):
                content += handle.readline(share)
            yield _complete_characters(Excerpt(offset, content), at_end=handle.tell() >= size)


def line_pieces(path: Path, limit: int) -> Iterator[Excerpt]:
    """Whole lines of a file, together about `limit` bytes.

    Raises InputError for a line longer than `limit`.
    """
    size = path.stat().st_size
    share = max(limit // PIECES, 1)
    with open(path, "rb") as handle:
        for start in _seek_lines(handle, size, limit):
            end = start + share
            while (offset := handle.tell()) < end and (line := handle.readline(limit)):
                if not line.endswith(b"\n") and len(line) == limit:
                    raise InputError(
                        path,
                        f"the line at byte {offset:,} is longer than {limit:,} bytes",
                        "each line must be one document",
                    )
                yield Excerpt(offset, line)


def _seek_lines(handle: BinaryIO, size: int, reach: int) -> Iterator[int]:
    """Seek to the beginning of a line at each of `PIECES` offsets, evenly spread over `size` bytes; yield its offset.

    The line may begin up to `reach` bytes behind the offset; where none does, reading begins in the middle of a line.
    Offsets that were read past already are skipped.
    """
    for start in spread(size, PIECES):
        if start >= handle.tell():
            handle.seek(max(start - 1, 0))
            if start:
                handle.readline(reach)
            yield handle.tell()


def _complete_characters(piece: Excerpt, at_end: bool) -> Excerpt:
    """Remove the parts of UTF-8 characters at both ends of `piece`."""
    content = piece.content
    skipped = next((number for number, byte in enumerate(content[:4]) if byte & 0xC0 != 0x80), 0)
    if not at_end and not content.endswith(b"\n"):
        last = next((number for number in range(1, min(4, len(content)) + 1) if content[-number] & 0xC0 != 0x80), 0)
        needed = (
            1
            if not last or content[-last] < 0xC0
            else 2
            if content[-last] < 0xE0
            else 3
            if content[-last] < 0xF0
            else 4
        )
        content = content[:-last] if last and needed > last else content
    return Excerpt(piece.offset + skipped, content[skipped:])


FORMS = (
    f"a {listed(SUFFIXES)} file, a directory saved by `datasets`, or a hub data set (name, name:config or "
    "name:config:split)"
)


def load_texts(spec: str, reading: Reading = Reading(), report: Reporter = SILENT) -> list[str]:
    """The texts of the documents that `load_documents` reads."""
    return load_documents(spec, reading, report).texts


def load_documents(spec: str, reading: Reading = Reading(), report: Reporter = SILENT) -> Documents:
    """Read the documents of `spec`, in order: a file of text, a saved `datasets` directory, or a hub data set.

    Raises InputError when it does not exist, cannot be read, or has neither text but white space nor tokens.
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
    if loaded.ids is not None:
        if not any(loaded.ids):
            raise InputError(spec, f"holds no tokens under `{IDS}`", f"give {FORMS}")
    elif not loaded.with_images and not any(text.strip() for text in loaded.texts):
        raise InputError(spec, f"holds no text{' but white space' if any(loaded.texts) else ''}", f"give {FORMS}")
    return loaded


def _decode(path: Path, piece: Excerpt) -> str:
    content = piece.content
    offset = piece.offset
    if offset == 0 and content.startswith(BOM_UTF8):
        content = content[len(BOM_UTF8) :]
        offset = len(BOM_UTF8)
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
    even = content[::2].count(0)
    odd = content[1::2].count(0)
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


#: The most row groups that are read of a parquet file larger than the limit.
GROUPS = 64
#: Rows of a parquet file that are in memory at once, and bytes of a read: by default Arrow reads the column of a whole
#: row group.
BATCH = 64
BUFFER = 1 << 20
#: The most bytes of the rows in memory: every row may repeat a value that a dictionary stores once.
BATCH_BYTES = 4 << 30
#: Rows are chosen by number, and values of a dictionary may repeat, so their text may be this many times the limit.
EXPANSION = 4


@reads("parquet")
def read_parquet(path: Path, spec: str, reading: Reading, report: Reporter) -> Documents:
    """Read the documents of a parquet file; raises InputError."""
    from pyarrow import parquet

    with (
        table_errors(spec, "write or copy it again"),
        parquet.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False) as file,
    ):
        column = choose_column(spec, {field.name: _kind(field) for field in file.schema_arrow}, reading)
        sizes = [_column_bytes(file, group, [column.name]) for group in range(file.num_row_groups)]
        sizes_with_images = [_column_bytes(file, group, column.names) for group in range(file.num_row_groups)]
        groups = list(range(len(sizes)))
        every = 1
        if sum(sizes) > reading.limit:
            groups = spread(len(sizes), GROUPS)
            every = -(-sum(sizes[group] for group in groups) // reading.limit)
        batch_rows = min(max(BATCH_BYTES // max([1, *sizes_with_images]), 1), BATCH)
        rows = _parquet_rows(file, groups, every, column.names, batch_rows)
        loaded = documents(spec, rows, column, reading, EXPANSION * reading.limit, report)
        if sum(sizes) > reading.limit:
            report.note(excerpt_note(spec, len(loaded.ids or loaded.texts), file.metadata.num_rows, "rows"))
        return loaded


def _kind(field: "pa.Field[Any]") -> Kind:
    from pyarrow import types

    plain = field.type.value_type if types.is_dictionary(field.type) else field.type
    if types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain):
        return "strings"
    rows = (types.is_list(plain) or types.is_large_list(plain)) and types.is_struct(plain.value_type)
    if rows and field.name in CHATS:
        return "chats"
    if field.name in (IDS, MASK) and types.is_list(plain) | types.is_large_list(plain):
        return "ids" if types.is_integer(plain.value_type) else "other"
    return "other"


def _column_bytes(file: "parquet.ParquetFile", group: int, names: Sequence[str]) -> int:
    metadata = file.metadata.row_group(group)
    chunks = (metadata.column(number) for number in range(metadata.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if f"{chunk.path_in_schema}.".startswith(tuple(f"{name}." for name in names))
    )


def _parquet_rows(
    file: "parquet.ParquetFile", groups: list[int], every: int, names: list[str], batch_rows: int
) -> Iterator[tuple[str, Row]]:
    """Yield every `every`-th row of the row `groups`, numbered from 1 in the file; at most `batch_rows` are in
    memory.
    """
    first = [0]
    for group in range(file.num_row_groups):
        first.append(first[-1] + file.metadata.row_group(group).num_rows)
    for group in groups:
        number = first[group]
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False):
            for index in range(-number % every, batch.num_rows, every):
                yield f"row {number + index + 1:,}", {name: batch.column(name)[index].as_py() for name in names}
            number += batch.num_rows


def read_saved(path: Path, spec: str, reading: Reading, report: Reporter) -> Documents:
    """Read the documents of a directory that `datasets` saved; raises InputError."""
    import datasets

    for file in sorted(entry for ending in ("json", "arrow") for entry in path.rglob(f"*.{ending}")):
        regular_file(file, AGAIN)
    with quiet_datasets(), table_errors(spec, "save or copy it again"):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            saved = saved[choose_split(spec, list(saved), reading)]
        column = choose_column(spec, column_kinds(saved.take(HEAD)), reading)
        saved = saved.select_columns(column.names)
        every = max(-(-saved.data.nbytes // reading.limit), 1)
        chosen = range(0, len(saved), every)
        if every > 1:
            report.note(excerpt_note(spec, len(chosen), len(saved), "rows"))
        numbered = ((f"row {number + 1:,}", saved[number]) for number in chosen)
        return documents(spec, numbered, column, reading, None, report)


def read_hub(spec: str, reading: Reading, report: Reporter) -> Documents:
    """The documents of a hub data set (name, name:config or name:config:split), the first of them where it exceeds the
    limit. Raises InputError.
    """
    import datasets
    from huggingface_hub import HfApi

    name, config, split = [*spec.split(":"), "", ""][:3]
    reading = replace(reading, split=reading.split or split or None)
    offline = "connect, or save its text to a .txt or .jsonl file elsewhere and give that"
    with quiet_hub(), quiet_datasets(), hub_errors("data set", name, None, offline):
        HfApi().dataset_info(name)  # fails at once without a network, where datasets would retry for half a minute
        remedy = f"name one of its configurations as {name}:config, or save its text to a file and give that"
        with table_errors(spec, remedy), scratch() as cache:
            splits = datasets.load_dataset(name, config or None, streaming=True, cache_dir=str(cache))
            rows = splits[choose_split(spec, list(splits), reading)]
            column = choose_column(spec, column_kinds(rows.take(HEAD)), reading)
            numbered = ((f"row {number:,}", row) for number, row in enumerate(rows.select_columns(column.names), 1))
            return documents(spec, numbered, column, reading, reading.limit, report)


@contextmanager
def table_errors(spec: str, remedy: str) -> Iterator[None]:
    """Turn the exceptions of pyarrow and `datasets` for damaged or foreign tables into InputError; network errors are
    left to `hub_errors`.
    """

    def refusal(error: BaseException) -> InputError:
        return InputError(spec, f"does not read: {error_text(error)}", remedy)

    with foreign(refusal, *network_errors()):
        yield


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep `datasets` from logging and drawing progress bars in this block; restore its settings after it."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    bars = not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
