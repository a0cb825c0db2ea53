"""Refuse models that cannot be calibrated, by config.json, before any work.

fp8q calibrates decoder-only transformers: dense ones, mixtures of experts of one form (`expert_modules`), hybrids of
attention and a recurrence (`caches`), and the language models inside models of images or audio. Other models that
transformers can load are refused by name: an encoder would run without its mask, and a model without attention keeps
its state in a cache of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import InputError
from ..checkpoint.class_defaults import config_field
from ..checkpoint.config_fields import POSITIONS, check_fields
from ..checkpoint.recognizer import QUANTIZATION_KEYS
from ..input.untrusted import error_text, exists, foreign, read_json
from .caches import attention_indices
from .classes import listed_with_others, needed_attention, nested

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OTHER_SENSES = re.compile(r"(vision|audio|speech|image|video)\w*_config")


def read_config(path: Path, name: str) -> dict[str, Any]:
    """Read config.json of the checkpoint in the directory `path`, which the user calls `name`.

    Raises InputError when there is none, it does not parse, names no model type, or holds a value of the wrong type.
    """
    file = path / "config.json"
    if not exists(file):
        if gguf := next(path.glob("*.gguf"), None):
            raise InputError(
                name,
                f"holds {gguf.name}, a GGUF file, whose weights are quantized already",
                "give the checkpoint that it was made from",
            )
        raise InputError(
            name, "is no checkpoint: there is no config.json", "give the directory that save_pretrained wrote"
        )
    config = read_json(file)
    if not isinstance(config, dict) or not (isinstance(config.get("model_type"), str) or config.get("auto_map")):
        raise InputError(
            file,
            "names no model_type, so it is no transformers configuration",
            "give the directory that save_pretrained wrote",
        )
    check_fields(file, config)
    check_fields(file, text_fields(config))
    return config


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of config.json for the language model, where that is a part of the model; empty where it is all."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


def load_config(path: Path, name: str, raw: Mapping[str, Any]) -> tuple["PreTrainedConfig", str]:
    """Make the configuration of the checkpoint in `path`, whose config.json is `raw`; return it and the class name.

    Raises InputError when the model's class is not in transformers, and when it is no causal language model. Code that
    came with the checkpoint is never run: later stages build the model from the run, which contains no such code.
    """
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = raw.get("model_type")
    code = raw.get("auto_map") or {}
    architecture = next((name for name in raw.get("architectures") or [] if isinstance(name, str)), None)
    if code and (model_type not in CONFIG_MAPPING or (architecture and not hasattr(transformers, architecture))):
        raise InputError(
            name,
            f"wants code of its own ({architecture or model_type}, not in transformers {transformers.__version__}), "
            "which fp8q runs for tokenizers only",
            "give a model whose class transformers has",
        )
    if not code and model_type not in CONFIG_MAPPING:
        raise InputError(
            name,
            f"model_type {model_type} is unknown to transformers {transformers.__version__}",
            "a newer transformers may know it",
        )

    def refusal(error: BaseException) -> InputError:
        return InputError(
            path / "config.json",
            f"does not make a {model_type} configuration: {error_text(error)}",
            "copy or download it again",
        )

    with foreign(refusal):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    for key in QUANTIZATION_KEYS:  # transformers gets dequantized tensors
        vars(config).pop(key, None)
    with foreign(refusal):
        named = _causal_class(config, name, architecture)
    config._attn_implementation = needed_attention(config)  # the attention of its training may not be installed
    return config, named


def _causal_class(config: "PreTrainedConfig", name: str, architecture: str | None) -> str:
    """The name of transformers' class for `config`; raises InputError when that is no decoder-only language model."""
    from transformers.models.auto import modeling_auto as auto

    try:
        text = config.get_text_config()
    except ValueError:  # several: MusicGen's
        raise _not_causal(name, architecture or config.model_type) from None
    inside = nested(config)
    others = listed_with_others(config)
    classes = auto.MODEL_FOR_MULTIMODAL_LM_MAPPING if others else auto.MODEL_FOR_CAUSAL_LM_MAPPING
    names = auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if others else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    mapped = names.get(config.model_type)
    named = architecture or mapped or config.model_type
    other = next((key for key in config.sub_configs if _OTHER_SENSES.fullmatch(key)), None)
    if (other and not inside) or (inside and named != mapped):
        raise InputError(
            name,
            f"{named} is not a text-only model (its configuration has {other or 'a nested text_config'}), and of "
            f"others fp8q does {mapped or 'those that transformers lets answer with text'}",
            "give the language model saved on its own",
        )
    encoder = (
        config.is_encoder_decoder
        or text.is_encoder_decoder
        or (
            config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is False
        )
    )
    causal = named == mapped or named.endswith(("ForCausalLM", "LMHeadModel"))
    if mapped is None or encoder or not causal:
        raise _not_causal(name, named)
    made = classes.get(type(config), None)
    if made and not hasattr(made, "prepare_inputs_for_generation"):  # it makes blocks of tokens, in steps of diffusion
        raise _not_causal(name, named)
    _check_states(config, name, named, made)
    return named


