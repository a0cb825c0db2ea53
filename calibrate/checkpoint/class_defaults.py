"""Give a field of config.json, or where it states none the default of the model's class, without torch.

save_pretrained leaves out a field that has the default of its class, and the classes differ: Gemma's and GPT-2's heads
are tied to the embedding unless the file says otherwise, Llama's is not; Gemma's heads have 256 values, whatever their
number; and GPT-2 calls its positions `n_positions`. A default written here would be right for one class.

The defaults that transformers' classes declare are a table beside this file, so that hosts without transformers give
the same answer, in no time. It holds the classes that generate text, and the language models in them. A type that it
does not know is asked of transformers where that is installed: an older table misses new types, but gives no other
value than before (docs/decisions/0095). `benchmarks/class_defaults.py` writes it, and a test holds it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from ..input.silence import quiet_transformers

TABLE = Path(__file__).with_name("class_defaults.json")
TIE = "tie_word_embeddings"
#: The fields that are read of config.json before, or without, transformers.
FIELDS = (
    TIE, "head_dim", "num_key_value_heads", "num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "num_nextn_predict_layers", "num_mtp_layers",
    "mtp_num_hidden_layers",
)  # fmt: skip


class ClassDefaults(TypedDict, total=False):
    """The fields of a class: `defaults` of those that have one, None where it follows from others in a way of the
    class's own; `names` of fields in the class's files, where those are others; `text`, the type of the language model
    inside it; `untied`, the classes of models that tie no head, whatever the configuration says.
    """

    defaults: dict[str, Any]
    names: dict[str, str]
    text: str
    untied: list[str]


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of config.json for the language model: `text_config`, or all of it."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def config_field(config: Mapping[str, Any], name: str) -> Any:
    """The field `name` of the language model of config.json, one of FIELDS: as stated there, or beside it for the model
    around it, or as its class has it.

    None where nobody says. A number of key heads that is left out is that of all heads, and a head is the hidden size
    over their number, in classes that declare no other.
    """
    text = language_model(config)
    declared = declared_fields(_text_type(config))
    under = declared.get("names", {}).get(name, name)
    for part in (text, config):
        for key in (under, name):
            if key in part:
                value = part[key]
                if value is None:
                    return _derived(config, name)
                return value
    defaults = declared.get("defaults", {})
    if name in defaults:
        return defaults[name]
    return _derived(config, name)


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Tell whether the output head of the model of config.json is the embedding.

    A few classes of transformers tie nothing, whatever is stated. Where a model of several modalities states nothing,
    both its class and that of its language model must tie: of one alone some loaders follow the one, some the other.
    """
    text = language_model(config)
    architectures = config.get("architectures")
    untied = declared_fields(_type(config)).get("untied", [])
    if isinstance(architectures, list) and any(name in untied for name in architectures[:1]):
        return False
    for part in (config, text):
        if TIE in part:
            return bool(part[TIE])
    types = {_type(config), _text_type(config)}
    return all(declared_fields(kind).get("defaults", {}).get(TIE, False) for kind in types)


@cache
def declared_fields(model_type: str) -> ClassDefaults:
    """The fields that the class of `model_type` declares; empty for a type that is unknown."""
    known = _table().get(model_type)
    if known is not None:
        return known
    if not model_type or find_spec("transformers") is None:
        return ClassDefaults()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return declared_by(CONFIG_MAPPING[model_type])
    return ClassDefaults()


def declared_by(configuration: Any) -> ClassDefaults:
    """Read the defaults of FIELDS off a configuration class of transformers, which is a dataclass.

    They are those of a configuration that was made of nothing, where one can be: some classes set fields after they
    read the others. A size of heads or a number of key heads that follows from other fields is left to `DERIVED`, or
    is unknown (None) where the class has a formula of its own.
    """
    names = getattr(configuration, "attribute_map", None) or {}
    under = {name: str(names.get(name, name)) for name in FIELDS}
    stated = {entry.name: entry.default for entry in fields(configuration) if entry.default is not MISSING}
    made = _made_of_nothing(configuration)
    defaults: dict[str, Any] = {}
    for name, key in under.items():
        value = stated.get(key)
        set_later = made.get(key)
        if name in DERIVED:
            expected = DERIVED[name](_general(made, under)) if value is None else value
            if set_later not in (None, expected):
                defaults[name] = None
                continue
        else:
            value = made.get(key, value)
        if value is not None:
            defaults[name] = list(value) if isinstance(value, tuple) else value
    declared = ClassDefaults(defaults=defaults)
    if renamed := {name: key for name, key in under.items() if key != name}:
        declared["names"] = renamed
    inner = (getattr(configuration, "sub_configs", None) or {}).get("text_config")
    if inner_type := str(getattr(inner, "model_type", "") or ""):
        declared["text"] = inner_type
    return declared


def _made_of_nothing(configuration: Any) -> Mapping[str, Any]:
    """The fields of an empty configuration of a class; none where the class does not take that."""
    try:
        with quiet_transformers():
            made: Mapping[str, Any] = vars(configuration())
    except Exception:  # noqa: BLE001 - classes check what they are made of, each in a way of its own
        return {}
    return made


def _general(made: Mapping[str, Any], under: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a configuration under their general names."""
    return {name: made.get(key) for name, key in under.items()}


@cache
def _table() -> Mapping[str, ClassDefaults]:
    table: dict[str, ClassDefaults] = json.loads(TABLE.read_bytes())
    return table


def _type(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else ""


def _text_type(config: Mapping[str, Any]) -> str:
    """The type of the language model: as it says, or as the class around it has it."""
    text = language_model(config)
    if text is config:
        return _type(config)
    return _type(text) or declared_fields(_type(config)).get("text", "")


def _key_heads(config: Mapping[str, Any]) -> Any:
    return config_field(config, "num_attention_heads")


def _head_size(config: Mapping[str, Any]) -> int | None:
    heads = config_field(config, "num_attention_heads")
    width = config_field(config, "hidden_size")
    if type(width) is int and type(heads) is int and heads > 0:
        return width // heads
    return None


#: Fields that follow from others where a class declares none.
DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "num_key_value_heads": _key_heads,
    "head_dim": _head_size,
}


def _derived(config: Mapping[str, Any], name: str) -> Any:
    derive = DERIVED.get(name)
    return derive(config) if derive else None
