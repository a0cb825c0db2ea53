"""Reading text: a file, a saved data set or a hub data set becomes a list of documents.

`.txt` is one document; a line of `.jsonl` or a row of a table is one each. Files are read strictly (an error names the byte or the line),
tables through `datasets`, streamed, so that its cache is neither littered nor believed: a stale copy there would change scales unseen.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..progress import SILENT, Reporter
from .hub import hub_errors, is_hub_name, quiet_hub

FORMS = "a .txt, .jsonl or .parquet file, a directory saved by `datasets`, or a hub data set (name, name:config or name:config:split)"
#: A hub data set may be the whole web: reading stops after this many characters, some 16 million tokens.
HUB_CHARACTERS = 64_000_000


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
    if path.is_dir():
        texts = _saved(path, reading)
    elif path.is_file():
        texts = _file(path, reading)
    elif not path.exists() and path.suffix.lower() not in _READERS and is_hub_name(spec.partition(":")[0]):
        texts = _hub(spec, reading, report)
    else:
        raise InputError(f"{spec}: there is no such file; give {FORMS}")
    if not any(text.strip() for text in texts):
        raise InputError(f"{spec}: holds no text{'' if texts else ' (it is empty)'}; give {FORMS}")
    return texts


def _file(path: Path, reading: Reading) -> list[str]:
    if path.suffix.lower() not in _READERS:
        raise InputError(f"{path}: {path.suffix or 'a file without suffix'} is no form of text that is read; give {FORMS}")
    try:
        return _READERS[path.suffix.lower()](path, reading)
    except PermissionError:
        raise InputError(f"{path}: permission denied; make it readable") from None


def _decode(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if content.startswith(b"\xef\xbb\xbf") else 0)
        raise InputError(f"{path}: is not UTF-8: byte 0x{content[offset]:02X} at offset {offset:,}; convert it, for example with `iconv -f latin1 -t utf-8`") from None


def _txt(path: Path, reading: Reading) -> list[str]:
    return [_decode(path)]


def _jsonl(path: Path, reading: Reading) -> list[str]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_decode(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: line {number:,} is not JSON ({error.msg} at column {error.colno}); each line must be one object") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {number:,} holds {type(row).__name__}, not an object; each line must be one object like {{\"text\": …}}")
        rows.append(row)
    columns = {name: all(isinstance(row.get(name), str | None) for row in rows) for row in rows for name in row}
    return _texts(rows, choose_column(str(path), columns, reading)) if rows else []


def _parquet(path: Path, reading: Reading) -> list[str]:
    import datasets

    with quiet_datasets(), _damaged(path):
        return _table(str(path), datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True), reading)


_READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}


def _saved(path: Path, reading: Reading) -> list[str]:
    import datasets

    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise InputError(f"{path}: is no directory that `datasets` saved (no state.json or dataset_dict.json); give {FORMS}")
    with quiet_datasets(), _damaged(path):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            saved = saved[choose_split(str(path), list(saved), reading)]
        return _table(str(path), saved, reading)


def _hub(spec: str, reading: Reading, report: Reporter) -> list[str]:
    import datasets
    from huggingface_hub import HfApi

    name, config, split = (*spec.split(":"), "", "")[:3]
    reading = Reading(reading.column, reading.split or split or None)
    remedy = "connect, or save its text to a .txt or .jsonl file elsewhere and give that"
    with quiet_hub(), quiet_datasets(), hub_errors("data set", name, None, remedy):
        HfApi().dataset_info(name)  # fails at once without a network, where datasets would retry for half a minute
        try:
            found = datasets.load_dataset(name, config or None, streaming=True)
        except (ValueError, FileNotFoundError, RuntimeError) as error:
            raise InputError(f"{spec}: does not load: {' '.join(str(error).split())}; name a configuration as {name}:config, or give a file") from None
        rows = found[choose_split(spec, list(found), reading)]
        texts = _table(spec, rows, reading, HUB_CHARACTERS)
    if sum(map(len, texts)) >= HUB_CHARACTERS:
        report.note(f"{spec}: only its first {HUB_CHARACTERS:,} characters are read")
    return texts


def _table(spec: str, rows: Any, reading: Reading, limit: int | None = None) -> list[str]:  # a Dataset or IterableDataset: they share no base
    import datasets

    features = rows.features if rows.features is not None else rows._resolve_features().features
    columns = {name: isinstance(kind, datasets.Value) and kind.dtype in ("string", "large_string") for name, kind in features.items()}
    column = choose_column(spec, columns, reading)
    return _texts(rows.select_columns([column]), column, limit)


def _texts(rows: Iterable[dict[str, Any]], column: str, limit: int | None = None) -> list[str]:
    """The strings of `column`, missing ones left out, until they hold `limit` characters."""
    texts, characters = list[str](), 0
    for row in rows:
        if row.get(column) is not None:
            texts.append(row[column])
            characters += len(row[column])
        if limit is not None and characters >= limit:
            break
    return texts


def choose_column(spec: str, columns: dict[str, bool], reading: Reading) -> str:
    """The column to read, of `columns` (name -> whether it holds strings). Raises InputError naming those there are."""
    strings = [name for name, is_string in columns.items() if is_string]
    wanted = reading.column or ("text" if "text" in strings or len(strings) != 1 else strings[0])
    if wanted not in strings:
        raise InputError(f"{spec}: has no column `{wanted}` of strings; it has {', '.join(columns) or 'none'}{f' ({len(strings)} of strings)' if not reading.column else ''}; rename one to `text`")
    return wanted


def choose_split(spec: str, splits: list[str], reading: Reading) -> str:
    """The split to read. Raises InputError naming those there are."""
    wanted = reading.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if wanted not in splits:
        raise InputError(f"{spec}: has no split `{wanted}`; it has {', '.join(splits)}")
    return wanted


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Turn what pyarrow and `datasets` raise on damaged files into an InputError. pyarrow's errors are ValueError, OSError or KeyError."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (ValueError, OSError, KeyError, TypeError, DatasetsError) as error:
        raise InputError(f"{path}: does not read: {' '.join(str(error).split())}; write or download it again") from None


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
