"""Read and replace the attention function that a model calls through transformers' interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.classes import code_of

Attention = Callable[..., Any]


def attention_of(model: PreTrainedModel) -> Attention | None:
    """Return the attention function of `model`; None for a model that does not use the interface.

    The interface does not list eager attention: for a name that it does not know, a model calls its own eager function.
    """
    code, name = vars(code_of(model)), model.config._attn_implementation
    if "ALL_ATTENTION_FUNCTIONS" not in code:
        return None
    function: Attention | None = ALL_ATTENTION_FUNCTIONS.get(name, code.get("eager_attention_forward"))
    return function


@contextmanager
def attention_replaced(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """Replace the attention function of `model` by `attention` in this block."""
    name = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
