"""Texts that a caller has in memory: bring them to one form, check them, and write them into a run.

Chats are written as lines of JSON, with their images beside them: a table wants values of one type in a column, and the
`content` of a message may be a string or parts. All else becomes a data set.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import datasets
import numpy as np
import torch

from ..calibrate.input.untrusted import error_text, foreign, local_path, read_bytes
from ..calibrate.text.documents import quiet_datasets
from ..calibrate.text.image_rows import (
    FILE_BYTES,
    PIXELS,
    check_image_name,
    check_parts,
    image_column,
    image_file,
    image_of,
    image_parts,
    is_image,
)
from ..calibrate.text.rows import CHATS, HEAD, IDS, Kind, column_kinds
from ..core.errors import InputError
from ..core.files import replacing
from ..core.run import Run
from .image_inputs import VISION
from .pipeline.stage import needs

if TYPE_CHECKING:
    from PIL.Image import Image

#: Texts as `calibrate` takes them, by name; or in memory: documents, the ids of their tokens, chats, a tokenizer's
#: answer, or a data set.
Texts: TypeAlias = str | Path | Sequence[Any] | Mapping[str, Any] | datasets.Dataset | datasets.DatasetDict
#: The splits of a data set that are evaluated on, the first that is there.
EVALUATION_SPLITS = ("validation", "test")
#: The column of texts.
TEXT = "text"
#: The file of chats in a run, and the folder of their images beside it.
ROWS = "rows.jsonl"
IMAGES = "images"
IMAGE_FORM = 'a part is like {"type": "image", "image": …}, with a path or an image of Pillow'
TEXT_FORMS = "give a list of texts, a list of lists of token ids, a list of chats, or a `datasets.Dataset`"


@dataclass(frozen=True)
class ChatRows:
    """Rows with chats as `lines` of JSON; `images`: those that they name, in the order in which they have them."""

    lines: list[str] = field(default_factory=list)
    images: "dict[str, Path | Image]" = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the rows and their images into `folder`, which is new."""
        (folder / IMAGES).mkdir(parents=True)
        (folder / ROWS).write_text("".join(f"{line}\n" for line in self.lines), encoding="utf-8")
        for name, image in self.images.items():
            if isinstance(image, Path):
                (folder / name).write_bytes(read_bytes(image, FILE_BYTES))
            else:
                image.save(folder / name, "PNG")


Rows: TypeAlias = datasets.Dataset | datasets.DatasetDict | ChatRows


@dataclass(frozen=True)
class LoadedTexts:
    """Texts to calibrate on, or the name of a text, and those to evaluate on (None: the end of the first)."""

    calibration: str | Rows
    evaluation: Rows | None = None

    @property
    def with_images(self) -> bool:
        """Tell whether any row has an image."""
        return any(isinstance(rows, ChatRows) and rows.images for rows in (self.calibration, self.evaluation))