def _check_states(config: "PreTrainedConfig", name: str, named: str, made: Any) -> None:
    """Raise InputError for a model whose cache is not transformers' general one, of the class `made` called `named`.

    Older versions keep the states of hybrids, and the keys of indexers, in caches of the classes' own.
    """
    import transformers

    attending = attention_indices(config)
    text = config.get_text_config()
    recurrent = getattr(made, "_is_stateful", False) or "linear_attention" in (getattr(text, "layer_types", None) or ())
    general = getattr(made, "_supports_default_dynamic_cache", lambda: True)()
    indexed = attending is None and getattr(text, "index_topk", None)
    if indexed or (not general and (recurrent or attending is not None)):
        raise InputError(
            name,
            f"{named} keeps {'the keys of its indexer' if indexed else 'its recurrent state'} in a cache of its own in "
            f"transformers {transformers.__version__}, which fp8q does not do for now",
            "give another model, or use `fp8q convert`",
        )
    if not attending and (recurrent or attending is not None):
        raise InputError(
            name,
            f"{named} has no attention that caches keys and values (a state-space or linear-attention model alone), "
            "which fp8q does not do for now",
            "give a transformer or a hybrid, or use `fp8q convert`",
        )


def _not_causal(name: str, architecture: str) -> InputError:
    return InputError(
        name, f"{architecture} is not a causal language model, and fp8q does no other", "give a decoder-only one"
    )


def max_positions(config: Mapping[str, Any]) -> int | None:
    """The number of positions that the model of this config.json can tell apart.

    None where nothing limits them (ALiBi) or the configuration does not say. A sliding window is no limit: it bounds
    the positions that one attends to, not the length of the text.
    """
    values = (*(config.get(key) for key in POSITIONS), config_field(config, "max_position_embeddings"))
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def one_frequency(text: "PreTrainedConfig") -> int | None:
    """The number of positions up to which a language model with two sets of rotary frequencies (`longrope`) uses one.

    None where it has one set. `dynamic` frequencies change beyond the model's own number of positions.
    """
    parts = _rotary(text)
    lengths = [part.get("original_max_position_embeddings") for part in parts if part.get("rope_type") == "longrope"]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def unknown_rotary(config: "PreTrainedConfig") -> str | None:
    """The kind of rotary frequencies (`rope_type`) in a configuration that transformers does not know, if there is one.

    A class that has no rotary positions does not mind, so that it is asked for where a model could not be made.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = [part["rope_type"] for part in _rotary(config.get_text_config()) if "rope_type" in part]
    known = ("default", *ROPE_INIT_FUNCTIONS)  # a list is no key of a dictionary
    return next((str(kind) for kind in kinds if kind not in known), None)


def _rotary(text: "PreTrainedConfig") -> list[dict[str, Any]]:
    """The parameters of a language model's rotary frequencies: one set, or one for each kind of layer."""
    kinds = getattr(text, "rope_parameters", None) or {}
    return [kinds, *(kind for kind in kinds.values() if isinstance(kind, dict))]
