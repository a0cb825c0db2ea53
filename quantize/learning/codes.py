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

    def of(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes float8_e4m3fn [out, in] and scale float32 [out] of `module`; None where it was not learned."""
        if f"{module}.codes" not in self._names:
            return None
        return self._tensors.get_tensor(f"{module}.codes"), self._tensors.get_tensor(f"{module}.scale")


def gathered_codes(layers: Mapping[str, LearnedLinear]) -> dict[str, torch.Tensor]:
    """Collect the codes that `layers` learned by name, layer by layer; all ranks call this where they share weights."""
    return {name: layer.codes().cpu() for name, layer in layers.items()}


def save_codes(file: Path, layers: Mapping[str, LearnedLinear], codes: Mapping[str, torch.Tensor]) -> None:
    """Write the `codes` that `layers` learned to `file`, with their scales."""
    tensors = {f"{name}.codes": each for name, each in codes.items()}
    tensors |= {f"{name}.scale": layer.scale[:, 0].cpu().contiguous() for name, layer in layers.items()}
    with replacing(file) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
