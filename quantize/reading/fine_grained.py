"""transformers' own fine-grained FP8 (DeepSeek-V3, Qwen3-FP8), in config.json with `quant_method` fp8.

Where it has one scale for a tensor, vLLM reads `weight_scale` and `input_scale` too, as AutoFP8 writes them.

Sources: transformers 5.23 (`FineGrainedFP8Config`, `quantizers_utils.should_convert_module`), vLLM 0.32
(`layers/quantization/fp8.py`: `is_layer_skipped` takes whole names).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...calibrate.input.patterns import BoundedPattern, PatternFile
from ...options import BLOCK, DYNAMIC, ONE
from ..scales.scheme import BLOCK_SIDES, Scheme
from .quantization_config import (
    Codec,
    DeclaredQuantization,
    Matcher,
    SchemeGroup,
    block_sides,
    listed_names,
    refused,
)
from .quantization_fields import FieldList, unless

_FIELDS = FieldList(
    (
        "quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "modules_to_convert", "kv_cache_scheme", "kv_cache_quant_algo", "scale_fmt", "dequantize",
        "packed_modules_mapping",
    ),
    {
        "fmt": ("changes", unless("e4m3", None, what="codes of")),
        "expert_dtype": ("changes", unless("fp8", None, what="experts in")),
        "store_dtype": ("changes", unless("fp8", None, what="experts in")),
        "moe_quant_algo": ("changes", unless("FP8", None, what="experts in")),
    },
)  # fmt: skip


def _matcher(text: str, source: PatternFile) -> Matcher:
    """Read a regular expression, matched from the first letter on, which is the end of a name too
    (`should_convert_module`).
    """
    pattern = BoundedPattern(text, source)
    return Matcher(text, lambda module: pattern.matches(module) or module.endswith(text), 1)


def _declared(source: Path, said: dict[str, Any]) -> DeclaredQuantization:
    block = block_sides(said.get("weight_block_size", list(BLOCK_SIDES)), source, "weight_block_size")
    activation = str(said.get("activation_scheme", "dynamic")).lower()
    if activation not in ("static", "dynamic"):
        raise refused(source, f"activation_scheme is {activation!r}")
    ignore = said.get("modules_to_not_convert") or said.get("ignored_layers")
    names = None if ignore is None else listed_names(ignore, source, "modules_to_not_convert")
    at_run_time = activation == "dynamic"
    if block:
        scheme = Scheme("block", BLOCK if at_run_time else ONE, block=block)
    else:
        scheme = Scheme("tensor", DYNAMIC if at_run_time else ONE)
    cache = bool(said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo"))
    groups = (SchemeGroup((".*",), scheme),)
    assumed = "weight_block_size" not in said
    return DeclaredQuantization(source, FINE_GRAINED, said, groups, names, cache, block_assumed=assumed)


def _written(_: Scheme, unquantized: Sequence[str]) -> dict[str, object]:
    """Declare weights in blocks; everything but `unquantized` is codes."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [*BLOCK_SIDES],
        "modules_to_not_convert": [*unquantized],
    }


FINE_GRAINED = Codec(
    "fp8",
    ("weight_scale_inv", "weight_scale", "scale"),
    ("activation_scale", "input_scale"),
    _matcher,
    _FIELDS.remarks,
    _declared,
    _written,
)
