"""Options of `fp8q convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..core.errors import InputError
from .clipping import BLOCK_SCALE_GRID, ScaleGrid, no_blocks
from .declare import MODEL, SCALES, Options, between, not_empty, option

ConvertForm = Literal["dynamic", "block"]
ConvertLayout = Literal["compressed-tensors", "fp8", "modelopt"]


@dataclass(frozen=True)
class ConvertOptions(Options):
    """Options of `fp8q convert`.

    `layout` None: fp8 for blocks, compressed-tensors for channels. `rules` None: those of the package. `threads` None:
    a thread for each processor, at most eight.
    """

    form: Annotated[
        ConvertForm,
        option(
            SCALES,
            "dynamic: weights per output channel, inputs per token. block: weights in blocks of 128 x 128, inputs in "
            "groups of 128. Both scale inputs where they are served.",
        ),
    ] = "dynamic"
    layout: Annotated[
        ConvertLayout | None,
        option(
            SCALES,
            "Names and configuration: fp8 (DeepSeek's and Qwen's, for blocks), compressed-tensors, or modelopt "
            "(NVIDIA's, for channels).",
            default="fp8 for blocks, else compressed-tensors",
        ),
    ] = None
    block_scale_grid: Annotated[ScaleGrid, option(SCALES, BLOCK_SCALE_GRID)] = "power-of-two"
    skip: Annotated[
        tuple[str, ...],
        option(SCALES, "Keep matrices whose module's name matches (* and ?) too. Repeatable.", "PATTERN"),
        not_empty,
    ] = ()
    rules: Annotated[
        Path | None,
        option(SCALES, "The rule of what is kept, in place of fp8q's own.", "FILE", "rules.toml of the package"),
    ] = None
    mtp: Annotated[bool, option(SCALES, "Quantize the layers of multi-token prediction too.")] = False
    threads: Annotated[
        int | None,
        option(MODEL, "Threads that encode.", "N", "one a processor, at most 8"),
        between(1, 64),
    ] = None
    revision: Annotated[str | None, option(MODEL, "Branch, tag or commit of a model on the hub.", "NAME")] = None

    def __post_init__(self) -> None:
        """Raise InputError for channels in the layout fp8, and for blocks in ModelOpt's, which have none."""
        super().__post_init__()
        if self.form == "dynamic" and self.layout == "fp8":
            raise InputError("--layout fp8", "has no scales of channels", "leave it out, or ask for --form block")
        if self.form == "block" and self.layout == "modelopt":
            raise InputError(
                "--layout modelopt",
                "has blocks beside inputs in BF16 alone, and --form block scales inputs in groups",
                "leave it out, or ask for --form dynamic",
            )
        if self.form != "block" and self.block_scale_grid != "power-of-two":
            raise no_blocks(self.block_scale_grid)

    @property
    def chosen_layout(self) -> ConvertLayout:
        """The layout: as asked for, or the usual one of the form."""
        return self.layout or ("fp8" if self.form == "block" else "compressed-tensors")
