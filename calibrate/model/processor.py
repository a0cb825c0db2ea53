"""Make a model's inputs of rows with images, by the processor that comes with it.

The processor resizes images and puts as many placeholders into the text as the model makes embeddings of them. It is
transformers' class for the checkpoint: code that came with it is not run. Two things are not left to it: the chat
template, an untrusted program, which renders in a process that can be killed (`text.template`), and tokenizer.json,
which is the run's own choice (`tokenizer`). What the template writes is tokenized without further special tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import InputError
from ..input.silence import muted, quiet_transformers
from ..input.untrusted import error_text, foreign
from ..text.chat import Message, message_renderer
from ..text.image_rows import ImageRow
from .classes import nested
from .source import Source
from .tokenizer import chosen, companion_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Inputs = Mapping[str, torch.Tensor]
#: The names of the id of the token that stands for an embedding of an image; older configurations have the second.
PLACEHOLDERS = ("image_token_id", "image_token_index")


@dataclass(frozen=True)
class RowProcessor:
    """The processor of a model, and what renders chats by its template."""

    processor: Any
    render: Callable[[str, list[Message]], str]

    def inputs(self, row: ImageRow) -> Inputs:
        """Make the model's inputs of `row`: `input_ids` int64 [1, tokens], pixels, and what else its processor gives.

        Raises InputError where an image has changed, or template or processor refuse the row.
        """

        def refusal(error: BaseException) -> InputError:
            return InputError(
                row.where, f"the model's processor refuses it: {error_text(error)}", "mend the row, or leave it out"
            )

        text = self.render(row.where, row.messages)
        images = [image.opened(row.where) for image in row.images]
        with foreign(refusal), quiet_transformers(), muted():
            features = self.processor(text=text, images=[images], add_special_tokens=False, return_tensors="pt")
            return {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class RowInputs:
    """Rows with images, and the processor that makes inputs of one when it is asked for."""

    rows: Sequence[ImageRow]
    processor: RowProcessor

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Inputs]:
        """The inputs of one row after the other."""
        return map(self.processor.inputs, self.rows)

    def __getitem__(self, number: int) -> Inputs:
        """The inputs of a row; raises InputError as `RowProcessor.inputs` does."""
        return self.processor.inputs(self.rows[number])


def on_device(inputs: Inputs, model: "PreTrainedModel", device: str | None = None) -> Inputs:
    """Move `inputs` to the device of `model`, or to `device`, pixels rounded to the model's type."""
    types = {name: model.dtype if value.is_floating_point() else value.dtype for name, value in inputs.items()}
    return {name: value.to(device or model.device, types[name]) for name, value in inputs.items()}


def load_processor(source: Source, tokenizer: "PreTrainedTokenizerBase") -> RowProcessor:
    """Load the processor of `source`; `tokenizer`: the source's, with its chat template.

    Raises InputError for a model that takes no images, one without a processor, one whose processor does not load, and
    one whose tokenizer has no chat template.
    """
    from transformers import AutoProcessor, ProcessorMixin

    def refusal(error: BaseException) -> InputError:
        if "trust_remote_code" in str(error):
            return InputError(
                source.name,
                "its processor wants code of its own, which fp8q does not run",
                "leave rows with images out",
            )
        remedy = "copy preprocessor_config.json and what it names beside config.json, or leave rows with images out"
        if isinstance(error, ImportError):  # Qwen's wants torchvision, for videos
            remedy = "install what it names, or leave rows with images out"
        return InputError(source.name, f"its processor of images does not load: {error_text(error)}", remedy)

    if not nested(source.config):
        raise InputError(source.name, f"{source.architecture} takes no images", "leave rows with images out")
    with companion_directory(source) as directory, foreign(refusal), quiet_transformers(), muted():
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
            raise ValueError("there is none in its directory")
        processor.tokenizer = chosen(processor.tokenizer, directory, source.tokenizer)
    return RowProcessor(processor, message_renderer(tokenizer, source.name))


def placeholder(source: Source) -> int:
    """The id of the token that stands for an embedding of an image; raises InputError where config.json names none."""
    for name in PLACEHOLDERS:
        number = getattr(source.config, name, None)
        if isinstance(number, int):
            return number
    raise InputError(
        source.path / "config.json", f"names no token of images ({PLACEHOLDERS[0]})", "leave rows with images out"
    )
