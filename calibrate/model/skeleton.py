"""A model without its weights: parameters on the meta device, and the buffers that no checkpoint holds (rotary
frequencies) computed.

transformers builds models on the meta device when it loads them, and computes such buffers in `_init_weights`; so does
this.
"""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `config` in `dtype`, evaluating, its parameters on the meta device, its buffers on
    the CPU.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        held = computed_buffers(module)
        for name, buffer in held.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if held:
            model._init_weights(module)
    model.eval()
    return model


def computed_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of `module` itself that no checkpoint holds."""
    return {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }
