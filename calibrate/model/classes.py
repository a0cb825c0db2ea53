"""Find the class of transformers for a configuration, the language model inside it, and its attention function.

A model of images or audio is made whole, in its own class: so its modules and tensors have the names that every loader
of the checkpoint knows, and on text alone only its language model runs.

transformers uses SDPA by default, which silently leaves logits uncapped (Gemma 2's `attn_logit_softcapping`); every
attention but transformers' eager one and flash attention does. So such a model uses eager attention here, wherever
torch measures, evaluates or serves it.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def needed_attention(config: "PreTrainedConfig") -> str | None:
    """The attention function that `config` needs; None for transformers' default."""
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return "eager"
    return None


def nested(config: "PreTrainedConfig") -> bool:
    """Tell whether the language model is only a part of the model of `config`."""
    return config.get_text_config() is not config


def new_model(config: "PreTrainedConfig", dtype: "torch.dtype") -> "PreTrainedModel":
    """Build the model of `config` in `dtype`, in eval mode, on the default device; sets the type and attention in
    `config`.

    It is a causal language model, or a model of more than text that contains one.
    """
    # the attention of its training may not be installed
    config._attn_implementation = needed_attention(config)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    model.eval()
    return model


def listed_with_others(config: "PreTrainedConfig") -> bool:
    """Tell whether transformers lists the class of `config` among those of more than text: models with a language model
    inside, and Mistral 4's causal language model.
    """
    from transformers.models.auto import modeling_auto as auto

    if nested(config) or config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return nested(config)
    return str(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)).endswith("ForCausalLM")


def auto_class(config: "PreTrainedConfig") -> Any:
    """Return the auto class of transformers that makes and loads the model of `config`."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    if listed_with_others(config):
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def decoder(model: "nn.Module") -> str:
    """Return the prefix of the language model's modules, such as `model.language_model.`; empty where it is the whole
    model.
    """
    config = getattr(model, "config", None)
    if config is None or not nested(config):
        return ""
    language_model = model.get_decoder()  # type: ignore[operator]  # it is a PreTrainedModel, having such a configuration
    name = next((name for name, module in model.named_modules() if module is language_model), "")
    return f"{name}." if name else ""


def code_of(model: "PreTrainedModel") -> ModuleType:
    """The Python module with the language model's classes.

    For a model that is no part of another, `get_decoder` is not used: it may return any layer (ModernBERT's: its head).
    """
    return sys.modules[type(model.get_decoder() if nested(model.config) else model).__module__]


def non_text_modules(model: "PreTrainedModel") -> dict[str, "nn.Module"]:
    """The modules of `model` that text does not reach, by name: vision towers and projections of images."""
    if not (inside := decoder(model)):
        return {}
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside)
        and not inside.startswith(f"{name}." if name else "")
        and module is not head
    }
