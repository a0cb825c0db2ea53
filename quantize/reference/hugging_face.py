"""The reference as a model for tools that call Hugging Face models: `generate`, lm-eval, PEFT, notebooks.

GEMMs in two terms need nothing of the caller. Two forms depend on the call, and `CallForms` sees to them:

- **An FP8 cache.** Keys and values are rounded where a cache is written, so a call without one gets one, even where
  `use_cache` is off, and an empty `DynamicCache`, such as `generate` makes, gets layers that round. Another kind of
  cache would hold other numbers than a server's, and is refused.
- **Tails.** A call with a cache is a step of a server: its last T positions have second terms, and so has a single
  decoded token. A call without one reads a window at once, and nothing in it says where a prompt ends: it is a prompt,
  unless `as_served` says that only its first tokens are one. All others then stand for decoded tokens
  (`CallPositions`), as in `fp8q validate --as-served`.

To PEFT an FP8 layer is a `torch.nn.Linear` to which it adds an adapter (`LinearOnCodes`).

PEFT adds y + s · B(A x) around whatever layer is there, but only where the layer is of a class that it knows. It reads
of the layer its sizes, and of `weight` the device and the type for A and B. To merge it writes to `weight.data`: codes
have no room for such a sum, so that is refused, and so is a gradient that codes would not pass on.
"""

import inspect
from functools import update_wrapper
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ...core.errors import InputError
from .fp8_model import FP8Layer, Reference, begin_call
from .linear import FP8Linear, replace_linears


class CallForms:
    """The `forward` of the model of `reference`, with the cache of each call, and the positions with second terms.

    It is no hook, since PEFT calls `forward` itself.
    """

    def __init__(self, reference: Reference, as_served: int | None):
        """Wrap the model's forward pass. `as_served`: the tokens of a call without a cache that are a prompt; None:
        all.
        """
        self.reference = reference
        self.as_served = as_served
        self.forward = reference.model.forward
        update_wrapper(self, self.forward)  # transformers and PEFT read its parameters

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the model.

        Raises InputError for a cache that holds no FP8 codes where the model's does, and for a padded prompt whose tail
        is padding.
        """
        begin_call(self.reference.call, self.reference.model, arguments, named)
        call = self.reference.call
        named = inspect.signature(self.forward).bind_partial(*arguments, **named).arguments
        named |= named.pop("kwargs", {})
        cache = named.get("past_key_values")
        call.decoded = 0
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
    """Return the model of `reference`, which was loaded from `directory`, with its cache and second codes in each call.

    `as_served`: the tokens of a call without a cache that are a prompt; None: all. PEFT adds adapters to it. It cannot
    be saved: its weights are the codes in `directory`.
    """
    model = reference.model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    replace_linears(model, {name: LinearOnCodes(layer, model.dtype) for name, layer in layers.items()})
    vars(model)["forward"] = CallForms(reference, as_served)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)

    def save_pretrained(*arguments: Any, **named: Any) -> NoReturn:
        """Raise InputError."""
        raise InputError("save_pretrained", f"this model computes with the codes of {directory}", "copy that directory")

    vars(model)["save_pretrained"] = save_pretrained
    return model


class WeightOfCodes(torch.Tensor):
    """A weight of which there are a size, a type and a device, and no numbers: those are codes."""

    @property
    def data(self) -> NoReturn:  # type: ignore[override]
        """Raise InputError: whoever reads it is about to merge."""
        raise InputError(
            "merge",
            "an adapter has no place in FP8 codes",
            "leave it beside them, or merge it into the BF16 model and quantize that (`fp8q calibrate --adapter`)",
        )


class LinearOnCodes(nn.Linear):
    """An FP8 layer that is a `torch.nn.Linear` to other libraries; it computes as the layer that it holds."""

    def __init__(self, layer: FP8Linear, dtype: torch.dtype):
        """Hold `layer`; `dtype`: of the numbers that it is called with."""
        nn.Module.__init__(self)  # and not Linear's own, which makes a weight
        self.out_features, self.in_features = layer.codes.shape
        self.layer = layer
        self.dtype = dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """A tensor [out, in] without numbers, on the device of the codes."""
        empty = torch.zeros((), dtype=self.dtype, device=self.layer.codes.device)
        return empty.expand(self.out_features, self.in_features).as_subclass(WeightOfCodes)

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """The bias [out] of the layer, float32, or None."""
        return self.layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` [..., in] to [..., out], in its type.

        Raises InputError where a gradient is to pass.
        """
        if torch.is_grad_enabled() and input.requires_grad:
            raise InputError(
                "", "an FP8 layer passes no gradient on", "`fp8q distill` learns weights or an adapter of an FP8 model"
            )
        out: torch.Tensor = self.layer(input)
        return out
