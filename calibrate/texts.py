"""Reading text: a file, a saved data set or a hub data set becomes a list of documents.

A `.txt` is one document; a line of `.jsonl` or a row of a table is one each. Files are read strictly: an error names the byte or the line.
Nothing goes through the cache of `datasets`, which is neither littered nor believed: a stale copy there would change scales unseen.
"""

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import InputError
from ..progress import SILENT, Reporter
from .hub import hub_errors, is_hub_name, quiet_hub

FORMS = "a .txt, .jsonl or .parquet file, a directory saved by `datasets`, or a hub data set (name, name:config or name:config:split)"
#: A hub data set may be the whole web: reading stops after this many characters, some 16 million tokens.
HUB_CHARACTERS = 64_000_000
#: Rows that are looked at to tell which columns hold strings.
HEAD = 100


@dataclass(frozen=True)
class Reading:
    """What to read of a table: `column` None is `text`, or else the only column of strings; `split` None is `train`, or else the only one."""

    column: str | None = None
    split: str | None = None


def load_texts(spec: str, reading: Reading = Reading(), report: Reporter = SILENT) -> list[str]:
    """The documents of `spec` in their order: a `.txt`, `.jsonl` or `.parquet` file, a saved `datasets` directory, or a hub data set.

    Raises InputError when there is no such thing, it does not read, or it holds nothing but white space.
    """
    path = Path(spec).expanduser()
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        texts = _saved(path, reading)
    elif path.exists():
        if reader is None:
            raise InputError(f"{spec}: does not end in .txt, .jsonl or .parquet, which tell how to read it; give {FORMS}")
        texts = reader(path, reading)
    elif reader is None and is_hub_name(spec.partition(":")[0]) and spec.count(":") <= 2:
        texts = _hub(spec, reading, report)
    else:
        raise InputError(f"{spec}: there is no such file; give {FORMS}")
    if not any(text.strip() for text in texts):
        raise InputError(f"{spec}: holds no text{' but white space' if any(texts) else ''}; give {FORMS}")
    return texts


def _decode(path: Path) -> str:
    content = path.read_bytes()
    mark = len(BOM_UTF8) if content.startswith(BOM_UTF8) else 0
    try:
        return content[mark:].decode()
    except UnicodeDecodeError as error:
        offset, likely = mark + error.start, "utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "latin1"
        raise InputError(
            f"{path}: is not UTF-8: byte 0x{content[offset]:02X} at offset {offset:,}; convert it, perhaps with `iconv -f {likely} -t utf-8`"
        ) from None


def _txt(path: Path, reading: Reading) -> list[str]:
    return [_decode(path)]


