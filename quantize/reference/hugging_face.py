"""The reference as a model for tools that call Hugging Face models: `generate`, lm-eval, PEFT, notebooks.

Products in two terms need nothing of the caller. Two forms depend on the call, and `CallForms` sees to them:

- **An FP8 cache.** Keys and values are rounded where a cache is written, so a call without one gets one, even where
  `use_cache` is off, and an empty `DynamicCache`, such as `generate` makes, gets layers that round. Another kind of
  cache would hold other numbers than a server's, and is refused.
- **Tails.** A call with a cache is a step of a server: its last T positions have second terms, and so has a single
  decoded token. A call without one reads a window at once, and nothing in it says where a prompt ends: it is a prompt,
  unless `as_served` says that only its first tokens are one. All others then stand for decoded tokens
  (`CallPositions`), as in `fp8q validate --as-served`.
"""

import inspect
from functools import update_wrapper
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ...core.errors import InputError
from .fp8_model import Reference, begin_call
from .kv_cache import FP8Layer
from .linear import FP8Linear, replace_linears
from .peft_base import LinearOnCodes


class CallForms:
    """The `forward` of the model of `reference`, with the cache of each call, and the positions with second terms.

    It is no hook, since PEFT calls `forward` itself.
    """

    def __init__(self, reference: Reference, as_served: int | None):
        """Wrap the model's forward pass. `as_served`: the tokens of a call without a cache that are a prompt; None:
        all.
        """
        self.reference, self.as_served, self.forward = reference, as_served, reference.model.forward
        update_wrapper(self, self.forward)  # transformers and PEFT read its parameters

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the model.

        Raises InputError for a cache that holds no FP8 codes where the model's does, and for a padded prompt whose tail
        is padding.
        """
        begin_call(self.reference.call, self.reference.model, given, named)
        call, named = self.reference.call, inspect.signature(self.forward).bind_partial(*given, **named).arguments
        named |= named.pop("kwargs", {})
        cache, call.decoded = named.get("past_key_values"), 0
        if cache is None and self.as_served is not None:
            call.decoded = max(call.positions - self.as_served, 0)
        elif self.reference.tail:
            check_padding(named.get("attention_mask"), self.reference.tail)
        if self.reference.cache_scales:
            named["past_key_values"] = self.reference.new_cache() if cache is None else self._in_codes(cache)
        return self.forward(**named)

    def _in_codes(self, cache: Any) -> Any:
        """Return `cache`, whose layers round to codes from now on where it is an empty `DynamicCache`."""
        if type(cache) is DynamicCache and cache.get_seq_length() == 0:
            cache.layers = self.reference.new_cache().layers
        if not cache.layers or not all(isinstance(layer, FP8Layer) for layer in cache.layers):
            raise InputError(
                "past_key_values",
                f"is a {type(cache).__name__} of {cache.get_seq_length()} positions whose layers hold no FP8 codes, "
                "and this model's cache does",
                "leave it out, or begin with an empty DynamicCache",
            )
        return cache


def check_padding(mask: Any, tail: int) -> None:
    """Raise InputError for a row padded on the right: the `tail` of its prompt would be padding.

    `mask` [batch, positions]: 1 for tokens, 0 for padding; other forms of masks are not checked.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or bool(mask[:, -1].all()):
        return
    row = int(torch.where(mask[:, -1] == 0)[0][0])
    raise InputError(
        "attention_mask",
        f"row {row} is padded on the right, where the last {tail} positions of a prompt have second terms",
        "pad on the left (`tokenizer.padding_side`), or load the model with `as_served`",
    )


def hugging_face_model(reference: Reference, directory: Path, as_served: int | None = None) -> PreTrainedModel:
    """Return the model of `reference`, which was loaded from `directory`, with its cache and its tails in each call.

    `as_served`: the tokens of a call without a cache that are a prompt; None: all. PEFT adds adapters to it. It cannot
    be saved: its weights are the codes in `directory`.
    """
    model = reference.model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    replace_linears(model, {name: LinearOnCodes(layer, model.dtype) for name, layer in layers.items()})
    vars(model)["forward"] = CallForms(reference, as_served)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)

    def save_pretrained(*given: Any, **named: Any) -> NoReturn:
        """Raise InputError."""
        raise InputError("save_pretrained", f"this model computes with the codes of {directory}", "copy that directory")

    vars(model)["save_pretrained"] = save_pretrained
    return model
