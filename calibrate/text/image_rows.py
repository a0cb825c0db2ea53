"""Chats with images: their rows, and their image files, opened within bounds.

A part `{"type": "image", "path": "cat.png"}` of a message names a file, as Hugging Face documents it for processors;
Qwen's data sets have `image` in the place of `path`. The path is one in the folder of the table. Nothing is fetched:
an address, base64 and a path to anywhere else are refused.

An image is untrusted. It is a regular file that lies within that folder once all links are followed, of at most
`FILE_BYTES`, in one of `FORMATS` by its content, of at most `PIXELS`; Pillow decodes all of it before any work, so that
a broken one is found then. Later it is opened again, and must be the same by its SHA-256: decoded images of a whole
data set would fill the memory.
"""

import hashlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue

from ...core.errors import InputError
from ...core.files import Strict
from ..input.untrusted import error_text, foreign, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

#: The formats that are read, as Pillow calls them.
FORMATS = ("PNG", "JPEG", "WEBP")
#: The most bytes of an image file, and the most pixels: Pillow's own bound, beyond which it warns.
FILE_BYTES = 64 << 20
PIXELS = 89_478_485
#: The names of the path in a part that is an image.
PATHS = ("path", "image")
#: The columns of tables that hold the images of a row, and the text that stands for one in its strings.
COLUMNS = ("images", "image")
MARK = "<image>"
FORM = 'a part is like {"type": "image", "path": "cat.png"}, a file in the folder of the text'


class ImageFile(Strict):
    """An image file of a row."""

    path: str = Field(description="where it is, links followed; relative to the run where it lies in the run")
    sha256: str

    def opened(self, where: str) -> "Image":
        """Open the file again, in RGB and upright, as transformers does; raises InputError where it has changed.
        `where` names its row.
        """
        content = _content(where, Path(self.path))
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise InputError(where, f"its image {self.path} has changed since it was read", "restore it")
        return decoded(where, self.path, content)


class ImageRow(Strict):
    """A chat with images, as a processor's template reads it."""

    where: str = Field(description="its text and line, for messages")
    messages: list[dict[str, JsonValue]]
    images: list[ImageFile] = Field(description="in the order in which the messages have them")
    tokens: int = Field(default=0, description="tokens that the processor makes of it, those of images included")

    @property
    def identity(self) -> dict[str, Any]:
        """The content of the row, wherever its files are."""
        return {"messages": self.messages, "images": [image.sha256 for image in self.images]}


def image_parts(chat: object) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of the messages of `chat`, which may be anything, that are images."""
    for message in chat if isinstance(chat, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        yield from filter(is_image, content if isinstance(content, list) else [])


def is_image(part: object) -> bool:
    """Tell whether a part of a message is an image."""
    return isinstance(part, dict) and part.get("type") == "image"


def image_column(names: Iterable[str]) -> str | None:
    """The column of images among `names`; None where there is none."""
    return next((name for name in COLUMNS if name in names), None)


def check_parts(spec: str, where: str, value: object, column: str | None, images: object) -> None:
    """Raise InputError where a row has `images`, those under `column`, and the chat or text `value` no part for them:
    they would be left out, and what stands for them read as text.
    """
    marked = isinstance(value, str) and MARK in value
    without_part = isinstance(value, list) and not any(True for _ in image_parts(value))
    if column is None or not images or not (marked or without_part):
        return
    raise InputError(
        spec,
        f"{where} has images under `{column}`, and no part of a message for them",
        f"write each where it stands ({FORM}), or leave the column out",
    )


def image_files(where: str, chat: object, folder: Path) -> list[ImageFile]:
    """Check and list the images of the row `where`, whose text lies in `folder`; raises InputError."""
    return [image_file(where, _within(where, part, folder)) for part in image_parts(chat)]


def image_file(where: str, path: Path) -> ImageFile:
    """Check the image of the row `where` at `path`; raises InputError."""
    content = _content(where, path)
    decoded(where, str(path), content)
    return ImageFile(path=str(path), sha256=hashlib.sha256(content).hexdigest())


def image_of(part: Mapping[str, Any]) -> object:
    """The path of the image that is `part`, or what else stands there; None: nothing."""
    return next((part[key] for key in PATHS if part.get(key) is not None), None)


def check_image_name(where: str, name: object, form: str = FORM) -> str:
    """Return `name`, the path of an image of the row `where`; raises InputError, with `form`, for one that is none."""
    if not isinstance(name, str) or not name:
        raise InputError(where, "has an image without a path", form)
    if "://" in name or name.startswith("data:"):
        raise InputError(where, f"its image {name[:60]} is no file", "save it beside the text, and name that")
    return name


def _within(where: str, part: Mapping[str, Any], folder: Path) -> Path:
    """The path of the image in `part`, links followed; raises InputError for one that is not within `folder`."""
    name = check_image_name(where, image_of(part))
    with foreign(lambda error: InputError(where, f"its image {name[:60]!r} is no path", FORM)):
        path = (folder / name).resolve()
        outside = not path.is_relative_to(folder.resolve())
    if outside:
        raise InputError(where, f"its image {name} is not within {folder}", "copy it there")
    return path


def _content(where: str, path: Path) -> bytes:
    try:
        return read_bytes(path, FILE_BYTES)
    except InputError as error:
        raise InputError(where, f"its image {error.subject}: {error.fault}", error.remedy) from None


def decoded(where: str, name: str, content: bytes) -> "Image":
    """Decode the image file `name` of the row `where`, in RGB and upright.

    Raises InputError for another format, for too many pixels, and for a file that is broken or cut off.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    def refusal(error: BaseException) -> InputError:
        if isinstance(error, UnidentifiedImageError):
            return InputError(where, f"its image {name} is none in {', '.join(FORMATS)}", "convert it")
        if isinstance(error, Image.DecompressionBombError):
            return _too_large(where, name)
        return InputError(where, f"its image {name} does not decode: {error_text(error)}", "copy or download it again")

    with foreign(refusal), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise _too_large(where, name)
            return ImageOps.exif_transpose(image).convert("RGB")


def _too_large(where: str, name: str) -> InputError:
    return InputError(where, f"its image {name} has more than {PIXELS:,} pixels", "scale it down")


def digest(rows: Sequence[ImageRow]) -> str:
    """SHA-256 of the contents of `rows`, in hexadecimal."""
    return hashlib.sha256(json.dumps([row.identity for row in rows]).encode()).hexdigest()
