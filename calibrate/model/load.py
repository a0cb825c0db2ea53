"""Make a model from given tensors: transformers loads all but experts, which are put in one by one.

transformers would make one tensor of all experts of a layer. So it gets a class without experts, and the experts'
weights stay views of mapped files where they have the requested type.

The names under which a checkpoint stores a model's tensors are found by letting transformers load it without weights:
transformers accepts more names than a model's own: GPT-NeoX's `embed_out` becomes `lm_head`, GPT-2's files of 2019 lack
the prefix `transformer`. These rules change with transformers and are not repeated here. Every stored tensor gets a
storage of its own on the meta device, and the parameter that has this storage after loading is the one that it was
loaded into.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.weights import UnreadTensor
from ..input.silence import quiet_transformers
from .classes import decoder
from .expert_modules import experts_of, fused
from .expert_names import expert_names
from .latent_attention import cache_heads
from .skeleton import empty


def load_tensors(
    skeleton: PreTrainedModel,
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor | UnreadTensor],
    dtype: torch.dtype,
    device: str,
) -> tuple[PreTrainedModel, list[str]]:
    """Build the model of `config` with `tensors`, by their names in files, as `dtype` on `device`.

    `skeleton`: the same model on the meta device. Those that are not read yet are read one at a time, where they are
    cast: no file stays mapped beside its copy. Returns also the tensors that are missing, unknown, or of another
    shape.
    """
    experts = experts_of(skeleton)
    names = expert_names(skeleton, tensors)
    other_tensors = {name: tensor for name, tensor in tensors.items() if name not in set(names.values())}
    kind = _without(type(skeleton), fused) if experts else type(skeleton)
    loaded: Any = kind.from_pretrained(
        None, config=deepcopy(config), state_dict=other_tensors, ignore_mismatched_sizes=True, output_loading_info=True,
        dtype=dtype, device_map=device,
    )  # fmt: skip
    model, info = loaded
    misshapen = list(info["mismatched_keys"])
    missing = list(info["missing_keys"])
    unknown = {*info["unexpected_keys"], *names.values()}
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
                laid_in.get_submodule(owner)._parameters[last] = nn.Parameter(tensor[...].to(device, dtype))
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


def load_beside_layers(
    config: PreTrainedConfig, kind: type[PreTrainedModel], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Load the `tensors`, by their names in files, of a model of `config` and of the class `kind` without its decoder
    layers; return those of the model's own parameters that they give, by name.

    transformers may split or reorder them, as those of vision towers whose queries, keys and values are stored as one.
    """
    with quiet_transformers():
        loaded: Any = _without(kind, _listed).from_pretrained(
            None, config=deepcopy(config), state_dict=dict(tensors), ignore_mismatched_sizes=True,
            output_loading_info=True, dtype=dtype, device_map="cpu",
        )  # fmt: skip
    model, info = loaded
    unread = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    return {name: parameter.data for name, parameter in model.named_parameters() if name not in unread}


def decoder_lists(model: PreTrainedModel) -> list[str]:
    """The names of the outermost lists of modules in the language model of `model`: its decoder layers above all."""
    inside = decoder(model)
    lists = [
        name for name, module in model.named_modules() if name.startswith(inside) and isinstance(module, nn.ModuleList)
    ]
    return [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]


def _listed(model: PreTrainedModel) -> list[str]:
    return [
        f"{name}.{number}" for name in decoder_lists(model) for number, _ in model.get_submodule(name).named_children()
    ]


def _without(
    kind: type[PreTrainedModel], left_out: Callable[[PreTrainedModel], Iterable[str]]
) -> type[PreTrainedModel]:
    """Make a subclass of `kind` without the modules that `left_out` names, of the same name, by which transformers
    finds its rules.
    """

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for name in left_out(self):
            self.set_submodule(name, nn.Identity())

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


#: Loading in the type of the stand-ins keeps their storages; it is also that of what transformers keeps in FP32
#: (routers' biases).
HEADER_TYPE = torch.float32


def headers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Make a meta tensor for each stored one, without values or memory."""
    return {name: torch.empty(shape, dtype=HEADER_TYPE, device="meta") for name, shape in shapes.items()}


def renamed_tensors(loaded: PreTrainedModel, stored: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The model's own name -> the stored name, of the tensors of `loaded` that have another name in `stored`.

    A tied tensor that is stored once, under a name that the model has too, is not included; nor is a part of a stored
    tensor that transformers splits.
    """
    names = {tensor.untyped_storage()._cdata: name for name, tensor in stored.items()}
    model_tensors = loaded.state_dict(keep_vars=True)
    stored_names = {name: names.get(tensor.untyped_storage()._cdata, name) for name, tensor in model_tensors.items()}
    unsplit = {
        name: under
        for name, under in stored_names.items()
        if under in stored and stored[under].shape == model_tensors[name].shape
    }
    return {name: under for name, under in unsplit.items() if under not in model_tensors}


def renamed_in(config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """`renamed_tensors` of a checkpoint with tensors of these `shapes`; tensors beside a weight under its name (scales,
    which the model does not know) are renamed with it.
    """
    stored = headers(shapes)
    with quiet_transformers():
        loaded, _ = load_tensors(empty(deepcopy(config), HEADER_TYPE), config, stored, HEADER_TYPE, "meta")
    renamed = renamed_tensors(loaded, stored)
    owners = {
        under.removesuffix(".weight"): model_name.removesuffix(".weight")
        for model_name, under in renamed.items()
        if model_name.endswith(".weight") and under.endswith(".weight")
    }
    for name in shapes:
        owner, _, part = name.rpartition(".")
        if owner in owners:
            renamed[f"{owners[owner]}.{part}"] = name
    return renamed
