"""Observe the queries of attention, which only attention in FP8 needs, in our graph or in vLLM.

The statistics of a run have keys and values, from the cache, but no queries. Queries are observed after the rotary
embedding, at transformers' attention function, which is wrapped while a batch runs. This works for every architecture
whose attention uses transformers' interface, and only such models can be exported.

`attention_of` and `attention_replaced` read and replace that function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...core.errors import InputError
from ...core.reporter import Reporter
from ..model.classes import code_of
from ..model.gemms import attention_modules
from .observe import Observer
from .statistics import TensorStatistics


def query_statistics(
    model: PreTrainedModel, windows: npt.NDArray[np.int64], batch_size: int, report: Reporter
) -> dict[str, TensorStatistics]:
    """Run `model` on `windows` int64 [windows, seq_len]; return `<attention>.q` -> statistics of its queries.

    Raises InputError for a model whose attention does not use the interface.
    """
    parts = [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]
    names = {id(model.get_submodule(name)): name for name in attention_modules(model).values()}
    observers = {name: Observer(len(parts)) for name in names.values()}
    with report.track("Measuring queries", windows.size, "tokens") as advance, torch.inference_mode():
        for batch, ids in enumerate(parts):
            with recorded_queries(model) as queries:
                model.base_model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=False)
            for module, query in queries:
                observers[names[id(module)]].update(query, batch)
            advance(ids.size)
    measured = {f"{name}.q": observer.statistics() for name, observer in observers.items()}
    return {name: tensor for name, tensor in measured.items() if tensor is not None}


@contextmanager
def recorded_queries(model: PreTrainedModel) -> Iterator[list[tuple[nn.Module, torch.Tensor]]]:
    """Record each attention module that runs in this block, with its queries [batch, seq, heads · size].

    Raises InputError for a model whose attention does not use the interface.
    """
    plain = attention_of(model)
    queries: list[tuple[nn.Module, torch.Tensor]] = []
    if plain is None:
        raise InputError(
            type(model).__name__,
            f"attends by its own code ({model.config._attn_implementation}), where queries cannot be measured",
            "leave out --attention fp8 and --q-scale",
        )

    def noting(module: nn.Module, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        queries.append((module, query.transpose(1, 2).flatten(2)))
        return plain(module, query, *arguments, **options)

    with attention_replaced(model, noting):
        yield queries


Attention = Callable[..., Any]


def attention_of(model: PreTrainedModel) -> Attention | None:
    """Return the attention function of `model`; None for a model that does not use the interface.

    The interface does not list eager attention: for a name that it does not know, a model calls its own eager function.
    """
    code = vars(code_of(model))
    name = model.config._attn_implementation
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
