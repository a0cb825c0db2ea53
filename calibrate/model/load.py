"""Make a model from given tensors: transformers loads all but experts, which are put in one by one.

transformers would make one tensor of all experts of a layer. So it gets a class without experts, and the experts'
weights stay views of mapped files where they have the requested type.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .expert_modules import experts_of, fused
from .expert_names import expert_names
from .latent_attention import cache_heads


def load_tensors(
    skeleton: PreTrainedModel,
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: str,
) -> tuple[PreTrainedModel, list[str]]:
    """Build the model of `config` with `tensors`, by their names in files, as `dtype` on `device`.

    `skeleton`: the same model on the meta device. Returns also the tensors that are missing, unknown, or of another
    shape.
    """
    experts = experts_of(skeleton)
    names = expert_names(skeleton, tensors)
    other_tensors = {name: tensor for name, tensor in tensors.items() if name not in set(names.values())}
    kind = _without_experts(type(skeleton)) if experts else type(skeleton)
    loaded: Any = kind.from_pretrained(
        None, config=deepcopy(config), state_dict=other_tensors, ignore_mismatched_sizes=True, output_loading_info=True,
        dtype=dtype, device_map=device,
    )  # fmt: skip
    model, info = loaded
    misshapen = list(info["mismatched_keys"])
    missing, unknown = list(info["missing_keys"]), {*info["unexpected_keys"], *names.values()}
    for place, module in experts.items():
        laid_in = deepcopy(module)
        for name, parameter in laid_in.named_parameters():
            stored = names.get(f"{place}.{name}", "")
            if stored not in tensors:
                missing.append(f"{place}.{name}")
                continue
            tensor = tensors[stored]
            unknown.remove(stored)
            if tensor.shape != parameter.shape:
                misshapen.append((f"{place}.{name}", tensor.shape, parameter.shape))
            else:
                owner, _, last = name.rpartition(".")
                laid_in.get_submodule(owner)._parameters[last] = nn.Parameter(tensor.to(device, dtype))
        model.set_submodule(place, laid_in.eval())
    model.__class__ = type(skeleton)
    cache_heads(model)
    return model, [
        *(
            f"{name} has shape {list(shape)} where the model has {list(wanted)}"
            for name, shape, wanted in sorted(misshapen)
        ),
        *(f"{name} is missing" for name in sorted(missing)),
        *(f"{name} is unknown to the model" for name in sorted(unknown)),
    ]


def _without_experts(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Make a subclass of `kind` without fused experts, of the same name, by which transformers finds its rules."""

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for name in fused(self):
            self.set_submodule(name, nn.Identity())

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
