"""Recognize the layers for multi-token prediction (MTP) by the names of a checkpoint's tensors, without torch.

These layers draft the tokens after the next one for speculative decoding. transformers makes no modules of them and
drops their tensors when it loads a model; vLLM and SGLang load them as a draft model of their own. Files name them in
two ways:

    model.layers.61.*                    the decoder layers after the last one, `num_nextn_predict_layers` of them:
                                         DeepSeek-V3, GLM-4.5
    mtp.*, model.mtp.*, model.mtp_block.*   a module of that name: Qwen3-Next, EXAONE-MoE, MiMo-V2, ERNIE 4.5

vLLM reads the list of modules that stay in BF16 by its own names of them, which in some families are not the files'
(`vllm_name`): under the file's name alone ERNIE 4.5's block was made in FP8, and no draft was accepted. Where vLLM
counts the layer from zero (the first MiMo; `config/speculative.py` does so for others too) its name is that of the
model's own first layer, and no list can tell the two apart.

Source: vLLM 0.32, `get_spec_layer_idx_from_weight_name` and `models/*_mtp.py`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .class_defaults import config_field

#: The fields of config.json that count such layers.
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_LAYER = re.compile(r"((?:model\.)?(?:language_model\.)?layers\.(\d+)\.)")
_MODULE = re.compile(r"((?:[^.]+\.)*?mtp(?:_[^.]+)?\.)")
_BLOCK = re.compile(r"^model\.mtp_block\.(\d+)\.")
_STEP = re.compile(r"^model\.layers\.(\d+)\.(?!embed_tokens|enorm|hnorm|eh_proj|shared_head|mtp_block\.)")
_LONGCAT = re.compile(r"^model\.mtp\.layers\.0\.(?:transformer_layer\.)?")


def mtp_layers(config: Mapping[str, Any]) -> int:
    """The number of layers for multi-token prediction that config.json counts; 0 where it counts none."""
    return max((count for key in COUNTS if type(count := config_field(config, key)) is int), default=0)


def mtp_prefixes(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """The beginnings of the names of MTP tensors among `names`, sorted, such as `model.layers.61.` and `mtp.`."""
    count = mtp_layers(config)
    layers = config_field(config, "num_hidden_layers")
    after = range(layers, layers + count) if type(layers) is int else range(0)
    prefixes = set()
    for name in names:
        if (layer := _LAYER.match(name)) and int(layer[2]) in after:
            prefixes.add(layer[1])
        elif module := _MODULE.match(name):
            prefixes.add(module[1])
    return tuple(sorted(prefixes))


def vllm_name(config: Mapping[str, Any], name: str) -> str:
    """The name in vLLM of a module or tensor `name`, where a layer for multi-token prediction has another one there.

    ERNIE 4.5: `model.mtp_block.0` is a decoder layer after the last one. Step-3.5: the decoder layer in
    `model.layers.45` is `model.layers.45.mtp_block`. LongCat-Flash: `model.mtp.layers.0` is the decoder layer after the
    last half of one, and its `eh_proj` has no more name than that.
    """
    kind = str(_field(config, "model_type"))
    layers = config_field(config, "num_hidden_layers")
    if "longcat_flash" in kind and type(halves := _field(config, "num_layers")) is int:
        inner = _LONGCAT.sub("", name)
        if inner == name or inner.startswith("eh_proj"):
            return inner
        return f"model.layers.{2 * halves}.{inner}"
    if type(layers) is not int:
        return name
    if kind.startswith("step3p") and (layer := _STEP.match(name)) and int(layer[1]) >= layers:
        return f"{layer[0]}mtp_block.{name[layer.end() :]}"
    return _BLOCK.sub(lambda block: f"model.layers.{layers + int(block[1])}.", name)


def _field(config: Mapping[str, Any], key: str) -> Any:
    """A field of config.json, or of the language model in it."""
    text = config.get("text_config")
    return config.get(key, text.get(key) if isinstance(text, dict) else None)
