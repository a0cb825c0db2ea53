"""The texts of config.json and the index of a converted checkpoint, in the words of its layout (`reading.codecs`).

Loaders make an FP8 module of every linear layer that is not named there, so each kept module is named in full.
"""

from collections.abc import Mapping
from typing import Any

from ...calibrate.checkpoint.mtp_layers import vllm_name
from ...calibrate.checkpoint.weights import SINGLE, index_text
from ...core.files import json_text
from ..reading.codecs import CODECS
from .plan import CheckpointPlan

#: The output head, which is a module of its own where its tensor is the embedding's.
HEAD = "lm_head"
#: Fields of config.json that describe other files than are written.
_OTHER_FILES = ("transformers_weights",)


def unquantized_modules(plan: CheckpointPlan, config: Mapping[str, Any]) -> list[str]:
    """The modules that loaders must not take for FP8, sorted: those that the plan declares, and what vLLM calls by
    another name. `config`: config.json of the source.
    """
    return sorted({HEAD, *plan.declared, *(vllm_name(config, module) for module in plan.declared)})


def quantization_fields(plan: CheckpointPlan, config: Mapping[str, Any]) -> dict[str, object]:
    """The field `quantization_config` of config.json, which is `config` in the source."""
    if plan.quantization is not None:
        return dict(plan.quantization)
    written = CODECS[plan.layout].written
    assert written is not None, "the layouts of the option are written"
    return written(plan.scheme, unquantized_modules(plan, config))


def converted_config(plan: CheckpointPlan, config: Mapping[str, Any]) -> bytes:
    """The text of config.json: that of the source, `config`, with the quantization."""
    fields = {key: value for key, value in config.items() if key not in _OTHER_FILES}
    if plan.cast is not None:
        fields = {key: value for key, value in fields.items() if key != "torch_dtype"} | {"dtype": "bfloat16"}
    return json_text({**fields, "quantization_config": quantization_fields(plan, config)})


def beside_config(plan: CheckpointPlan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The texts of the files of the layout that say beside config.json, `config` in the source, what it says of codes,
    by name.
    """
    files = CODECS[plan.layout].beside(quantization_fields(plan, config))
    return {name: json_text(content) for name, content in files.items()}


def index_of(plan: CheckpointPlan) -> bytes | None:
    """The text of the index; None for one file under the name that loaders look for without an index."""
    if [shard.name for shard in plan.shards] == [SINGLE]:
        return None
    files = {name: shard.name for shard in plan.shards for name in shard.tensors}
    return index_text(files, plan.nbytes)
