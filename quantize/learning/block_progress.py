"""Store the layers that have learned in a folder: a file of codes and scales for each, and their losses.

A layer counts once its losses are written; one that a killed call left unfinished learns again.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save_file

from ...core.files import Strict, read_document, replacing, write_document
from .document import BlockLoss

Coded = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class BlockLosses(Strict):
    """The losses of the layers that have learned, in order."""

    blocks: list[BlockLoss] = Field(default=[])


class LearnedBlocks:
    """The layers that have learned, in a folder.

    Invariant: the codes of every layer whose loss is written are in the folder.
    """

    def __init__(self, folder: Path):
        """Use `folder`, which exists."""
        self.folder, self._progress = folder, folder / "blocks.json"

    @property
    def entered(self) -> bool:
        """Tell whether the hidden states that enter the first layer are complete."""
        return self._progress.is_file()

    @property
    def losses(self) -> list[BlockLoss]:
        """The losses of the layers that have learned, in this call and in killed ones before it."""
        return read_document(self._progress, BlockLosses).blocks if self.entered else []

    def enter(self) -> None:
        """Record that the hidden states that enter the first layer are complete."""
        write_document(self._progress, BlockLosses())

    def end(self, loss: BlockLoss, codes: Coded) -> None:
        """Store the codes float8_e4m3fn [out, in] and scales float32 [out] of a layer by product, then its loss."""
        with replacing(self._file(len(self.losses))) as partial:
            _save(codes, partial)
        write_document(self._progress, BlockLosses(blocks=[*self.losses, loss]))

    def save(self, file: Path, others: Coded) -> None:
        """Write the codes of all layers, and those of products outside of them, to one `file`.

        The codes of layers are mapped from their files and take no memory.
        """
        tensors = _tensors(others)
        for index in range(len(self.losses)):
            with safe_open(self._file(index), "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        with replacing(file) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})

    def _file(self, index: int) -> Path:
        return self.folder / f"block-{index:05}.safetensors"


def _tensors(codes: Coded) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}": tensor.cpu().contiguous()
        for name, both in codes.items()
        for part, tensor in zip(("codes", "scale"), both, strict=True)
    }


def _save(codes: Coded, file: Path) -> None:
    save_file(_tensors(codes), file, metadata={"format": "pt"})
