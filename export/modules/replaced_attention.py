"""Give BLOOM's, Falcon's, GPT-J's and CodeGen's attention a forward pass through transformers' attention interface.

Their own forward passes do not use this interface, so the graph's attention could not take their place. The
replacements compute the same with the same modules, in another order of steps. The cache of Falcon's newer form holds
each key head once, where transformers repeats it for every query head that shares it: the numbers are equal, so the
measured scales hold. ALiBi, which BLOOM and some of Falcon add to the scores, depends on the distance alone, and a
softmax ignores a constant added to a whole row: so it becomes the head's slope times the key's position (`bias`), which
the graph has.

The rotary frequencies of the graph are constants, valid for texts up to a length (`fix_frequencies`). For most kinds
(`linear`, `llama3`, `yarn`, `proportional`) transformers computes them once. Two kinds change in the forward pass with
the largest position: `dynamic` beyond `max_position_embeddings`, and `longrope`, which has two sets, beyond
`original_max_position_embeddings`. Up to there both equal the initial frequencies bit for bit, so a graph holds these
and is served up to there. Beyond, transformers itself gives a text other numbers than its halves, and a row of a batch
other numbers than the row alone (docs/decisions/0024).
"""

import sys
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...calibrate.model.gemms import attention_modules


def replaceable(model: PreTrainedModel) -> bool:
    """Tell whether each attention module of `model` can be replaced."""
    modules = [model.get_submodule(name) for name in attention_modules(model).values()]
    return bool(modules) and all(type(module).__name__ in REPLACED for module in modules)


def replace(model: PreTrainedModel, name: str) -> None:
    """Let the attention modules of `model` (changed in place) call the attention that is registered as `name`."""
    if not replaceable(model):
        model.set_attn_implementation(name)
        return
    model.config._attn_implementation_internal = name  # what it may not be set to by its class: no mask is made then
    for place in attention_modules(model).values():
        module = model.get_submodule(place)
        part, function = REPLACED[type(module).__name__]
        vars(module)["fp8q_attends"] = name
        vars(module)[part] = MethodType(function, module)


def restore(model: PreTrainedModel, name: str) -> None:
    """Undo `replace` in `model`."""
    if not replaceable(model):
        model.set_attn_implementation(name)
        return
    model.config._attn_implementation_internal = name
    for place in attention_modules(model).values():
        module = model.get_submodule(place)
        for added in ("fp8q_attends", REPLACED[type(module).__name__][0]):
            del vars(module)[added]


def alibi_slopes(model: PreTrainedModel) -> list[float]:
    """The ALiBi slope of each head; None where `model` has no ALiBi. Not to be called during tracing."""
    config: Any = model.config
    if not replaceable(model) or not (config.model_type == "bloom" or getattr(config, "alibi", False)):
        return []
    build = sys.modules[type(model).__module__].build_alibi_tensor
    of_two = build(torch.ones((1, 2), dtype=torch.int64), config.num_attention_heads, torch.float32)
    slopes: list[float] = of_two[:, 0, 1].tolist()  # what position 1 gets
    return slopes


def bias(model: PreTrainedModel, slopes: Sequence[float], keys: torch.Tensor) -> torch.Tensor | None:
    """The bias of the scores for keys at these positions [batch, length], float32 [batch, heads, 1, length]; None
    without `slopes`.
    """
    if not slopes:
        return None
    # one by one: on the meta device a tensor of them would have no values
    slope: torch.Tensor = torch.cat(
        [torch.full((1,), number, dtype=torch.float32, device=keys.device) for number in slopes]
    )
    positions: torch.Tensor = keys.float()[:, None, None, :]
    config: Any = model.config
    if config.model_type == "bloom":
        return slope[None, :, None, None] * positions
    # in BF16 whatever the model's type, and scaled as the scores are
    exact = slope[None, :, None, None] * positions.to(torch.bfloat16).float()
    size: int = config.hidden_size // config.num_attention_heads
    return exact.to(torch.bfloat16).float() * float(size**-0.5)


def _attended(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Transpose [batch, heads, length, size] to [batch, length, heads, size]."""
    name: str = vars(module)["fp8q_attends"]
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, None)[0]
    return output


def _heads(qkv: torch.Tensor, kv_heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [batch, heads, length, size] of a fused GEMM with the layout: queries of a key head,
    key, value.

    Heads are made first and separated behind the transposition; otherwise TensorRT-RTX cuts the weight and multiplies
    in BF16 (`heads`).
    """
    groups = qkv.unflatten(-1, (-1, size)).transpose(1, 2).unflatten(1, (kv_heads, -1))
    return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]


def _bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: object, attention_mask: object,
    layer_past: Any = None, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    query, key, value = _heads(self.query_key_value(hidden_states), self.num_heads, self.head_dim)
    key, value = layer_past.update(key, value, self.layer_idx)
    return residual + self.dense(_attended(self, query, key, value).flatten(2)), None


def _falcon(
    self: Any, hidden_states: torch.Tensor, alibi: object, attention_mask: object, position_ids: object = None,
    layer_past: Any = None, position_embeddings: Any = None, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    shared = self.new_decoder_architecture or self.multi_query
    kv_heads = self.num_kv_heads if shared else self.num_heads
    query, key, value = _heads(self.query_key_value(hidden_states), kv_heads, self.head_dim)
    if alibi is None:
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, self.layer_idx)
    return self.dense(_attended(self, query, key, value).flatten(2)), None


def _gptj(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object = None
) -> tuple[torch.Tensor, None]:
    # the rotary embedding of one is in FP32
    return _attended(self, query.to(value.dtype), key.to(value.dtype), value).transpose(1, 2), None


#: Class of an attention -> which of its methods is replaced, and by what.
REPLACED: dict[str, tuple[str, Callable[..., Any]]] = {
    "BloomAttention": ("forward", _bloom),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _gptj),
    "CodeGenAttention": ("_attn", _gptj),
}


def fix_frequencies(model: nn.Module) -> None:
    """Keep all rotary embeddings of `model` (changed in place) from computing frequencies again in a forward pass."""
    for module in model.modules():
        kind = vars(module).get("rope_type")
        if isinstance(kind, str):
            vars(module)["rope_type"] = _fixed(kind)
        elif isinstance(kind, dict):  # one for each type of layer
            vars(module)["rope_type"] = {layer: _fixed(layer_kind) for layer, layer_kind in kind.items()}


def _fixed(kind: str) -> str:
    if "dynamic" in kind or kind == "longrope":
        return "default"
    return kind
