"""ModelOpt's form: hf_quant_config.json, which newer versions repeat in config.json with `quant_method` modelopt.

vLLM reads config.json, TensorRT-LLM and TensorRT Edge-LLM the other file where it is there, and transformers 5.23
neither. All modules that are quantized have one scheme: a static scale for each weight and each input, or one for each
output channel and, where it is served, each token. The scales of a cache lie beside its projections.

Sources: ModelOpt 0.47 (`export/quant_utils.py`, `convert_hf_config.py`), vLLM (`layers/quantization/modelopt.py`),
TensorRT-LLM (`quantization/modelopt_config.py`), TensorRT Edge-LLM 0.11 (`config.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from ...calibrate.input.patterns import PatternFile
from ...core.errors import InputError
from ...options import BF16, DYNAMIC, ONE
from ..scales.scheme import Scheme
from .quantization_config import (
    MODELOPT_CONFIG,
    CacheUnit,
    Codec,
    DeclaredQuantization,
    Matcher,
    SchemeGroup,
    listed_names,
    refused,
)
from .quantization_fields import Effect, FieldList, FieldRemark, unless

#: ModelOpt's algorithms, in capitals.
ALGORITHMS: Mapping[str, Scheme] = {
    "FP8": Scheme("tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("channel", DYNAMIC),
    "FP8_PB_WO": Scheme("block", BF16),
}
#: The algorithms that are written: blocks have inputs that stay in BF16, which no form of ours is.
WRITTEN = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
#: Who is said to have written it: by this name vLLM knows hf_quant_config.json, and refuses others.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
_NUMBER = {"dynamic": False, "num_bits": 8, "type": "float"}
#: E4M3's bits and type, the second as ModelOpt's own configurations have it.
_E4M3 = ((8, "float"), ([4, 3], "float"))
#: The fields that change the values of a model or of a layer.
_MEANT: Mapping[str, tuple[Effect, Callable[[Any], str | None]]] = {
    "pre_quant_scale": ("changes", unless(False, None, what="inputs that are scaled first:")),
    "has_zero_point": ("changes", unless(False, None, what="values beside a zero point:")),
    "lora_rank": ("changes", unless(0, None, what="a GEMM beside each, of rank")),
}
_FIELDS = FieldList(
    (
        "quant_method", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "exclude_modules", "ignore",
        "quantized_layers", "config_groups", "producer", "group_size", "quantization",
    ),
    _MEANT,
)  # fmt: skip
_LAYER_FIELDS = FieldList(("quant_algo", "group_size", "awq_block_size"), _MEANT)


def _remarks(said: Mapping[str, Any]) -> Iterator[FieldRemark]:
    yield from _FIELDS.remarks(said)
    layers = said.get("quantized_layers")
    for name, layer in layers.items() if isinstance(layers, dict) else ():
        yield from _LAYER_FIELDS.remarks(layer, f"quantized_layers.{name}.")


def _matcher(text: str, _: PatternFile) -> Matcher:
    """Read a file name pattern."""
    return Matcher(text, partial(fnmatchcase, pat=text), 2 if text == "*" else 0)


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
    return DeclaredQuantization(source, MODELOPT, said, tuple(groups), names, bool(cache))


def other_number(said: Mapping[str, Any]) -> str | None:
    """State where the fields `said` of a configuration name another number in `config_groups` than `quant_algo`; None
    where they do not. ModelOpt writes both.
    """
    groups = said.get("config_groups")
    if str(said.get("quant_algo")).upper() not in ALGORITHMS or not isinstance(groups, dict):
        return None
    for name, group in groups.items():
        for part in ("weights", "input_activations"):
            number = group.get(part) if isinstance(group, dict) else None
            if isinstance(number, dict) and (number.get("num_bits", 8), number.get("type", "float")) not in _E4M3:
                fault = f"{part} of {number.get('num_bits')} bits, type {number.get('type')}"
                return f"{fault} in config_groups.{name}, and quant_algo {said['quant_algo']}"
    return None


def _scheme_of(source: Path, algorithm: str) -> Scheme:
    if algorithm.upper() not in ALGORITHMS:
        of = "awq" if algorithm.upper().startswith("W4A16") and "NVFP4" not in algorithm.upper() else algorithm
        raise refused(source, f"quant_method is 'modelopt' with quant_algo {algorithm or None!r}", of)
    return ALGORITHMS[algorithm.upper()]


def _written(scheme: Scheme, unquantized: Sequence[str], cache: CacheUnit | None = None) -> dict[str, object]:
    """Declare every linear layer in `scheme` as ModelOpt writes it into config.json."""
    said: dict[str, object] = {}
    if scheme.input == ONE:
        said["config_groups"] = {"group_0": {"input_activations": _NUMBER, "weights": _NUMBER, "targets": ["Linear"]}}
    said["ignore"] = [*unquantized]
    said["quant_algo"] = next(name for name in WRITTEN if ALGORITHMS[name] == scheme)
    if cache:
        said["kv_cache_scheme"] = _NUMBER
    return said | {"producer": PRODUCER, "quant_method": "modelopt"}


def _of_run(
    ignore: Sequence[str], cache: CacheUnit | None, schemes: Mapping[str, Scheme], _: bool
) -> dict[str, object]:
    """Declare a run, whose modules all have one scheme."""
    (scheme,) = set(schemes.values()) or {ALGORITHMS["FP8"]}
    return _written(scheme, ignore, cache)


def _beside(said: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """Make hf_quant_config.json of `said`, the fields of config.json."""
    quantization = {
        "quant_algo": said["quant_algo"],
        "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in said else None,
        "exclude_modules": said["ignore"],
    }
    return {MODELOPT_CONFIG: {"producer": PRODUCER, "quantization": quantization}}


MODELOPT = Codec(
    "modelopt",
    ("weight_scale",),
    ("input_scale",),
    _matcher,
    _remarks,
    _declared,
    _written,
    _of_run,
    _beside,
    end=(),
    cache_scale="{attention}.{part}_proj.{part}_scale",
    below="{}*".format,
)
