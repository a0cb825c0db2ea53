"""Sources of the codes of weights: they are asked in order, and the first that has codes of a weight gives them.

A run with codes that were learned (`fp8q distill`) takes these before all others. Otherwise the codes of an FP8 source
checkpoint come first (`quantize.reading.dequantized`), then those that this run has rounded: layer by layer
(`sequential`), or by GPTQ, in a call before or now. What no source has is rounded to nearest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import safe_open

from ...core.errors import is_want_of_memory
from ...core.files import reading
from ...options import WeightRounding
from ..codes.formats import E4M3, Grid
from ..scales.decisions import Skipped
from .channels import (
    JudgedCodes,
    QuantizedWeight,
    WeightMethod,
    WeightScaling,
    judged,
    of_stored,
    quantize_scaled,
    weight_summary,
)
from .gptq import Compensation, Compensations
from .output_side import load_output_side, revised_codes
from .rounding_progress import CachedCodes


@dataclass(frozen=True)
class FloatWeight:
    """The weight of `module` before it is quantized; `read` reads it in BF16, with output channels along `axis`. It is
    quantized on `device`.
    """

    module: str
    read: Callable[[], torch.Tensor]
    axis: int = 0
    device: str = "cpu"

    def rows(self) -> torch.Tensor:
        """The weight [out, in] on `device`."""
        return self.read().to(self.device).movedim(self.axis, 0).contiguous()


class CodeSource(Protocol):
    """A source of codes."""

    def quantized(self, weight: FloatWeight) -> QuantizedWeight | Skipped | None:
        """Codes and scales of `weight`, or the reason why it stays in BF16; None where this source has none."""


@dataclass(frozen=True)
class RoundedCodes:
    """Codes of modules, by `rounding` in another call or another model, under scales that `method` chose."""

    codes: Callable[[str], JudgedCodes | None]
    method: WeightMethod
    rounding: WeightRounding | Literal["learned"]

    def quantized(self, weight: FloatWeight) -> QuantizedWeight | None:
        """The stored codes of `weight`."""
        stored = self.codes(weight.module)
        if stored is None:
            return None
        return of_stored(weight.rows(), stored, self.method, self.rounding)


@dataclass(frozen=True)
class GptqCodes:
    """Codes by GPTQ, under scales by `scaling` and from the second moments of `compensations`; `stored`: a folder of
    those of calls before, to which new ones are added. `outputs`: a folder of what is known of the outputs of GEMMs, by
    which their codes are revised; `beyond_memory` gets the modules for which memory did not suffice for that, whose
    codes stay as they were.

    An expert's are kept where their error on held-out tokens is below that of the nearest codes.
    """

    scaling: WeightScaling
    compensations: Compensations
    stored: CachedCodes | None = None
    outputs: Path | None = None
    beyond_memory: list[str] = field(default_factory=list)

    def quantized(self, weight: FloatWeight) -> QuantizedWeight | Skipped | None:
        """The codes of `weight`; None where its input saw too few tokens."""
        module = weight.module
        method = self.scaling.method
        lost = self.compensations.lost[module]
        if self.stored and (stored := self.stored.of_input(module, lost)):
            self._remember(module, self.stored.is_unrevised(module, lost))
            return of_stored(weight.rows(), stored, method, "gptq")
        compensation = self.compensations.get(module, weight.device)
        if compensation is None:
            return None
        rows = weight.rows()
        quantized = quantize_scaled(rows, self.scaling.scale(module, rows), method, compensation)
        if self.compensations.judges(module):
            tokens = self.compensations.held_out(module)
            shrunk = self.compensations.shrunk(module, weight.device)
            quantized = judged(rows, quantized, method, tokens, shrunk, lost)
        if isinstance(quantized, QuantizedWeight):
            unrevised = False
            try:
                quantized = self._revised(module, rows, quantized, compensation)
            except (MemoryError, RuntimeError) as error:  # torch's of a GPU is a RuntimeError
                if not is_want_of_memory(error):
                    raise
                unrevised = True
            self._remember(module, unrevised)
            if self.stored:
                self.stored.keep(module, lost, quantized, unrevised)
        return quantized

    def _remember(self, module: str, unrevised: bool) -> None:
        if unrevised and module not in self.beyond_memory:
            self.beyond_memory.append(module)

    def _revised(
        self, module: str, rows: torch.Tensor, made: QuantizedWeight, compensation: Compensation
    ) -> QuantizedWeight:
        """Revise the codes of the weight `rows` of `module` by its output side, where that is known."""
        side = load_output_side(self.outputs, module) if self.outputs else None
        if side is None or made.scale.dim() == 2:
            return made
        lost = self.compensations.lost[module]
        codes = revised_codes(rows, made.codes, made.scale, compensation, side, lost)
        return QuantizedWeight(codes, made.scale, weight_summary(rows, codes, made.scale, self.scaling.method, "gptq"))


@dataclass(frozen=True)
class NearestCodes:
    """Nearest codes of `format`, under scales by `scaling`: every weight has them, or is zero."""

    scaling: WeightScaling
    format: Grid = E4M3

    def quantized(self, weight: FloatWeight) -> QuantizedWeight | Skipped:
        """The nearest codes of `weight`; one of zeros is skipped."""
        rows = weight.rows()
        scale = self.scaling.scale(weight.module, rows, self.format)
        return quantize_scaled(rows, scale, self.scaling.method, format=self.format)


@dataclass(frozen=True)
class Rounding:
    """The choice of codes: by the first of `sources` that has any, and at last to nearest under scales by
    `scaling`.

    `in_blocks`: module -> the block of values that shares a scale in the source checkpoint, whose codes are not kept.
    `device`: where weights are quantized; codes and scales come back to the host.
    """

    scaling: WeightScaling
    sources: tuple[CodeSource, ...] = ()
    in_blocks: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    def quantized(self, weight: FloatWeight) -> QuantizedWeight | Skipped:
        """Quantize `weight`; one of zeros is skipped."""
        weight = replace(weight, device=self.device)
        sources = (*self.sources, NearestCodes(self.scaling))
        quantized = next(made for source in sources if (made := source.quantized(weight)) is not None)
        if isinstance(quantized, Skipped):
            return quantized
        fields: dict[str, object] = {"axis": weight.axis}
        if block := self.in_blocks.get(weight.module):
            fields["method"] = f"{quantized.summary.method} of {block} blocks"
        if weight.module in self.scaling.tensor_scales:
            fields["granularity"] = "tensor"
        summary = quantized.summary.model_copy(update=fields)
        return QuantizedWeight(quantized.codes.cpu(), quantized.scale.cpu(), summary)


class LearnedCodes:
    """The codes of `distilled.safetensors`, read a module at a time."""

    def __init__(self, file: Path):
        """Open `file`; raises InputError where it is damaged."""
        with reading(file, "learned codes"):
            self._tensors = safe_open(file, "pt")
            self._names = frozenset(self._tensors.keys())

    def judged(self, module: str) -> JudgedCodes | None:
        """Codes and scale of `module`, which no tokens judged; None where it was not learned."""
        if f"{module}.codes" in self._names:
            return (*self[module], None)
        return None

    def __getitem__(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes float8_e4m3fn [out, in] and scale float32 [out] of a `module` that was learned."""
        return self._tensors.get_tensor(f"{module}.codes"), self._tensors.get_tensor(f"{module}.scale")
