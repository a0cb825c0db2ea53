"""The parts of vLLM that `fp8q_vllm` imports, after the sources of vLLM 0.33, for a machine without it.

What chooses a layer's scheme (`CompressedTensorsConfig.get_quant_method`), the scheme of static FP8, and the order of
loading are as there: all layers are made under the model's type as torch's default, then each one's method processes
its weights, and then latent attention asks for its weights by an identity matrix (`get_and_maybe_dequant_weights`).
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import fp8q_vllm
import pytest
import torch

LAYERS = "vllm.model_executor.layers"
PLUGIN = ("fp8q_vllm.config", "fp8q_vllm.gemm")


class LinearBase(torch.nn.Module):
    """A linear layer [out, in] in the codes and scales that it was given."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size


class ParallelLMHead(LinearBase):
    """The output head."""


class RoutedExperts(torch.nn.Module):
    """The experts of a layer."""


class CompressedTensorsW8A8Fp8:
    """FP8 codes by FP8 codes."""

    def __init__(self, weight_quant: Any, is_static_input_scheme: bool) -> None:
        self.weight_quant, self.is_static_input_scheme = weight_quant, is_static_input_scheme

    def create_weights(self, layer: Any, **kwargs: Any) -> None:
        layer.orig_dtype = torch.get_default_dtype()
        layer.input_size_per_partition = layer.size[1]
        self.fp8_linear = "a kernel"

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weight is [in, out] from now on, and all that was loaded is a parameter."""
        layer.weight = torch.nn.Parameter(layer.weight.t(), requires_grad=False)
        layer.input_scale = torch.nn.Parameter(layer.input_scale, requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError("vLLM's own kernel")


class CompressedTensorsW8A16Fp8:
    """FP8 weights by BF16 inputs, as GPUs before compute capability 8.9 multiply them."""


class GroupShape(tuple[int, int]):
    """Rows and columns that share a scale."""

    PER_TENSOR = (-1, -1)


class QuantFP8:
    """FP8 codes under a static scale, as vLLM's native operations make them."""

    def __init__(self, static: bool, group_shape: tuple[int, int]) -> None:
        assert static
        assert group_shape == GroupShape.PER_TENSOR

    def __call__(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.ndim == 2
        return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


class QuantizeMethodBase:
    """A layer's method."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """There is nothing to do."""


class CompressedTensorsLinearMethod(QuantizeMethodBase):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scheme.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.scheme.apply_weights(layer, x, bias=bias)  # type: ignore[no-any-return]


@dataclass
class CompressedTensorsConfig:
    """`schemes`: a layer's scheme by its prefix; None: as it is."""

    schemes: Mapping[str, Any] = field(default_factory=dict)
    packed_modules_mapping: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """The names of `schemes` are vLLM's."""

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        scheme = self.schemes.get(prefix)
        if scheme is None:
            return QuantizeMethodBase()
        layer.scheme = scheme
        return CompressedTensorsLinearMethod()


class WeightsMapper:
    """Names by their beginnings."""

    def __init__(self, prefixes: Mapping[str, str | None]) -> None:
        self.prefixes = prefixes

    def _map_name(self, name: str) -> str | None:
        for before, after in self.prefixes.items():
            if name.startswith(before):
                return None if after is None else after + name.removeprefix(before)
        return name


@dataclass
class Plugin:
    """The plugin's modules, imported in this vLLM; `context`: of the forward pass, None outside of one."""

    config: ModuleType
    product: ModuleType
    context: Any = None

    def forward(self, metadata: Any) -> None:
        """Begin a forward pass over a batch."""
        self.context = SimpleNamespace(attn_metadata=metadata, additional_kwargs={})


def modules(plugin: list[Plugin]) -> dict[str, ModuleType]:
    """The modules of vLLM by their names."""
    compilation = SimpleNamespace(max_cudagraph_capture_size=8)
    parts: dict[str, dict[str, Any]] = {
        "vllm.config": {"get_current_vllm_config": lambda: SimpleNamespace(compilation_config=compilation)},
        "vllm.forward_context": {
            "is_forward_context_available": lambda: plugin[0].context is not None,
            "get_forward_context": lambda: plugin[0].context,
        },
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda name, function, fake_impl: None},
        "vllm._custom_ops": {"cutlass_scaled_mm": None},
        f"{LAYERS}.fused_moe": {"RoutedExperts": RoutedExperts},
        f"{LAYERS}.linear": {"LinearBase": LinearBase},
        f"{LAYERS}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
        f"{LAYERS}.quantization": {"register_quantization_config": lambda name: lambda config: config},
        f"{LAYERS}.quantization.base_config": {"QuantizeMethodBase": QuantizeMethodBase},
        f"{LAYERS}.quantization.compressed_tensors": {},
        f"{LAYERS}.quantization.compressed_tensors.compressed_tensors": {
            "CompressedTensorsConfig": CompressedTensorsConfig
        },
        f"{LAYERS}.quantization.compressed_tensors.schemes": {"CompressedTensorsW8A8Fp8": CompressedTensorsW8A8Fp8},
        f"{LAYERS}.quantization.input_quant_fp8": {"QuantFP8": QuantFP8},
        f"{LAYERS}.quantization.utils.quant_utils": {"GroupShape": GroupShape},
        f"{LAYERS}.quantization.utils.w8a8_utils": {"cutlass_fp8_supported": lambda: False},
        "vllm.model_executor.models.utils": {"WeightsMapper": WeightsMapper},
    }
    for name in [*parts]:
        pieces = name.split(".")
        for end in range(1, len(pieces)):
            parts.setdefault(".".join(pieces[:end]), {})
    found = {name: ModuleType(name) for name in parts}
    for name, module in found.items():
        module.__dict__.update(parts[name])
    return found


@contextmanager
def plugin_in_vllm() -> Iterator[Plugin]:
    """Have the plugin imported in this vLLM in the block."""
    made: list[Plugin] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules(made).items():
            patch.setitem(sys.modules, name, module)
        for name in PLUGIN:
            patch.delitem(sys.modules, name, raising=False)
            patch.delattr(fp8q_vllm, name.rpartition(".")[2], raising=False)
        config, product = (importlib.import_module(name) for name in PLUGIN)
        made.append(Plugin(config, product))
        operators = SimpleNamespace(vllm=SimpleNamespace(fp8q_linear=product.fp8q_linear))
        patch.setattr(config, "torch", Torch(operators))
        yield made[0]
        for name in PLUGIN:
            sys.modules.pop(name, None)


class Torch:
    """torch, with the operator that vLLM would have registered."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
