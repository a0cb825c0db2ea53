"""Decide which architectures can be exported, before any work. The others are quantized too, without a graph.

The graph's attention and cache must be able to replace the model's. Most obstacles show in a forward pass of two tokens
on the meta device, with an attention that computes nothing and records its arguments. transformers makes no mask for an
attention that it does not know, and the graph's mask is causal. So a mask among the arguments was computed by the model
itself, and would be lost.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache

from ...calibrate.input.untrusted import error_text
from ...calibrate.measure.observe import ObservedLayer
from ...calibrate.model.caches import keeps_states, new_cache
from ...calibrate.model.classes import code_of
from ...calibrate.model.expert_modules import Expert, experts_of
from ...calibrate.model.expert_names import Conversions
from ...calibrate.model.gemms import attention_modules, cache_shapes
from .graph_model import text_input
from .replaced_attention import fix_frequencies, replace, replaceable, restore

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


LOOKING = "fp8q_looking"
#: Keywords of an attention that the graph's honours (the first three), or that change nothing in it. `dropout` is 0 in
#: a model that evaluates.
KEYWORDS = {
    "scaling",
    "sliding_window",
    "softcap",
    "dropout",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}
#: Experts in all layers, each a branch of the graph: with more, building takes many minutes, as it grows faster than
#: their number, and a decode step waits more often for the device than it saves reading (docs/decisions/0026).
MOST_BRANCHES = 256
#: Model types whose graph is right, and at which TensorRT-RTX 1.7.1's builder ends in a segmentation fault.
CRASHING = {"diffllama"}


def unsupported(model: "PreTrainedModel") -> str | None:
    """Name the feature of `model` (on the meta device or not) that prevents a graph, with the architecture's name; None
    where there is none.

    0. A cache that holds something else than keys and values. 1. More experts than are worth a branch each. 2.
    Attention outside transformers' interface that cannot be replaced (`replaced_attention`). 3. Positions that are
    counted from the cache, whose length here is its capacity, or from the padding token: the graph's begin at 0. 4. A
    graph at which the builder crashes. 5. A cache written by modules without a layer index. 6. An attention that does
    more than the graph's, or a cache of other shapes (`seen_in_a_pass`).
    """
    reason = _unsupported(model, model.config.get_text_config())
    if reason:
        return f"{type(model).__name__} {reason}"
    return None


def _unsupported(model: "PreTrainedModel", text: "PreTrainedConfig") -> str | None:
    if keeps_states(text):
        return "keeps more than keys and values (a recurrent state, or an indexer's keys), which the graph does not"
    layers_of_experts = experts_of(model).values()
    if any(experts.form is not Expert for experts in layers_of_experts):
        if any(experts.form.scaled_inputs for experts in layers_of_experts):
            return "has experts whose inputs the router scales, which the graph does not compute"
        return "has experts without a gate, or with one of their own, which the graph does not compute"
    if Conversions(model).numbered_behind_others():
        return "divides the experts of its files among two modules, which the graph does not"
    if (number := sum(len(experts.experts) for experts in layers_of_experts)) > MOST_BRANCHES:
        return (
            f"has {number:,} experts in its layers, each a branch of the graph, and engines of more than "
            f"{MOST_BRANCHES} are not worth building"
        )
    code = inspect.getsource(code_of(model))
    replaced = replaceable(model)
    if "ALL_ATTENTION_FUNCTIONS" not in code and not replaced:
        return "has an attention that transformers does not let be replaced"
    if "position_ids" not in inspect.signature(model.forward).parameters and not replaced:
        return "counts positions from its cache (its forward takes no position_ids)"
    if "create_position_ids_from_input_ids" in code:
        return "counts positions from its padding token on"
    if text.model_type in CRASHING:
        return "has a differential attention (TensorRT-RTX 1.7.1's builder ends in a segmentation fault on it)"
    layers = attention_modules(model)
    if len(layers) != text.num_hidden_layers:
        return "writes its cache where it cannot be told which layer it is"
    return seen_in_a_pass(model, layers, cache_shapes(text))


@dataclass
class Looked:
    """The evidence of a forward pass: the `reasons` against a graph, and by layer the [heads, size] of its keys and
    values.
    """

    reasons: list[str] = field(default_factory=list)
    shapes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Replace attention: record the arguments and return a tensor of the right shape."""
        unknown = sorted(name for name, argument in kwargs.items() if argument is not None and name not in KEYWORDS)
        if attention_mask is not None:
            self.reasons.append(f"computes an attention mask of its own ({type(module).__name__})")
        elif getattr(module, "is_causal", True) is False:
            self.reasons.append(f"attends to later tokens too ({type(module).__name__}.is_causal is False)")
        elif unknown:
            self.reasons.append(
                f"hands its attention {', '.join(unknown)} ({type(module).__name__}; the graph's would ignore it)"
            )
        return query.new_empty(*query.shape[:3], value.shape[-1]).transpose(1, 2), None

    def cache(self, model: "PreTrainedModel", layers: Mapping[int, str]) -> DynamicCache:
        """Make a cache whose layers record the shapes that they receive."""

        def note(layer: int) -> ObservedLayer:
            def see(keys: torch.Tensor, values: torch.Tensor) -> None:
                self.shapes[layer] = [(states.shape[1], states.shape[3]) for states in (keys, values)]

            return ObservedLayer(see)

        return new_cache(model, {layer: note(layer) for layer in layers})


def seen_in_a_pass(
    model: "PreTrainedModel", layers: Mapping[int, str], shapes: tuple[tuple[int, int], tuple[int, int]]
) -> str | None:
    """Run two tokens and describe what `model` does that the graph cannot; rotary frequencies are fixed, in place.

    Detected in this order: values read in the forward pass, which cannot be traced; 1. a mask, 2. attention that is not
    causal, 3. an unknown keyword, 4. a cache of other `shapes` (heads, size; of keys, of values).
    """
    looked = Looked()
    fix_frequencies(model)
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        with attending_with(model, looked), torch.inference_mode():
            model(**text_input(model, ids), past_key_values=looked.cache(model, layers), use_cache=True)
    except Exception as error:  # noqa: BLE001  # whatever a model's own code raises
        return f"cannot be run on shapes alone ({error_text(error)})"
    if looked.reasons:
        return looked.reasons[0]
    for layer, name in sorted(layers.items()):
        written = looked.shapes.get(layer)
        if written is None:
            return f"writes no cache in {name}"
        for part, actual, expected in zip(("keys", "values"), written, shapes, strict=True):
            if actual != expected:
                return (
                    f"writes {part} of {actual[0]} heads of {actual[1]} in {name}, and not {expected[0]} of "
                    f"{expected[1]} as its config.json has it for all"
                )
    return None


@contextmanager
def attending_with(model: "PreTrainedModel", looked: Looked) -> Iterator[None]:
    """Replace the attention of `model` by `looked.attention` in this block."""
    AttentionInterface.register(LOOKING, looked.attention)
    before = model.config._attn_implementation
    replace(model, LOOKING)
    try:
        yield
    finally:
        restore(model, before)
