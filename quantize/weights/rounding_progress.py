"""Keep the progress of rounding layer by layer: codes and scales in a folder, a file a module, and how far it got.

A layer's files count when the step that made them has ended; a killed call's last, unfinished layer is rounded again.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...core.files import replacing
from .channels import QuantizedWeight


class Rounded:
    """The modules that were rounded, in a folder.

    Invariant: the modules of a step that has ended are all there.
    """

    def __init__(self, folder: Path):
        """In `folder`, which is there."""
        self.folder = folder
        self._ended = folder / "steps"

    @property
    def steps(self) -> int:
        """The number of steps that have ended, in this call or one before it."""
        return int(self._ended.read_text(encoding="utf-8")) if self._ended.is_file() else 0

    def end(self, step: int) -> None:
        """Say that this step, the first being 1, has ended, and all before it."""
        with replacing(self._ended) as partial:
            partial.write_text(str(step), encoding="utf-8")

    def add(self, module: str, made: QuantizedWeight) -> None:
        """Keep codes and scale of `module`."""
        with replacing(self._file(module)) as partial:
            save_file({"codes": made.codes, "scale": made.scale}, partial)

    def of(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes float8_e4m3fn [out, in] and scale float32 [out] of `module`; None for one that was not rounded."""
        path = self._file(module)
        if not path.is_file():
            return None
        held = load_file(path)
        return held["codes"], held["scale"]

    def _file(self, module: str) -> Path:
        return self.folder / f"{module}.safetensors"
