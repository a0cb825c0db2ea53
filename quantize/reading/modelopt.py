"""ModelOpt's form: hf_quant_config.json, which newer versions repeat in config.json with `quant_method` modelopt; vLLM
reads that, and transformers 5.23 does not know it.

Sources: ModelOpt 0.47 (`export/quant_utils.py`, `convert_hf_config.py`), vLLM (`layers/quantization/modelopt.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ..scales.scheme import Granularity
from .quantization_config import (
    Codec,
    DeclaredQuantization,
    DeclaredScheme,
    Inputs,
    SchemeGroup,
    listed_names,
    refused,
    usual_scheme,
)
from .quantization_fields import field_remarks

#: ModelOpt's algorithms, in capitals.
ALGORITHMS: Mapping[str, tuple[Granularity, Inputs]] = {
    "FP8": ("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "dynamic"),
    "FP8_PB_WO": ("block", "none"),
}


def _declared(source: Path, said: Any) -> DeclaredQuantization:
    if not isinstance(said, dict):
        raise InputError(source, "has no object quantization", "copy or download it again")
    ignore = said.get("exclude_modules", said.get("ignore")) or []
    groups: list[SchemeGroup] = []
    algorithm = str(said.get("quant_algo") or "")
    layers = said.get("quantized_layers")
    if algorithm.upper() == "MIXED_PRECISION" and isinstance(layers, dict):
        for module, layer in layers.items():
            layer_algorithm = str(layer.get("quant_algo") if isinstance(layer, dict) else "")
            groups.append(SchemeGroup((module,), _scheme_of(source, layer_algorithm)))
    else:
        groups.append(SchemeGroup(("*",), _scheme_of(source, algorithm)))
    cache = said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
    if cache and not (isinstance(cache, dict) or str(cache).upper() == "FP8"):
        raise refused(source, f"the cache is {cache}", str(cache))
    names = listed_names(ignore, source, "exclude_modules")
    remarks = field_remarks("modelopt", said)
    return DeclaredQuantization(source, "modelopt", tuple(groups), names, bool(cache), remarks=remarks)


def _scheme_of(source: Path, algorithm: str) -> DeclaredScheme:
    if algorithm.upper() not in ALGORITHMS:
        of = "awq" if algorithm.upper().startswith("W4A16") and "NVFP4" not in algorithm.upper() else algorithm
        raise refused(source, f"quant_method is 'modelopt' with quant_algo {algorithm or None!r}", of)
    return usual_scheme(*ALGORITHMS[algorithm.upper()])


MODELOPT = Codec("modelopt", ("weight_scale",), ("input_scale",), _declared)
