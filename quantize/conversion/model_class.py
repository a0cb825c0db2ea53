"""Build the class of transformers that config.json names, without weights: it knows what each tensor of a file is.

The class is the one that `architectures` names, or the one that transformers takes for the `model_type` where nothing
is named. Another class than the named one would be a guess: an EAGLE head says `model_type: llama`. Code that came with
a checkpoint is never run, and a class that cannot be built is no error: names decide then.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...calibrate.checkpoint.config_fields import EXPERTS
from ...calibrate.checkpoint.recognizer import QUANTIZATION_KEYS
from ...calibrate.input.silence import quiet_transformers
from ...calibrate.input.untrusted import error_text, foreign, walk
from ...calibrate.model.classes import needed_attention

#: Where a class is looked for whose name config.json does not have, in this order.
_MAPPINGS: tuple[Mapping[str, Any], ...] = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
)
#: Fields that say nothing of the model's modules.
_OTHER_FIELDS = (*QUANTIZATION_KEYS, "auto_map", "transformers_weights", "dtype", "torch_dtype")
#: Fields that count modules: of layers there are no more than tensors, of all others no more than experts.
_LAYERS = re.compile(r"layer|depth|block")
_MODULES = re.compile(r"^(num|n)_|experts|codebook")
#: Methods of transformers.initialization that make building on the meta device quick and safe, where it has them.
_INITIALIZATION = ("no_init_weights", "meta_device_safe_creation_ops")


class NoClassError(Exception):
    """transformers has no class for a configuration, or makes no model of it; the text says why."""


def class_model(config: Mapping[str, Any], shapes: Collection[tuple[int, ...]]) -> PreTrainedModel:
    """Build the model of `config` (config.json) on the meta device, whose files hold tensors of these `shapes`.

    Raises NoClassError where transformers has no class for it.
    """
    kind, configuration = _named(config)
    _check_counts(config, len(shapes))
    fields = {key: value for key, value in config.items() if key not in _OTHER_FIELDS}
    with foreign(lambda error: NoClassError(f"{kind.__name__} cannot be made of it: {error_text(error)}")):
        made = configuration.from_dict(configuration._decode_special_floats(fields))  # `{"__float__": "Infinity"}`
        made._attn_implementation = needed_attention(made)
        with quiet_transformers(), _without_values():
            model: PreTrainedModel = kind._from_config(made, dtype=torch.bfloat16)
    model.eval()
    return model


def _named(config: Mapping[str, Any]) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """The class of the model and that of its configuration."""
    model_type = str(config.get("model_type"))
    architecture = next(iter(config.get("architectures") or []), None)
    names = [architecture] if architecture is not None else _mapped(model_type)
    kinds = [kind for name in names if (kind := _model_class(name)) is not None]
    if not kinds:
        raise NoClassError(
            f"transformers {transformers.__version__} has no class {architecture or f'for {model_type}'}"
        )
    for kind in kinds:
        known = model_type in CONFIG_MAPPING  # which loads lazily: its `get` finds nothing
        configuration = CONFIG_MAPPING[model_type] if known else kind.config_class
        if configuration is not None and _takes(kind, configuration):
            return kind, configuration
    raise NoClassError(f"{kinds[0].__name__} is no class for the model_type {model_type}")


def _takes(kind: type[PreTrainedModel], configuration: type[PreTrainedConfig]) -> bool:
    """Tell whether a class of models takes a class of configurations: its own; or, where it names none, one that is
    defined beside it.
    """
    wanted = kind.config_class
    if wanted is None or wanted is PreTrainedConfig:
        return kind.__module__.rpartition(".")[0] == configuration.__module__.rpartition(".")[0]
    return issubclass(configuration, wanted)


def _mapped(model_type: str) -> list[str]:
    """The names of the classes that transformers has for `model_type`, the one that generates text first."""
    names: list[str] = []
    for mapping in _MAPPINGS:
        mapped = mapping.get(model_type, ())
        names += [mapped] if isinstance(mapped, str) else list(mapped)
    return names


def _model_class(name: str) -> type[PreTrainedModel] | None:
    kind = getattr(transformers, name, None)
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        return kind
    return None


def _check_counts(config: Mapping[str, Any], tensors: int) -> None:
    """Raise NoClassError where modules would be built without end: more layers than a file's `tensors`."""
    for place, value in walk(dict(config)):
        key = place.rpartition("\0")[2]
        if type(value) is not int:
            continue
        too_many_layers = _LAYERS.search(key) and "size" not in key and value > max(tensors, 1 << 10)
        if too_many_layers or (_MODULES.search(key) and value > EXPERTS and "position" not in key):
            raise NoClassError(f"{key} is {value:,}, and the weights hold {tensors:,} tensors")


@contextmanager
def _without_values() -> Iterator[None]:
    """Make tensors on the meta device in this block, and draw no values."""
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        for name in _INITIALIZATION:
            if (context := getattr(initialization, name, None)) is not None:
                stack.enter_context(context())
        yield
