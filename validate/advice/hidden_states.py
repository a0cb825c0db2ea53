"""Find the layer where BF16 and FP8 diverge: the FP8 reference and the float model run on the same windows.

The hidden states of each decoder layer are compared token by token. The median token represents the layer, since a
token of massive activations (mostly the first) has nearly no error or nearly total error. The error of each GEMM
excludes those of earlier layers, since the float weight gets the input of the FP8 GEMM; and the bias, which is not
quantized and may be larger than the GEMM's output, is left out. The error of a cache tensor follows from
its histogram.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.model.decoder import Layers
from ...calibrate.model.gemms import output_channel_axis
from ...quantize.reference.fp8_model import Reference
from ...quantize.reference.linear import FP8Linear


@dataclass
class Sums:
    """The sums of ‖difference‖² and ‖expected‖²."""

    error: float = 0.0
    energy: float = 0.0

    def add(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Add a pair of tensors of the same shape."""
        expected = expected.float()
        self.error += float((actual.float() - expected).square().sum(dtype=torch.float64))
        self.energy += float(expected.square().sum(dtype=torch.float64))

    @property
    def relative(self) -> float:
        """‖difference‖ / ‖expected‖; 0 where nothing was added."""
        if self.energy == 0:
            return 0.0 if self.error == 0 else float("inf")
        return float((self.error / self.energy) ** 0.5)


@dataclass
class Divergences:
    """The relative error and the cosine of hidden states by layer, for each token; and the error of each GEMM alone."""

    errors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    cosines: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gemms: dict[str, Sums] = field(default_factory=dict)

    def add(self, layer: int, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare hidden states [windows, seq, width] of one layer."""
        actual = actual.float().flatten(0, -2)
        expected = expected.float().flatten(0, -2)
        error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.errors.setdefault(layer, []).append(error.cpu())
        self.cosines.setdefault(layer, []).append(nn.functional.cosine_similarity(actual, expected, dim=-1).cpu())

    def error(self, layer: int) -> float:
        """The median token's relative error; NaN where hidden states are no numbers."""
        return median(self.errors[layer])

    def cosine(self, layer: int) -> float:
        """The median token's cosine."""
        return median(self.cosines[layer])


def median(parts: Sequence[torch.Tensor]) -> float:
    """The median of all values; NaN if half of them or more are NaN."""
    values = torch.cat(list(parts))
    return float(values.nan_to_num(float("inf")).median().nan_to_num(posinf=float("nan")))


class ModelPair:
    """The float model and the FP8 reference of one run."""

    def __init__(self, model: PreTrainedModel, reference: Reference, layers: Layers | None):
        """Pair `model` with `reference`, which compute in one type; `layers` None: only GEMMs are compared."""
        self.model = model
        self.reference = reference
        self.layers = layers
        self.divergences = Divergences()

    def run(self, ids: torch.Tensor, watching: AbstractContextManager[DynamicCache]) -> None:
        """Run `ids` int64 [windows, seq] through both; `watching` is entered while the float model runs, and gives its
        cache.
        """
        with torch.inference_mode():
            with self._hidden(self.model) as expected, watching as cache:
                self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            with self._hidden(self.reference.model) as actual, self._comparing_gemms():
                self.reference.model.base_model(
                    input_ids=ids, past_key_values=self.reference.new_cache(), use_cache=True
                )
        for layer, hidden in actual.items():
            self.divergences.add(layer, hidden, expected[layer])

    @contextmanager
    def _hidden(self, model: PreTrainedModel) -> Iterator[Mapping[int, torch.Tensor]]:
        """Record the output of each layer of `model`, by its index."""
        outputs: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, inputs: Any, out: Any) -> None:
                outputs[layer] = out[0] if isinstance(out, tuple) else out

            return hook

        with ExitStack() as stack:
            for index, module in enumerate(self.layers.modules(model) if self.layers else []):
                stack.callback(module.register_forward_hook(keep(index)).remove)
            yield outputs

    @contextmanager
    def _comparing_gemms(self) -> Iterator[None]:
        """Compare each FP8 GEMM in the block with the float model's GEMM of the same input."""

        def compare(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
            linear = self.model.get_submodule(name)
            sums = self.divergences.gemms.setdefault(name, Sums())

            def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
                assert isinstance(module, FP8Linear), "the hook is on these alone"
                sums.add(fp8_gemm(module, inputs[0]), float_gemm(linear, inputs[0]))

            return hook

        with ExitStack() as stack:
            for name, module in self.reference.model.named_modules():
                if isinstance(module, FP8Linear):
                    stack.callback(module.register_forward_hook(compare(name)).remove)
            yield


def fp8_gemm(layer: FP8Linear, x: torch.Tensor) -> torch.Tensor:
    """Compute the GEMM of `layer` and `x` [..., in] without its bias, float32 [..., out]."""
    y: torch.Tensor = layer.forward(x.float())  # FP32 in, FP32 out: a large bias rounds nothing away
    return y if layer.bias is None else y - layer.bias


def float_gemm(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [..., in] by the weight of a linear layer (or a Conv1D), without bias: [..., out] in x's type."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
    return nn.functional.linear(x, weight.movedim(output_channel_axis(linear), 0))