def _jsonl(path: Path, reading: Reading) -> list[str]:
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(_decode(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: line {number:,} is not JSON ({error.msg} at column {error.colno}); each line must be one object") from None
        if not isinstance(row, dict):
            raise InputError(f'{path}: line {number:,} is no object but {line[:20].strip()}; each line must be one like {{"text": …}}')
        rows[number] = row
    if not rows:
        return []
    column = choose_column(str(path), _string_columns(rows.values()), reading)
    for number, row in rows.items():
        if row.get(column) is not None and not _is_text(row[column]):
            raise InputError(
                f"{path}: line {number:,} holds {json.dumps(row[column])[:20]} under `{column}`, which is no text; each line must hold a string there"
            )
    return _texts(rows.values(), column)


def _is_text(value: object) -> bool:
    """Whether `value` is a string that UTF-8 can hold: JSON can escape halves of surrogate pairs."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _parquet(path: Path, reading: Reading) -> list[str]:
    from pyarrow import parquet, types

    with _unreadable(str(path), "write or copy it again"), parquet.ParquetFile(path) as file:
        plain = {field.name: field.type.value_type if types.is_dictionary(field.type) else field.type for field in file.schema_arrow}
        columns = {name: types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) for name, kind in plain.items()}
        column = choose_column(str(path), columns, reading)
        return [text for text in file.read(columns=[column])[column].to_pylist() if text is not None]


_READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}


def _saved(path: Path, reading: Reading) -> list[str]:
    import datasets

    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise InputError(f"{path}: is no directory that `datasets` saved (no state.json or dataset_dict.json); give {FORMS}")
    with quiet_datasets(), _unreadable(str(path), "save or copy it again"):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            saved = saved[choose_split(str(path), list(saved), reading)]
        return _table(str(path), saved, reading)


def _hub(spec: str, reading: Reading, report: Reporter) -> list[str]:
    import datasets
    from huggingface_hub import HfApi

    name, config, split = [*spec.split(":"), "", ""][:3]
    reading = Reading(reading.column, reading.split or split or None)
    offline = "connect, or save its text to a .txt or .jsonl file elsewhere and give that"
    with quiet_hub(), quiet_datasets(), hub_errors("data set", name, None, offline):
        HfApi().dataset_info(name)  # fails at once without a network, where datasets would retry for half a minute
        remedy = f"name one of its configurations as {name}:config, or save its text to a file and give that"
        with _unreadable(spec, remedy), TemporaryDirectory() as cache:
            found = datasets.load_dataset(name, config or None, streaming=True, cache_dir=cache)
            texts = _table(spec, found[choose_split(spec, list(found), reading)], reading, HUB_CHARACTERS)
    if sum(map(len, texts)) >= HUB_CHARACTERS:
        report.note(f"{spec}: only its first {HUB_CHARACTERS:,} characters are read")
    return texts


def _table(spec: str, rows: Any, reading: Reading, limit: int | None = None) -> list[str]:  # a Dataset or an IterableDataset: they share no base
    column = choose_column(spec, _string_columns(list(rows.take(HEAD))), reading)
    return _texts(rows.select_columns([column]), column, limit)


def _string_columns(rows: Collection[dict[str, Any]]) -> dict[str, bool]:
    """Column -> whether its first value that is not missing is a string."""
    columns: dict[str, bool] = {}
    for row in rows:
        columns |= {name: isinstance(value, str) for name, value in row.items() if value is not None and name not in columns}
    return columns


def _texts(rows: Iterable[dict[str, Any]], column: str, limit: int | None = None) -> list[str]:
    """The strings of `column`, missing ones left out, until they hold `limit` characters."""
    texts, characters = list[str](), 0
    for row in rows:
        text = row.get(column)
        if text is not None:
            texts.append(text)
            characters += len(text)
        if limit is not None and characters >= limit:
            break
    return texts


def choose_column(spec: str, columns: dict[str, bool], reading: Reading) -> str:
    """The column to read, of `columns` (name -> whether it holds strings). Raises InputError naming those there are."""
    strings = [name for name, is_string in columns.items() if is_string]
    wanted = reading.column or ("text" if "text" in strings or len(strings) != 1 else strings[0])
    if wanted not in strings:
        found = "none" if not columns else ", ".join(name if is_string else f"{name} (no strings)" for name, is_string in columns.items())
        raise InputError(f"{spec}: has no column `{wanted}` of strings; its columns are {found}; name the one to read `text`")
    return wanted


def choose_split(spec: str, splits: list[str], reading: Reading) -> str:
    """The split to read. Raises InputError naming those there are."""
    wanted = reading.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if wanted not in splits:
        raise InputError(f"{spec}: has no split `{wanted}`; it has {', '.join(splits)}")
    return wanted


@contextmanager
def _unreadable(spec: str, remedy: str) -> Iterator[None]:
    """Turn what pyarrow and `datasets` raise for damaged or foreign tables into an InputError; what the network raises is `hub_errors`' to say."""
    from datasets.exceptions import DatasetsError
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (HTTPError, HfHubHTTPError, ConnectionError, TimeoutError):
        raise
    except (ValueError, OSError, KeyError, TypeError, RuntimeError, DatasetsError) as error:
        raise InputError(f"{spec}: does not read: {' '.join(str(error).split())}; {remedy}") from None


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep `datasets` from logging and drawing bars; the settings before are restored."""
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
