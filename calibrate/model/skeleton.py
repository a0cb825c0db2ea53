"""Build a model without weights: parameters on the meta device, and computed buffers that no checkpoint has (rotary
frequencies).

transformers too builds models on the meta device when it loads them, and computes such buffers in `_init_weights`.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .classes import new_model
from .expert_modules import unfold
from .fp32_tensors import hold_in_fp32
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
