"""The FP8 model as a torch module, read from the checkpoint fp8q wrote: what every other runtime is held against.

It is built from the very bytes that transformers, vLLM and the ONNX graph read, not from the scales in memory, so it
proves the file too.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from ..calibrate.model.products import attention_modules, output_axis
from ..calibrate.model.skeleton import skeleton
from ..calibrate.model.tensor_names import renamed_in
from .attention import attend_in_codes
from .kv_cache import FP8Cache
from .linear import FP8Linear, Mode, replace_linears
from .stored import ATTENTION_SCALES, OWN_CONFIG, stored_tensors


@dataclass(frozen=True)
class Reference:
    """The model and the scales of its cache (`<module>.k`, `<module>.v`, as far as these are codes)."""

    model: PreTrainedModel
    cache_scales: dict[str, float]

    def new_cache(self) -> DynamicCache:
        """An empty cache of the kind the model is served with."""
        return FP8Cache(self.cache_scales, attention_modules(self.model)) if self.cache_scales else DynamicCache()


def load_reference(directory: Path, mode: Mode, dtype: torch.dtype, device: str = "cpu") -> Reference:
    """Load the checkpoint in `directory`; wide parts compute in `dtype`, products as `mode` says (see `linear`)."""
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    two_terms = frozenset(getattr(config, OWN_CONFIG, {}).get("two_terms", ()))
    model = skeleton(config, dtype)
    shards = {file: safe_open(directory / file, "pt") for file in set(stored_tensors(directory).values())}
    where = stored_tensors(directory)
    renamed = renamed_in(
        config, type(model), {name: tuple(shards[file].get_slice(name).get_shape()) for name, file in where.items()}
    )

    def read(name: str) -> torch.Tensor:
        under = renamed.get(name, name)
        tensor: torch.Tensor = shards[where[under]].get_tensor(under).to(device)
        return tensor

    quantized = [name.removesuffix(".weight_scale") for name in where if name.endswith(".weight_scale")]
    layers: dict[str, nn.Module] = {}
    for module in quantized:
        axis = output_axis(model.get_submodule(module))
        codes, scale = (read(f"{module}.{part}").movedim(axis, 0).contiguous() for part in ("weight", "weight_scale"))
        terms = 2 if module in two_terms else 1
        bias = read(f"{module}.bias") if renamed.get(f"{module}.bias", f"{module}.bias") in where else None
        layers[module] = FP8Linear(codes, scale[:, 0], read(f"{module}.input_scale")[0], bias, mode, terms)
    replace_linears(model, layers)
    wide = {name: read(name) for name in model.state_dict() if renamed.get(name, name) in where}
    model.load_state_dict(
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in wide.items()},
        strict=False,
        assign=True,
    )
    model.tie_weights()
    unset = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not unset, f"the checkpoint has no {unset[0]}"
    caches = {
        name.removesuffix("_scale"): float(read(name)[0]) for name in where if name.endswith((".k_scale", ".v_scale"))
    }
    torch.nn.Module.to(model, device)
    if (directory / ATTENTION_SCALES).is_file():
        attend_in_codes(model, directory / ATTENTION_SCALES)
    return Reference(model, caches)
