"""Read rows with images for a model: choose and check them before anything is written, and make its inputs of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..calibrate.input.untrusted import local_path
from ..calibrate.model.processor import RowInputs, RowProcessor, load_processor, placeholder
from ..calibrate.model.source import Source
from ..calibrate.model.tokenizer import load_tokenizer
from ..calibrate.text.chat import content_parts, messages
from ..calibrate.text.documents import spread
from ..calibrate.text.image_rows import ImageRow, image_files
from ..core.errors import InputError
from ..core.reporter import Reporter
from ..options import DEFAULT_SAMPLES
from .corpus import Collected
from .pipeline.stage import needs
from .shared.run_images import ImageChat, ImageRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The share of the rows that is held out where there is no evaluation text, and the most rows to evaluate on.
HELD_OUT = 0.1
EVALUATED = 64
#: The library of images, which the extra brings.
VISION = ("vision", ("PIL",))


@dataclass(frozen=True)
class RowReader:
    """Reads rows with images for a model, whose `processor` puts the token `placeholder` where images are.

    `positions`: the number that the model can tell apart; None: not limited.
    """

    processor: RowProcessor
    placeholder: int
    positions: int | None

    def read(self, chat: ImageChat) -> ImageRow:
        """Read a row; raises InputError for one that the model cannot read."""
        where = chat.where
        path = local_path(chat.text)
        if not path.is_file():
            raise InputError(where, "has images, which lie beside files of text", "save the rows as .jsonl beside them")
        row = ImageRow(
            where=where,
            messages=messages(where, chat.messages, content_parts),
            images=image_files(where, chat.messages, path.parent),
        )
        ids = self.processor.inputs(row)["input_ids"]
        tokens = ids.shape[1]
        if not (ids == self.placeholder).any():
            raise InputError(where, "has no image in what the chat template makes of it", "mend the template")
        if self.positions is not None and tokens > self.positions:
            raise InputError(
                where,
                f"has {tokens:,} tokens with its images, and the model {self.positions:,} positions",
                "shorten it, or leave it out",
            )
        return row.model_copy(update={"tokens": tokens})


def with_image_rows(
    source: Source, tokenizer: "PreTrainedTokenizerBase", collected: Collected, most: int | None, report: Reporter
) -> Collected:
    """Read at most `most` rows with images, evenly spread, of what was `collected`, and some to evaluate on: of the
    evaluation text, or else the last tenth.

    Raises InputError for a row that the model cannot read, and for an image that is missing, broken, too large or not
    within its folder: each row that is chosen is read and processed once.
    """
    rows = collected.image_chats
    others = collected.other_image_chats
    if not rows and not others:
        return collected
    if not rows:
        assert others, "there are some"
        raise InputError(others[0].text, "has rows with images, and --data has none", "give such rows to both")
    needs(*VISION)
    if others is None:
        boundary = len(rows) - int(len(rows) * HELD_OUT)
        others = rows[boundary:]
        rows = rows[:boundary]
    chosen = [rows[number] for number in spread(len(rows), most or DEFAULT_SAMPLES)]
    evaluated = [others[number] for number in spread(len(others), EVALUATED)]
    reader = RowReader(load_processor(source, tokenizer), placeholder(source), source.max_positions)
    read: list[ImageRow] = []
    with report.track("Reading images", len(chosen) + len(evaluated), "rows") as advance:
        for chat in [*chosen, *evaluated]:
            read.append(reader.read(chat))
            advance(1)
    report.note(
        f"{len(chosen):,} of {len(rows) + len(others):,} rows with images are measured, each by itself, and "
        f"{len(evaluated):,} are evaluated on"
    )
    counts = Counter(chat.text for chat in chosen)
    return replace(
        collected,
        sources=[text.model_copy(update={"images": counts.get(text.name)}) for text in collected.sources],
        images=ImageRows(calibration=read[: len(chosen)], evaluation=read[len(chosen) :]),
    )


def row_inputs(source: Source, rows: Sequence[ImageRow]) -> RowInputs:
    """The inputs that the processor of `source` makes of `rows`; raises InputError where it does not load."""
    needs(*VISION)
    return RowInputs(rows, load_processor(source, load_tokenizer(source)))
