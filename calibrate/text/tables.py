"""Read documents from tables: parquet files, data sets saved by `datasets`, and those on the hub.

The cache of `datasets` is not used: a stale copy there would change scales unnoticed. From a table above the limit of
its reading, evenly spread rows are read; a hub data set arrives over the network in its own order, so the first rows
are read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import InputError
from ...core.files import regular_file
from ...core.reporter import Reporter
from ...core.undo import scratch
from ..input.hub import hub_errors, network_errors, quiet_hub
from ..input.untrusted import AGAIN, error_text, foreign
from .excerpts import excerpt_note, spread
from .rows import (
    CHATS,
    HEAD,
    DocumentColumn,
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
        sizes = [_column_bytes(file, group, column) for group in range(file.num_row_groups)]
        groups, every = list(range(len(sizes))), 1
        if sum(sizes) > reading.limit:
            groups = spread(len(sizes), GROUPS)
            every = -(-sum(sizes[group] for group in groups) // reading.limit)
        batch_rows = min(max(BATCH_BYTES // max([1, *sizes]), 1), BATCH)
        rows = _parquet_rows(file, groups, every, column.name, batch_rows)
        loaded = documents(spec, rows, column, reading, EXPANSION * reading.limit, report)
        if sum(sizes) > reading.limit:
            report.note(excerpt_note(spec, len(loaded.texts), file.metadata.num_rows, "rows"))
        return loaded


def _kind(field: "pa.Field[Any]") -> Kind:
    from pyarrow import types

    plain = field.type.value_type if types.is_dictionary(field.type) else field.type
    if types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain):
        return "strings"
    rows = (types.is_list(plain) or types.is_large_list(plain)) and types.is_struct(plain.value_type)
    return "chats" if rows and field.name in CHATS else "other"


def _column_bytes(file: "parquet.ParquetFile", group: int, column: DocumentColumn) -> int:
    metadata = file.metadata.row_group(group)
    chunks = (metadata.column(number) for number in range(metadata.num_columns))
    return sum(
        chunk.total_uncompressed_size for chunk in chunks if (chunk.path_in_schema + ".").startswith(f"{column.name}.")
    )


def _parquet_rows(
    file: "parquet.ParquetFile", groups: list[int], every: int, name: str, batch_rows: int
) -> Iterator[tuple[str, Row]]:
    """Yield every `every`-th row of the row `groups`, numbered from 1 in the file; at most `batch_rows` are in
    memory.
    """
    first = [0]
    for group in range(file.num_row_groups):
        first.append(first[-1] + file.metadata.row_group(group).num_rows)
    for group in groups:
        number = first[group]
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=[name], use_threads=False):
            for index in range(-number % every, batch.num_rows, every):
                yield f"row {number + index + 1:,}", {name: batch.column(0)[index].as_py()}
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
        saved = saved.select_columns([column.name])
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
    reading = Reading(
        reading.column, reading.split or split or None, reading.render, reading.chats_first, reading.limit
    )
    offline = "connect, or save its text to a .txt or .jsonl file elsewhere and give that"
    with quiet_hub(), quiet_datasets(), hub_errors("data set", name, None, offline):
        HfApi().dataset_info(name)  # fails at once without a network, where datasets would retry for half a minute
        remedy = f"name one of its configurations as {name}:config, or save its text to a file and give that"
        with table_errors(spec, remedy), scratch() as cache:
            splits = datasets.load_dataset(name, config or None, streaming=True, cache_dir=str(cache))
            rows = splits[choose_split(spec, list(splits), reading)]
            column = choose_column(spec, column_kinds(rows.take(HEAD)), reading)
            numbered = ((f"row {number:,}", row) for number, row in enumerate(rows.select_columns([column.name]), 1))
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

    verbosity, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