def as_rows(texts: Texts) -> LoadedTexts:
    """Bring texts in memory to the form that is written; a name or path stays one.

    Raises InputError for what is no text, for values of several kinds, and for images that do not read.
    """
    if isinstance(texts, str | Path):
        return LoadedTexts(str(texts))
    if isinstance(texts, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise InputError(
            "texts", "is a stream, of which nobody knows the end", "give `Dataset.from_list(list(stream.take(N)))`"
        )
    if isinstance(texts, datasets.DatasetDict):
        return _splits(texts)
    if isinstance(texts, datasets.Dataset):
        return LoadedTexts(_with_image_files(texts))
    return LoadedTexts(_rows_of(_columns(texts)))


def _splits(texts: datasets.DatasetDict) -> LoadedTexts:
    """Take the split to evaluate on out of `texts`."""
    evaluation = next((split for split in EVALUATION_SPLITS if split in texts), None)
    rest = {name: rows for name, rows in texts.items() if name != evaluation}
    others: Rows = datasets.DatasetDict(rest)
    if len(rest) == 1:
        others = _with_image_files(*rest.values())
    return LoadedTexts(others, None if evaluation is None else _with_image_files(texts[evaluation]))


def _with_image_files(rows: datasets.Dataset) -> datasets.Dataset | ChatRows:
    """Make lines of JSON of a data set whose chats have images; another one stays as it is."""
    head = list(rows.take(HEAD))
    kinds = column_kinds(head)
    _check_parts(head, kinds)
    chats = [name for name, kind in kinds.items() if kind == "chats"]
    if not any(True for row in head for name in chats for _ in image_parts(row[name])):
        return rows
    return _rows_of({name: rows[name] for name in rows.column_names})


def _rows_of(columns: Mapping[str, Sequence[Any]]) -> datasets.Dataset | ChatRows:
    """Make lines of JSON of columns with chats, and a data set of others."""

    def refusal(error: BaseException) -> InputError:
        return InputError("texts", f"makes no data set: {error_text(error)}", "give values of one kind")

    with quiet_datasets(), foreign(refusal):
        plain = {name: [_plain(value) for value in values] for name, values in columns.items()}
        rows = [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]
        kinds = column_kinds(rows)
        if "chats" not in kinds.values():
            return datasets.Dataset.from_dict(plain)
        _check_parts(rows, kinds)
        read = [name for name, kind in kinds.items() if kind != "other"]
        return _chat_rows([{name: row[name] for name in read} for row in rows])


def _check_parts(rows: Iterable[Mapping[str, Any]], kinds: Mapping[str, Kind]) -> None:
    """Raise InputError for a row whose chat or text has no part for the images in another column."""
    column = image_column(kinds)
    if column is None:
        return
    for number, row in enumerate(rows, 1):
        for name in [name for name in (*CHATS, TEXT) if name in kinds]:
            check_parts("texts", f"row {number:,}", row[name], column, row[column])


def _chat_rows(rows: Iterable[Mapping[str, Any]]) -> ChatRows:
    """Make lines of JSON of rows with chats and strings; raises InputError for an image that does not read."""
    made = ChatRows()
    for number, row in enumerate(rows, 1):
        where = f"texts: row {number:,}"
        with_files = {
            name: _named_images(where, value, made.images) if name in CHATS else value for name, value in row.items()
        }
        made.lines.append(json.dumps(with_files))
    return made


def _named_images(where: str, chat: object, images: "dict[str, Path | Image]") -> object:
    """Return `chat` with the names of files in the place of its images, which are added to `images`."""
    if not any(True for _ in image_parts(chat)):
        return chat
    assert isinstance(chat, list), "it has parts"
    return [
        {**message, "content": [_named_image(where, part, images) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in chat
    ]


def _named_image(where: str, part: Any, images: "dict[str, Path | Image]") -> object:
    """Return a part of a message, where it is an image with the name of a file that is added to `images`."""
    if not is_image(part):
        return part
    image = _checked_image(where, image_of(part))
    suffix = image.suffix if isinstance(image, Path) else ".png"
    name = f"{IMAGES}/{len(images) + 1:06d}{suffix}"
    images[name] = image
    return {"type": "image", "path": name}


def _checked_image(where: str, value: object) -> "Path | Image":
    """Check an image in memory, or at a path of the caller's own; raises InputError."""
    needs(*VISION)
    from PIL import Image, ImageOps

    if not isinstance(value, Image.Image):
        path = local_path(check_image_name(where, str(value) if isinstance(value, Path) else value, IMAGE_FORM))
        image_file(where, path)
        return path
    if value.width * value.height > PIXELS:
        raise InputError(where, f"its image has more than {PIXELS:,} pixels", "scale it down")
    with foreign(lambda error: InputError(where, f"its image does not decode: {error_text(error)}", "load it again")):
        return ImageOps.exif_transpose(value).convert("RGB")


def _columns(texts: Any) -> Mapping[str, Sequence[Any]]:
    """Name the column that a list of documents, of their ids, or of chats is, or those of a list of rows.

    Raises InputError for what is no list, for columns that are none, and for values of several kinds.
    """
    if isinstance(texts, Mapping):
        for name, values in texts.items():
            _listed(f"texts: `{name}`", values)
        return texts
    values = _listed("texts", texts)
    kinds = {_kind(value) for value in values}
    if len(kinds) != 1 or None in kinds:
        types = ", ".join(sorted({type(value).__name__ for value in values})) or "nothing"
        raise InputError("texts", f"holds {types}", TEXT_FORMS)
    (kind,) = kinds
    if kind == "rows":
        names = dict.fromkeys(name for row in values for name in row)
        return {name: [row.get(name) for row in values] for name in names}
    return {str(kind): values}


def _listed(subject: str, values: Any) -> list[Any]:
    """List `values`; raises InputError for one that is no list, a string included."""

    def refusal(error: BaseException) -> InputError:
        return InputError(subject, f"is no list but {type(values).__name__}", TEXT_FORMS)

    with foreign(refusal):
        if isinstance(values, str | bytes):
            raise TypeError
        return list(values)


def _kind(value: object) -> str | None:
    """The column of a document that is text, ids or a chat; `rows` where it has columns itself; None: none of these."""
    if isinstance(value, str):
        return TEXT
    if isinstance(value, Mapping):
        return "rows"
    value = _plain(value)
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], Mapping):
        return CHATS[0]
    return IDS if isinstance(value[0], int) else None


def _plain(value: Any) -> Any:
    """Turn an array or tensor, or a tuple, into lists of Python's own numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def written_texts(run: Run, texts: LoadedTexts) -> tuple[str, str | None]:
    """Save texts in `run`; return the names of those to calibrate and to evaluate on (None: the end of the first). The
    name of a text is returned as it is.
    """
    if isinstance(texts.calibration, str):
        return texts.calibration, None
    evaluation = None
    if texts.evaluation is not None:
        evaluation = _written(run.loaded_eval_texts, texts.evaluation)
    return _written(run.loaded_texts, texts.calibration), evaluation


def _written(path: Path, rows: Rows) -> str:
    """Save `rows` at `path`; return the name under which they are read."""
    with quiet_datasets(), replacing(path) as partial:
        if isinstance(rows, ChatRows):
            rows.write(partial)
        else:
            rows.save_to_disk(str(partial))
    return str(path / ROWS) if isinstance(rows, ChatRows) else str(path)
