"""Recognize the layers for multi-token prediction (MTP) by the names of a checkpoint's tensors, without torch.

These layers draft the tokens after the next one for speculative decoding. transformers makes no modules of them and
drops their tensors when it loads a model; vLLM and SGLang load them as a draft model of their own. Files name them in
two ways:

    model.layers.61.*                    the decoder layers after the last one, `num_nextn_predict_layers` of them:
                                         DeepSeek-V3, GLM-4.5
    mtp.*, model.mtp.*, model.mtp_block.*   a module of that name: Qwen3-Next, EXAONE-MoE, MiMo-V2, ERNIE 4.5

vLLM reads the list of modules that stay in BF16 by its own names of them. Those are the files', but for ERNIE 4.5's
`model.mtp_block.0`, which is a decoder layer after the last one there (`vllm_name`): under the file's name alone it was
made in FP8, and no draft was accepted.

Source: vLLM 0.32, `get_spec_layer_idx_from_weight_name` and `models/*_mtp.py`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

#: The fields of config.json that count such layers.
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_LAYER = re.compile(r"((?:model\.)?(?:language_model\.)?layers\.(\d+)\.)")
_MODULE = re.compile(r"((?:[^.]+\.)*?mtp(?:_[^.]+)?\.)")
_BLOCK = re.compile(r"^model\.mtp_block\.(\d+)\.")


def mtp_layers(config: Mapping[str, Any]) -> int:
    """The number of layers for multi-token prediction that config.json counts; 0 where it counts none."""
    return max((count for key in COUNTS if type(count := _field(config, key)) is int), default=0)


def mtp_prefixes(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """The beginnings of the names of MTP tensors among `names`, sorted, such as `model.layers.61.` and `mtp.`."""
    count, layers = mtp_layers(config), _field(config, "num_hidden_layers")
    after = range(layers, layers + count) if type(layers) is int else range(0)
    prefixes = set()
    for name in names:
        if (layer := _LAYER.match(name)) and int(layer[2]) in after:
            prefixes.add(layer[1])
        elif module := _MODULE.match(name):
            prefixes.add(module[1])
    return tuple(sorted(prefixes))


def vllm_name(config: Mapping[str, Any], name: str) -> str:
    """The name in vLLM of a module or tensor `name`: another one for ERNIE 4.5's `model.mtp_block.0.*` alone."""
    layers = _field(config, "num_hidden_layers")
    if type(layers) is not int:
        return name
    return _BLOCK.sub(lambda block: f"model.layers.{layers + int(block[1])}.", name)


def _field(config: Mapping[str, Any], key: str) -> Any:
    """A field of config.json, or of the language model in it."""
    text = config.get("text_config")
    return config.get(key, text.get(key) if isinstance(text, dict) else None)
