"""Store rounded weights in a folder: a file of codes and scales for each module.

Rounding layer by layer counts the files of a layer once its step has ended (`LayerSteps`); a layer that a killed call
left unfinished is rounded again.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...core.files import replacing
from ..scales.decisions import HeldOutError
from .channels import JudgedCodes, QuantizedWeight

#: The metadata of a file with an expert's codes: how they were judged, as JSON; and of one whose codes were to be
#: revised, and were not.
HELD_OUT, UNREVISED = "held_out", "unrevised"
#: A share as Python writes it.
SHARE = re.compile(r"\d\.?\d*(e-\d+)?")


class Rounded:
    """The rounded modules in a folder."""

    def __init__(self, folder: Path):
        """Use `folder`, which exists."""
        self.folder = folder

    def add(self, module: str, weight: QuantizedWeight, **metadata: str) -> None:
        """Store the codes and scales of the weight of `module`, how they were judged, and `metadata`."""
        error = weight.summary.held_out
        if error is not None:
            metadata[HELD_OUT] = error.model_dump_json()
        with replacing(self._file(module)) as partial:
            save_file({"codes": weight.codes.cpu(), "scale": weight.scale.cpu()}, partial, metadata or None)

    def get(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes float8_e4m3fn [out, in] and scale float32 [out] of `module`; None where it was not rounded."""
        stored = self.judged(module)
        return None if stored is None else stored[:2]

    def judged(self, module: str) -> JudgedCodes | None:
        """Codes and scale of `module`, and how an expert's were judged; None where it was not rounded."""
        path = self._file(module)
        if not path.is_file():
            return None
        with safe_open(path, "pt") as held:
            error = (held.metadata() or {}).get(HELD_OUT)
            judged = None if error is None else HeldOutError.model_validate_json(error)
            return held.get_tensor("codes"), held.get_tensor("scale"), judged

    def clear(self) -> None:
        """Remove all rounded modules."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()

    def files_of(self, modules: Iterable[str]) -> list[Path]:
        """The files of those of `modules` that were rounded."""
        return [path for module in modules if (path := self._file(module)).is_file()]

    def _file(self, module: str) -> Path:
        return self.folder / f"{module}.safetensors"


class CachedCodes(Rounded):
    """Codes of GPTQ in a folder, by module and by the share of its input's energy that quantization loses: all else
    that they depend on is the run's.
    """

    def has(self, module: str, lost: float) -> bool:
        """Tell whether there are codes of `module` for an input that loses the share `lost`."""
        return self._file(f"{module}-{lost!r}").is_file()

    def files(self) -> list[Path]:
        """The files of all codes."""
        return sorted(self.folder.glob("*.safetensors"))

    def of_input(self, module: str, lost: float) -> JudgedCodes | None:
        """The codes of `module` for an input that loses the share `lost`; None where there are none."""
        return self.judged(f"{module}-{lost!r}")

    def keep(self, module: str, lost: float, weight: QuantizedWeight, unrevised: bool = False) -> None:
        """Store the codes and scale of `module` for an input that loses the share `lost`; `unrevised`: they were to be
        revised, and were not.
        """
        self.add(f"{module}-{lost!r}", weight, **({UNREVISED: "true"} if unrevised else {}))

    def is_unrevised(self, module: str, lost: float) -> bool:
        """Tell whether there are codes of `module` that were to be revised, and were not."""
        if not self.has(module, lost):
            return False
        with safe_open(self._file(f"{module}-{lost!r}"), "pt") as held:
            return UNREVISED in (held.metadata() or {})


class CodesOfAnyInput(CachedCodes):
    """Codes of GPTQ in a folder, of which those for the nearest share serve where a module has none for its own."""

    def of_input(self, module: str, lost: float) -> JudgedCodes | None:
        """The codes of `module` for an input that loses the share `lost`, or about that; None where there are none."""
        begins = f"{module}-"
        names = (path.stem.removeprefix(begins) for path in self.files() if path.stem.startswith(begins))
        shares = [float(name) for name in names if SHARE.fullmatch(name)]
        nearest = min(shares, key=lambda share: abs(share - lost), default=lost)
        return super().of_input(module, nearest)
