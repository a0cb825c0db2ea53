"""Store the progress of rounding layer by layer in a folder: a file of codes and scales for each module, and the step.

The files of a layer count once their step has ended; a layer that a killed call left unfinished is rounded again.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...core.files import replacing
from .channels import QuantizedWeight


class Rounded:
    """The rounded modules in a folder.

    Invariant: once a step has ended, all of its modules are in the folder.
    """

    def __init__(self, folder: Path):
        """Use `folder`, which exists."""
        self.folder = folder
        self._ended = folder / "steps"

    @property
    def steps(self) -> int:
        """The number of steps that have ended, in this call and in killed ones before it."""
        return int(self._ended.read_text(encoding="utf-8")) if self._ended.is_file() else 0

    def end(self, step: int) -> None:
        """Record that this step, the first being 1, and all steps before it have ended."""
        with replacing(self._ended) as partial:
            partial.write_text(str(step), encoding="utf-8")

    def add(self, module: str, weight: QuantizedWeight) -> None:
        """Store the codes and scales of the weight of `module`."""
        with replacing(self._file(module)) as partial:
            save_file({"codes": weight.codes, "scale": weight.scale}, partial)

    def get(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes float8_e4m3fn [out, in] and scale float32 [out] of `module`; None where it was not rounded."""
        path = self._file(module)
        if not path.is_file():
            return None
        held = load_file(path)
        return held["codes"], held["scale"]

    def _file(self, module: str) -> Path:
        return self.folder / f"{module}.safetensors"
