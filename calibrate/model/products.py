"""Classify the modules of a model: those that multiply by a matrix, make the logits, or write the cache.

A linear layer is known by its forward pass, not by its class: a subclass whose own forward pass computes anything else
stays in BF16. ModelOpt's registry answers alike, by a list of classes, and is the oracle in the tests.
"""

import re
from copy import copy
from inspect import unwrap
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .classes import decoder, non_text_modules
from .expert_modules import experts_of

#: The classes whose forward pass multiplies by a weight and adds a bias.
LINEAR = (nn.Linear, Conv1D)
#: How classes end whose parameters, of whatever shape, are multiplied by element or looked up: Qwen3RMSNorm,
#: OPTLearnedPositionalEmbedding, but no NormalProjection.
NO_PRODUCT = re.compile(r"(?:[Nn]orm|Embeddings?)$")


def matrix_products(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every module of the language model in `model` that multiplies by a weight matrix: linear layers, and GPT's
    Conv1D, by name.
    """
    return {name: module for name, module in language_modules(model).items() if isinstance(module, LINEAR)}


def language_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that text reaches, by name."""
    others = non_text_modules(model)
    return {name: module for name, module in model.named_modules() if name not in others}


def observed_products(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The matrix products that are measured, by name: all but the output head."""
    head = output_head(model)
    return {name: module for name, module in matrix_products(model).items() if name != head}


def output_channel_axis(module: nn.Module) -> Literal[0, 1]:
    """Axis of the output channels of a product's weight: Conv1D stores it [in, out], a linear layer [out, in]."""
    return 1 if isinstance(module, Conv1D) else 0


def other_products(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every module of the language model with a matrix (or more) of its own that is neither a linear layer, nor an
    embedding or a norm: a convolution, or a class of its own.
    """
    products = matrix_products(model)
    return {
        name: module
        for name, module in language_modules(model).items()
        if name not in products
        and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        and not isinstance(module, nn.Embedding)
        and not NO_PRODUCT.search(type(module).__name__)
    }


def routers(model: PreTrainedModel) -> set[str]:
    """The modules beside experts that choose among them or weigh them: matrices with a row for each expert, or with
    one.
    """
    found: set[str] = set()
    for place, experts in experts_of(model).items():
        block = place.removesuffix(place.rpartition(".")[2])
        for name, module in (matrix_products(model) | other_products(model)).items():
            weight = getattr(module, "weight", None)
            if (
                name.startswith(block)
                and not name.startswith(f"{place}.")
                and isinstance(weight, torch.Tensor)
                and weight.shape[output_channel_axis(module)] in {1, len(experts.experts)}
            ):
                found.add(name)
    return found


def multiplies_as_linear(module: nn.Module) -> bool:
    """Tell whether the forward pass of `module` is that of a linear layer or of GPT's Conv1D, by name or by value: a
    subclass with one of its own (Falcon's) is tried on random numbers.
    """
    forward = unwrap(type(module).forward)
    return forward in {kind.forward for kind in LINEAR} or (
        isinstance(module, nn.Linear) and _gives_the_product(module, module.bias is not None)
    )


def _gives_the_product(module: nn.Linear, biased: bool) -> bool:
    """Compare a copy of `module`, with a random weight [5, 7] and bias, with the product that a linear layer gives."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float64)

    x, weight, bias = draw(3, 7), draw(5, 7), draw(5) if biased else None
    trial = copy(module)
    trial._parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
    try:
        with torch.inference_mode():
            given = trial(x)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    wanted = nn.functional.linear(x, weight, bias)
    return isinstance(given, torch.Tensor) and given.shape == wanted.shape and torch.allclose(given, wanted)


def output_head(model: PreTrainedModel) -> str | None:
    """Name of the module that makes the logits."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def attention_modules(model: nn.Module) -> dict[int, str]:
    """Layer index -> name of the module that writes that layer of the cache; none where there are gaps between them,
    since a cache has none.

    Of one within another the inner one writes; of two side by side the first, for the second is cross-attention, which
    a decoder alone does not run.
    """
    found: dict[int, str] = {}
    inside = decoder(model)
    for name, module in model.named_modules():
        if not name.startswith(inside):
            continue
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or "attention" not in type(module).__name__.lower():
            continue
        if layer not in found or name.startswith(f"{found[layer]}."):
            found[layer] = name
    return found if sorted(found) == list(range(len(found))) else {}
