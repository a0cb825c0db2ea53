"""transformers' interface of attention: what a model attends by, and another function in its place for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.classes import code_of

Attention = Callable[..., Any]


def attention_of(model: PreTrainedModel) -> Attention | None:
    """Return the attention function of `model`; None where it does not go through the interface.

    The eager attention is not in it: each model's own is called where the interface has no other of that name.
    """
    code, name = vars(code_of(model)), model.config._attn_implementation
    if "ALL_ATTENTION_FUNCTIONS" not in code:
        return None
    found: Attention | None = ALL_ATTENTION_FUNCTIONS.get(name, code.get("eager_attention_forward"))
    return found


@contextmanager
def attention_replaced(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """Replace the attention function of `model` by `attention` in this block."""
    name = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
