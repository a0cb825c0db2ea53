"""`distilled.safetensors`: `<module>.codes` F8_E4M3 [out, in] and `<module>.scale` F32 [out] of each learned module."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...core.files import replacing
from .linear import LearnedLinear


class LearnedCodes:
    """The codes in such a file, read a module at a time."""

    def __init__(self, file: Path):
        """Open `file`."""
        self._tensors = safe_open(file, "pt")
        self._names = frozenset(self._tensors.keys())

    def get(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes float8_e4m3fn [out, in] and scale float32 [out] of `module`; None where it was not learned."""
        return self[module] if f"{module}.codes" in self._names else None

    def __getitem__(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scale of a `module` that was learned, as `get` does."""
        return self._tensors.get_tensor(f"{module}.codes"), self._tensors.get_tensor(f"{module}.scale")


def gathered_codes(layers: Mapping[str, LearnedLinear]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Collect the codes that `layers` learned, and their scales; all ranks call this where they share weights."""
    learned = {name: layer.learned() for name, layer in layers.items()}
    return {name: (codes.cpu(), scale.cpu()) for name, (codes, scale) in learned.items()}


def save_codes(file: Path, codes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write learned codes and their scales to `file`."""
    tensors = {
        f"{name}.{part}": tensor
        for name, both in codes.items()
        for part, tensor in zip(("codes", "scale"), both, strict=True)
    }
    with replacing(file) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
