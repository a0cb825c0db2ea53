"""Find the names under which a checkpoint stores a model's tensors, by letting transformers load it without weights.

transformers accepts more names than a model's own: GPT-NeoX's `embed_out` becomes `lm_head`, GPT-2's files of 2019 lack
the prefix `transformer`. These rules change with transformers and are not repeated here. Every stored tensor gets a
storage of its own on the meta device, and the parameter that has this storage after loading is the one that it was
loaded into.
"""

from collections.abc import Mapping
from copy import deepcopy

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..input.silence import quiet_transformers
from .load import load_tensors
from .skeleton import empty

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
