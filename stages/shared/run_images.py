"""The rows with images of a run: as a text has them, and as `images.json` does.

Each is a window of its own, which the whole model reads with its images as it would in use. Their files stay where they
are: the document has their paths and digests. Those of a caller who had them in memory lie in the run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from ...calibrate.text.image_rows import ImageRow, digest
from ...core.files import FirstSchema, Strict, read_document, write_document
from ...core.run import Run
from ..pipeline.stages import CORPUS
from .texts import Text


@dataclass(frozen=True)
class ImageChat:
    """A row with images of the text called `text`, at `line`; `messages` are as they stand there."""

    text: str
    line: str
    messages: object

    @property
    def where(self) -> str:
        """The name of the row in errors."""
        return f"{self.text}: {self.line}"


def image_chats(texts: Iterable[Text]) -> tuple[ImageChat, ...]:
    """List the rows with images of `texts`."""
    return tuple(ImageChat(text.name, line, chat) for text in texts for line, chat in text.documents.with_images)


class ImageRows(Strict):
    """`images.json`."""

    schema_: FirstSchema = 1
    calibration: list[ImageRow] = Field(description="in the order in which they are measured")
    evaluation: list[ImageRow] = Field(description="held out, or of the evaluation text")

    @property
    def digest(self) -> str:
        """SHA-256 of the contents of all rows, wherever their files are."""
        return digest(self.all)

    @property
    def all(self) -> list[ImageRow]:
        """The rows to calibrate on, and those to evaluate on."""
        return [*self.calibration, *self.evaluation]


def has_image_rows(run: Run) -> bool:
    """Tell whether `run` was calibrated on rows with images."""
    corpus = run.record().stages.get(CORPUS.name)
    return corpus is not None and run.images.name in corpus.outputs


def load_image_rows(run: Run) -> ImageRows | None:
    """Read `images.json`; None for a run without rows with images. Raises InputError for a damaged file."""
    if not has_image_rows(run):
        return None
    rows = read_document(run.require(run.images, CORPUS.name), ImageRows)
    return _renamed(rows, lambda path: run.root.resolve() / path)


def save_image_rows(run: Run, rows: ImageRows) -> None:
    """Write `images.json`."""
    root = run.root.resolve()
    inside = _renamed(rows, lambda path: path.relative_to(root) if path.is_relative_to(root) else path)
    write_document(run.images, inside)


def _renamed(rows: ImageRows, new_path: Callable[[Path], Path]) -> ImageRows:
    def row_of(row: ImageRow) -> ImageRow:
        images = [image.model_copy(update={"path": str(new_path(Path(image.path)))}) for image in row.images]
        return row.model_copy(update={"images": images})

    return ImageRows(
        calibration=[row_of(row) for row in rows.calibration], evaluation=[row_of(row) for row in rows.evaluation]
    )
