"""Build a model without weights: parameters on the meta device, and computed buffers that no checkpoint has (rotary
frequencies).

transformers too builds models on the meta device when it loads them, and computes such buffers in `_init_weights`.

Some tensors transformers keeps in FP32, whatever narrower type a model is loaded in.

A router's bias chooses experts: 64 of them between 6.82 and 7.06 are 64 numbers in FP32 and 9 in BF16, and most tokens
then get other experts. transformers finds such tensors by regular expressions over their names, which the classes of a
model list: `_keep_in_fp32_modules_strict` for BF16 and FP16, `_keep_in_fp32_modules` for FP16 alone. Its own plan is
asked here, so that there is no list of ours. A parameter that a class makes in FP32 stays so too.

Tensors of both lists keep FP32 in the files, since a loader in FP16 reads both there.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from .classes import new_model, non_text_modules
from .expert_modules import unfold
from .latent_attention import cache_heads

#: The values of computed buffers that are always allowed, however small the weights.
BUFFERS = 1 << 28


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the causal language model of `config` in `dtype`, in eval mode: parameters on the meta device, buffers on
    the CPU.
    """
    model = empty(config, dtype)
    compute_buffers(model)
    return model


def empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of `config` without values, also in buffers; experts are unfolded."""
    with torch.device("meta"):
        model = new_model(config, dtype)
    unfold(model)
    hold_in_fp32(model, dtype)
    cache_heads(model)
    model.eval()
    return model


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the values of the buffers of `model` that no checkpoint has, on the CPU."""
    for module in model.modules():
        held = computed_buffers(module)
        for name, buffer in held.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if held:
            model._init_weights(module)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(map(computed_buffers, module.modules())):
            model._init_weights(module)  # Falcon H1's whole model makes the multipliers of its layers
    towers = [tower for tower in non_text_modules(model).values() if isinstance(tower, PreTrainedModel)]
    for tower in towers:  # a class knows the buffers of its own modules, not those of a tower inside it
        for module in filter(computed_buffers, tower.modules()):
            tower._init_weights(module)


def check_buffers(model: PreTrainedModel, values: int) -> str | None:
    """Compute the buffers that config.json makes of `model`, on the meta device, whose weights have so many `values`.

    Returns a description of their fault: far more values than the weights, NaN or infinities; None without a fault.
    """
    buffers = {
        f"{place}.{name}": buffer
        for place, module in model.named_modules()
        for name, buffer in computed_buffers(module).items()
    }
    size = sum(buffer.numel() for buffer in buffers.values())
    if size > max(values, BUFFERS):
        return f"makes buffers of {size:,} values ({next(iter(buffers))} …), and the weights have {values:,}"
    compute_buffers(model)
    for name in buffers:
        buffer = model.get_buffer(name)
        if buffer.is_floating_point() and not torch.isfinite(buffer).all():
            return f"makes {name} of numbers that are not finite"
    return None


def computed_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of `module` itself that no checkpoint has."""
    return {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }


#: A pattern without a match.
NOTHING = re.compile(r"(?!)")


def fp32_pattern(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return the pattern in the names of the tensors that transformers keeps in FP32 where `model` is in `dtype`."""
    plan = model._get_dtype_plan(dtype)
    if plan:
        return re.compile(build_glob_alternation([*plan])[0])
    return NOTHING


def hold_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the tensors of `model`, which has no values and is in `dtype`, FP32 where transformers keeps them so."""
    pattern = fp32_pattern(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.float()


def fp32_tensors(
    model: PreTrainedModel, names: Iterable[str], renamed: Mapping[str, str], dtype: torch.dtype
) -> frozenset[str]:
    """The tensors among `names`, those in files, that transformers keeps in FP32 where a model is loaded in `dtype`.

    `model`: without values, in BF16; `renamed`: its name of a tensor -> that in the files, where they differ. Tensors
    that it does not know (multi-token prediction) are judged by their names alone.
    """
    model_names = {under: name for name, under in renamed.items()}
    pattern = fp32_pattern(model, dtype)
    fp32_names = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    called = {name: model_names.get(name, name) for name in names}
    return frozenset(name for name, under in called.items() if under in fp32_names or pattern.search(under))
