"""Which models can be calibrated, told from config.json and the model's modules, before any work.

fp8q does text-only, decoder-only transformers, dense ones and mixtures of experts of one form (`experts`). Whatever
else transformers can load under `AutoModelForCausalLM` is refused by name: an encoder would run without its mask, a
recurrent state is no KV cache.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ..given import exists, foreign, one_line, read_json
from .coded import QUANTIZATION_KEYS
from .fields import POSITIONS, check_fields

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

_OTHER_SENSES = re.compile(r"(vision|audio|speech|image|video)\w*_config")


def read_config(path: Path, name: str) -> dict[str, Any]:
    """config.json of the checkpoint in the directory `path`, which the user calls `name`, as it is written.

    Raises InputError when there is none, it does not parse, it names no model type, or a value in it is of the wrong
    kind.
    """
    file = path / "config.json"
    if not exists(file):
        raise InputError(
            f"{name}: is no checkpoint: there is no config.json; give the directory that save_pretrained wrote"
        )
    config = read_json(file)
    if not isinstance(config, dict) or not (isinstance(config.get("model_type"), str) or config.get("auto_map")):
        raise InputError(
            f"{file}: names no model_type, so it is no transformers configuration; give the directory that "
            "save_pretrained wrote"
        )
    check_fields(file, config)
    return config


def load_config(path: Path, name: str, raw: Mapping[str, Any]) -> tuple["PreTrainedConfig", str]:
    """The configuration and the architecture (class name) of the checkpoint in `path`, whose config.json is `raw`.

    Raises InputError when the model's class is not in transformers, and when it is no text-only
    causal language model. Code that came with the checkpoint is never run here: the stages after calibration build the
    model of what is in the run, which holds none.
    """
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, code = raw.get("model_type"), raw.get("auto_map") or {}
    architecture = next((name for name in raw.get("architectures") or [] if isinstance(name, str)), None)
    if code and (model_type not in CONFIG_MAPPING or (architecture and not hasattr(transformers, architecture))):
        raise InputError(
            f"{name}: wants code of its own ({architecture or model_type}, not in transformers "
            f"{transformers.__version__}), which fp8q runs for tokenizers only; give a model whose class transformers "
            "has"
        )
    if not code and model_type not in CONFIG_MAPPING:
        raise InputError(
            f"{name}: model_type {model_type} is unknown to transformers {transformers.__version__}; a newer "
            "transformers may know it"
        )

    def refusal(error: BaseException) -> InputError:
        return InputError(
            f"{path / 'config.json'}: does not make a {model_type} configuration: {one_line(error)}; copy or download "
            "it again"
        )

    with foreign(refusal):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    for key in QUANTIZATION_KEYS:  # transformers is handed numbers
        vars(config).pop(key, None)
    config._attn_implementation = None  # what it was trained with may not be installed: transformers' default, SDPA, is
    with foreign(refusal):
        return config, _causal_class(config, name, architecture)


def _causal_class(config: "PreTrainedConfig", name: str, architecture: str | None) -> str:
    """Name of transformers' class for `config`.

    Raises InputError when that is no text-only, decoder-only transformer.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    named = architecture or mapped or config.model_type
    other = next((key for key in config.sub_configs if _OTHER_SENSES.fullmatch(key)), None)
    if other or config.get_text_config() is not config:
        raise InputError(
            f"{name}: {named} is not a text-only model (its configuration has {other or 'a nested text_config'}), and "
            "fp8q does no other; give the language model saved on its own"
        )
    encoder = config.is_encoder_decoder or (
        config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is False
    )
    causal = named == mapped or named.endswith(("ForCausalLM", "LMHeadModel"))
    if mapped is None or encoder or not causal:
        raise InputError(
            f"{name}: {named} is not a causal language model, and fp8q does no other; give a decoder-only one"
        )
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False):
        raise InputError(
            f"{name}: {named} keeps a recurrent state (a state-space or linear-attention model), which fp8q does not "
            "do for now; give a transformer"
        )
    return named


def refuse_experts(model: "nn.Module", name: str, architecture: str) -> None:
    """Raise InputError when `model` (the meta device will do) is a mixture of experts in a form that could not be taken
    apart.
    """
    from .experts import Experts

    taken: tuple[str, ...] = ()
    for module_name, module in model.named_modules():
        if isinstance(module, Experts):
            taken += (f"{module_name}.",)
        elif not module_name.startswith(taken) and _holds_experts(module_name.rpartition(".")[2], module):
            raise InputError(
                f"{name}: {architecture} is a mixture of experts ({module_name}, {type(module).__name__}) in a form "
                "that fp8q does not do for now: its weights are not gate_up_proj and down_proj alone, or it computes "
                "something else with them; give a model of another architecture"
            )


def _holds_experts(name: str, module: "nn.Module") -> bool:
    """Whether a module says that it is several experts. Shared ones are a feed-forward block like others."""
    if name.startswith("shared_expert") and not any(each.dim() > 2 for each in module.parameters()):
        return False
    return "expert" in name.lower() or "expert" in type(module).__name__.lower()


def max_positions(config: Mapping[str, Any]) -> int | None:
    """How many positions the model of that config.json can tell apart; None where nothing limits them (ALiBi) or the
    configuration does not say.

    A sliding window is no limit: it bounds what a position sees, not how many there are.
    """
    found = (config.get(key) for key in POSITIONS)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
