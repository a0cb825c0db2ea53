"""Classify the modules of a model: GEMMs, output head, routers, and attention that writes the cache, of
which `cache_shapes` gives the sizes.

A linear layer is known by its forward pass, not by its class: a subclass whose own forward pass computes another result
stays in BF16. ModelOpt's registry gives the same answers by a list of classes, and is the oracle in the tests.
"""

import re
from collections.abc import Sequence
from copy import copy
from fnmatch import fnmatchcase
from inspect import unwrap
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .caches import attention_indices
from .classes import decoder, non_text_modules
from .expert_modules import experts_of

#: The classes whose forward pass multiplies by a weight and adds a bias.
LINEAR = (nn.Linear, Conv1D)
#: The ends of class names whose parameters are multiplied element by element or looked up: Qwen3RMSNorm,
#: OPTLearnedPositionalEmbedding, but not NormalProjection.
NO_GEMM = re.compile(r"(?:[Nn]orm|Embeddings?)$")


def gemm_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of the language model in `model`, and GPT's Conv1D, by name."""
    return {name: module for name, module in language_modules(model).items() if isinstance(module, LINEAR)}


def language_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of `model` that text reaches, by name."""
    others = non_text_modules(model)
    return {name: module for name, module in model.named_modules() if name not in others}


def vision_modules(model: PreTrainedModel, patterns: Sequence[str] = ("*",)) -> dict[str, nn.Module]:
    """The linear layers of `model` that text does not reach, and other modules with a matrix there, by name: those that
    one of the shell `patterns` matches.
    """
    return {
        name: module
        for name, module in non_text_modules(model).items()
        if (isinstance(module, LINEAR) or _has_other_matrix(module))
        and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def vision_gemms(model: PreTrainedModel, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The linear layers among the `vision_modules` that one of `patterns` matches."""
    return {name: module for name, module in vision_modules(model, patterns).items() if isinstance(module, LINEAR)}


def observed_gemms(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The GEMMs whose inputs are measured, by name: all but the output head."""
    head = output_head(model)
    return {name: module for name, module in gemm_modules(model).items() if name != head}


def output_channel_axis(module: nn.Module) -> Literal[0, 1]:
    """The axis of the output channels in a GEMM's weight: Conv1D stores [in, out], a linear layer [out, in]."""
    return 1 if isinstance(module, Conv1D) else 0


def other_matrix_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Map the names of other modules with a matrix to the modules: convolutions, and classes of the architecture.

    Linear layers, embeddings and norms are not among them.
    """
    return {name: module for name, module in language_modules(model).items() if _has_other_matrix(module)}


def _has_other_matrix(module: nn.Module) -> bool:
    """Tell whether `module` has a matrix and is no linear layer, embedding or norm."""
    return (
        not isinstance(module, (*LINEAR, nn.Embedding))
        and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        and not NO_GEMM.search(type(module).__name__)
    )


def routers(model: PreTrainedModel) -> set[str]:
    """The GEMMs that choose or weigh experts: in the block of the experts, with a row for each of them, or one."""
    names: set[str] = set()
    for holder, experts in experts_of(model).items():
        block = holder.removesuffix(holder.rpartition(".")[2])
        for name, module in (gemm_modules(model) | other_matrix_modules(model)).items():
            weight = getattr(module, "weight", None)
            if (
                name.startswith(block)
                and not name.startswith(f"{holder}.")
                and isinstance(weight, torch.Tensor)
                and weight.shape[output_channel_axis(module)] in {1, len(experts.experts)}
            ):
                names.add(name)
    return names


def multiplies_as_linear(module: nn.Module) -> bool:
    """Tell whether `module` computes as a linear layer or GPT's Conv1D does.

    A subclass with a forward pass of its own (Falcon's) is tried on random numbers.
    """
    forward = unwrap(type(module).forward)
    return forward in {kind.forward for kind in LINEAR} or (
        isinstance(module, nn.Linear) and _computes_linear(module, module.bias is not None)
    )


def _computes_linear(module: nn.Linear, biased: bool) -> bool:
    """Compare a copy of `module`, with a random weight [5, 7] and bias, with a linear layer of the same weight."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float64)

    x = draw(3, 7)
    weight = draw(5, 7)
    bias = draw(5) if biased else None
    trial = copy(module)
    trial._parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
    try:
        with torch.inference_mode():
            output = trial(x)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    wanted = nn.functional.linear(x, weight, bias)
    return isinstance(output, torch.Tensor) and output.shape == wanted.shape and torch.allclose(output, wanted)


def output_head(model: PreTrainedModel) -> str | None:
    """The name of the output head, which makes the logits; None where there is none."""
    head = model.get_output_embeddings()
    if head is not None:
        return next((name for name, module in model.named_modules() if module is head), None)
    return None


def attention_modules(model: nn.Module) -> dict[int, str]:
    """Map layer index to the name of the attention module that writes this layer of the cache.

    Of a model that keeps other states too, these are its layers with attention. Of others the mapping is empty where
    indices are missing, since a cache has a layer for each. Of two modules of one layer, the inner one writes the cache
    where one contains the other; otherwise the first, since the second is cross-attention, which a decoder alone does
    not run.
    """
    names: dict[int, str] = {}
    inside = decoder(model)
    attending = attention_indices(model.config) if isinstance(model, PreTrainedModel) else None
    for name, module in model.named_modules():
        if not name.startswith(inside):
            continue
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or "attention" not in type(module).__name__.lower():
            continue
        if attending is not None and layer not in attending:
            continue
        if layer not in names or name.startswith(f"{names[layer]}."):
            names[layer] = name
    complete = sorted(names) == sorted(range(len(names)) if attending is None else attending)
    return names if complete else {}


def cache_shapes(text: PreTrainedConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and head size of the cached keys, and of the values, in every layer; by the first layer's configuration
    where layers have their own.

    Latent attention caches the keys and values of every head, not the latent vector that they are computed from
    (`latent_attention`).
    """
    text = (getattr(text, "per_layer_config", None) or [text])[0]
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        return (
            (text.num_attention_heads, text.qk_nope_head_dim + text.qk_rope_head_dim),
            (text.num_attention_heads, text.v_head_dim),
        )
    if text.model_type == "falcon":  # each key head once (`export.modules.replaced_attention`)
        heads = text.num_kv_heads if text.new_decoder_architecture or not text.multi_query else 1
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return (heads, size), (heads, size)


def attention_heads(text: PreTrainedConfig) -> dict[str, int]:
    """The heads of every layer's keys (`k`), values (`v`) and queries (`q`)."""
    (keys, _), (values, _) = cache_shapes(text)
    queries: int = (getattr(text, "per_layer_config", None) or [text])[0].num_attention_heads
    return {"k": keys, "v": values, "q": queries}
