"""Choose the modules whose errors are faults: not what rounding leaves, and not undone within their layer."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .document import ModuleError
from .module_errors import layer_part
from .outliers import LARGE, LARGE_UNROUNDED, outlier_limit, usual_error

#: The end of a name from the number of its layer on, which all spellings of a model's prefix share.
_IN_LAYER = re.compile(r"\w+\.\d+\.(.*)")
EXPERTS = "experts"


def _end_of(name: str) -> tuple[str, str]:
    """The number of the layer and the name within it, or the last part of a name outside the layers."""
    match = _IN_LAYER.search(name)
    if match:
        return (match[0].split(".")[1], match[1])
    return ("", name.rpartition(".")[2])


@dataclass(frozen=True)
class JudgedModules:
    """The errors of modules, and the names of those whose weights the candidate's files hold as codes."""

    modules: Sequence[ModuleError]
    coded: Collection[str]

    @cached_property
    def _ends(self) -> set[tuple[str, str]]:
        return {_end_of(name) for name in self.coded}

    @cached_property
    def _expert_layers(self) -> set[str]:
        return {layer for layer, name in self._ends if EXPERTS in name.split(".")}

    def is_coded(self, module: str) -> bool:
        """Tell whether the weight of `module` is stored as codes; of experts in one module, those of any."""
        layer, name = _end_of(module)
        return (layer, name) in self._ends or (EXPERTS in name.split(".") and layer in self._expert_layers)

    def _errors(self, coded: bool) -> Iterable[float | None]:
        return [entry.error for entry in self.modules if self.is_coded(entry.module) == coded]

    @cached_property
    def limits(self) -> dict[bool, float]:
        """The errors above which modules stand out, of those with codes and of those without."""
        return {
            True: outlier_limit(self._errors(True), LARGE),
            False: outlier_limit(self._errors(False), LARGE_UNROUNDED),
        }

    def limit_of(self, module: str) -> float:
        """The error above which `module` stands out."""
        return self.limits[self.is_coded(module)]

    def usual_of(self, module: str) -> float:
        """The usual error of modules that are stored as `module` is."""
        return usual_error(self._errors(self.is_coded(module)))

    @cached_property
    def standing_out(self) -> list[ModuleError]:
        """The modules whose outputs, for the original's inputs, are further off than rounding explains."""
        return [entry for entry in self.modules if entry.error is None or entry.error > self.limit_of(entry.module)]

    @cached_property
    def faults(self) -> list[ModuleError]:
        """Those of them whose layer does not answer as the original's does."""
        return [entry for entry in self.standing_out if not self.is_undone(entry)]

    @cached_property
    def _parts(self) -> dict[str, float | None]:
        return {layer_part(entry.module) or "": entry.part_error for entry in self.modules}

    @cached_property
    def _coded_parts(self) -> set[str]:
        """The parts with codes, which round; a norm by itself does not."""
        return {part for entry in self.modules if self.is_coded(entry.module) and (part := layer_part(entry.module))}

    @cached_property
    def _other_parts(self) -> set[str]:
        """The parts with modules that stand out."""
        return {part for entry in self.standing_out if (part := layer_part(entry.module))}

    def is_undone(self, entry: ModuleError) -> bool:
        """Tell whether the error of a module is undone in its layer, as that of heads in another order.

        Its own part of the layer answers as the original's, or the next does, which stands out too: by itself it would
        not.
        """
        silent = entry.error is None or not entry.correlation
        if silent:
            return False
        part = layer_part(entry.module)
        after = entry.next_part
        return self._answers(part) or (after in self._other_parts and self._answers(after))

    def _answers(self, part: str | None) -> bool:
        error = self._parts.get(part or "")
        return part is not None and error is not None and error <= self.limits[part in self._coded_parts]
