"""The forms of FP8 checkpoints that are read, and the choice among them by config.json and ModelOpt's file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...calibrate.input.untrusted import exists
from .compressed_tensors import COMPRESSED_TENSORS
from .fine_grained import FINE_GRAINED
from .modelopt import MODELOPT, other_number
from .quantization_config import (
    CONFIG,
    MODELOPT_CONFIG,
    Codec,
    DeclaredQuantization,
    json_object,
    refused,
    stated_quantization,
)

_CODECS = (
    COMPRESSED_TENSORS,
    MODELOPT,
    FINE_GRAINED,
)
#: Every codec, by its form, which is the `quant_method` of config.json.
CODECS: Mapping[str, Codec] = {codec.form: codec for codec in _CODECS}


def declared_form(directory: Path) -> DeclaredQuantization | None:
    """Read the quantization configuration in `directory`; None where there is none.

    Raises InputError for a configuration that does not parse, and for an unknown form: the error names the form, the
    forms that are read, and a remedy.
    """
    config = json_object(directory / CONFIG)
    method = str((stated_quantization(config, directory / CONFIG) or {}).get("quant_method") or "")
    if exists(directory / MODELOPT_CONFIG) and (not method or method.startswith("modelopt")):
        said = json_object(directory / MODELOPT_CONFIG).get("quantization")
        return MODELOPT.declared(directory / MODELOPT_CONFIG, said)
    return declared_in(config, directory / CONFIG)


def other_declaration(directory: Path) -> str | None:
    """State in which point config.json in `directory` contradicts itself, or ModelOpt's file beside it; None where it
    does not.

    Servers read either: vLLM config.json, TensorRT-LLM and TensorRT Edge-LLM the other.
    """
    config = json_object(directory / CONFIG)
    said = stated_quantization(config, directory / CONFIG)
    if said and str(said.get("quant_method")).startswith(MODELOPT.form) and (number := other_number(said)) is not None:
        return number
    if not said or not exists(directory / MODELOPT_CONFIG):
        return None
    method = said.get("quant_method")
    if not str(method).startswith(MODELOPT.form):
        return f"quant_method {method!r}, and {MODELOPT_CONFIG} is beside it"
    held = json_object(directory / MODELOPT_CONFIG).get("quantization")
    if not said.get("quant_algo") or not isinstance(held, dict):
        return None
    if str(said["quant_algo"]).upper() != str(held.get("quant_algo")).upper():
        return f"quant_algo {said['quant_algo']}, and {MODELOPT_CONFIG} {held.get('quant_algo')}"
    inline = MODELOPT.declared(directory / CONFIG, said)
    file = MODELOPT.declared(directory / MODELOPT_CONFIG, held)
    if inline.groups != file.groups:
        return f"other quantized_layers than {MODELOPT_CONFIG}"
    if inline.cache != file.cache:
        return f"{'an' if inline.cache else 'no'} FP8 cache, and {MODELOPT_CONFIG} {'one' if file.cache else 'none'}"
    apart = set(inline.ignore or ()) ^ set(file.ignore or ())
    if apart:
        return f"another list of what is left out than {MODELOPT_CONFIG}, by {min(apart)}"
    return None


def declared_in(config: Mapping[str, Any], source: Path) -> DeclaredQuantization | None:
    """Read the quantization that `config`, the content of the file `source`, declares; as `declared_form` does."""
    said = stated_quantization(config, source)
    if not said:
        return None
    method = str(said.get("quant_method") or "")
    codec = MODELOPT if method.startswith(MODELOPT.form) else CODECS.get(method)
    if codec is None:
        raise refused(source, f"quant_method is {method!r}", f"{method} {said.get('format', '')}")
    return codec.declared(source, said)
