"""Name the fields of a quantization configuration that fp8q does not read, and say which change what is computed.

A reader that passes over a field it does not know computes another model in silence: `transform_config` rotates the
inputs of a layer whose weights were rotated the other way. So each form has the list of its fields, from the classes
that read them: compressed-tensors 0.20 (`QuantizationConfig`, `QuantizationScheme`, `QuantizationArgs`), transformers
5.23 (`CompressedTensorsConfig`, `FineGrainedFP8Config`), ModelOpt 0.47 (`process_layer_quant_config`,
`convert_hf_quant_config_format`), vLLM 0.32 and SGLang 0.5.23 (their `from_config`).

`changes`: values of the model are others than code × scale, or pass through something else. `inputs`: how activations
are rounded, which a reader of weights leaves to whoever serves them. `unknown`: in no class that was read. A field that
is null, false or empty asks for nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Effect = Literal["changes", "inputs", "unknown"]
#: Where transforms are computed while the model runs; at other places they are in the weights already.
OFFLINE = ("weight_input", "weight_output")


@dataclass(frozen=True)
class FieldRemark:
    """A field at `place` in the configuration that is not read: what it does, and its effect."""

    place: str
    effect: Effect
    what: str

    def __str__(self) -> str:
        """Name the field and what it does."""
        return f"{self.place} ({self.what})"


#: Part of a form -> the fields that are read, or that change nothing: how scales were found, and sizes.
ARGUMENTS = (
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
KNOWN: Mapping[str, tuple[str, ...]] = {
    "compressed-tensors": (
        "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status", "version",
        "global_compression_ratio", "run_compressed", "dequantize", "use_optimized_inference",
        "packed_modules_mapping", "total_num_heads", "total_num_kv_heads",
    ),
    "group": ("targets", "weights", "input_activations", "format"),
    "weights": ARGUMENTS,
    "input_activations": ARGUMENTS,
    "output_activations": ARGUMENTS,
    "kv_cache_scheme": ARGUMENTS,
    "modelopt": (
        "quant_method", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "exclude_modules", "ignore",
        "quantized_layers", "config_groups", "producer", "group_size", "quantization",
    ),
    "layer": ("quant_algo", "group_size", "awq_block_size"),
    "fp8": (
        "quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "modules_to_convert", "kv_cache_scheme", "kv_cache_quant_algo", "scale_fmt", "dequantize",
        "packed_modules_mapping",
    ),
}  # fmt: skip


def online_transforms(said: Mapping[str, Any]) -> dict[str, list[str]]:
    """The places of `transform_config` that are computed while the model runs, by the name of the transform."""
    config = said.get("transform_config")
    schemes = config.get("config_groups") if isinstance(config, dict) else None
    if not isinstance(schemes, dict):
        if config:
            return {"transform_config": ["unreadable"]}
        return {}
    places: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        locations = [str(entry.get("location")) for entry in applied or [] if isinstance(entry, dict)]
        if online := [location for location in locations if location not in OFFLINE]:
            places[f"{name}: {scheme.get('type')}"] = online
    return places


def _transforms(value: Any) -> str | None:
    online = online_transforms({"transform_config": value})
    listed = "; ".join(f"{name} at {', '.join(dict.fromkeys(places))}" for name, places in online.items())
    if online:
        return f"transforms while the model runs: {listed}"
    return None


def _sparse(value: Any) -> str | None:
    form = value.get("format") if isinstance(value, dict) else value
    if form in (None, "dense"):
        return None
    return f"weights stored as {form}"


def _ordered(value: Any) -> str | None:
    if str(value).lower() in ("group", "dynamic", "true"):
        return "columns in another order"
    return None


def _asymmetric(value: Any) -> str | None:
    if value is False:
        return "values beside a zero point"
    return None


def _unless(*usual: Any, what: str) -> Callable[[Any], str | None]:
    """Say `what` of a value that is none of the `usual` ones."""
    return lambda value: None if value in usual else f"{what} {value}"


#: Part of a form -> field -> its effect, and what it does with a value; None where that value does nothing.
MEANT: Mapping[str, Mapping[str, tuple[Effect, Callable[[Any], str | None]]]] = {
    "compressed-tensors": {
        "transform_config": ("changes", _transforms),
        "sparsity_config": ("changes", _sparse),
        "moe_sparsity_config": ("changes", _unless(None, what="experts that were taken out, by layer:")),
        "linear_fp8_config": ("changes", _unless(None, what="another form of all linear layers:")),
    },
    "group": {"output_activations": ("inputs", _unless(None, what="outputs that are rounded by"))},
    "weights": {
        "actorder": ("changes", _ordered),
        "symmetric": ("changes", _asymmetric),
        "dynamic": ("changes", _unless(None, False, what="weights that are rounded anew:")),
    },
    "input_activations": {"symmetric": ("inputs", _asymmetric)},
    "kv_cache_scheme": {"symmetric": ("inputs", _asymmetric)},
    "modelopt": {
        "pre_quant_scale": ("changes", _unless(False, None, what="inputs that are scaled first:")),
        "has_zero_point": ("changes", _unless(False, None, what="values beside a zero point:")),
        "lora_rank": ("changes", _unless(0, None, what="a GEMM beside each, of rank")),
    },
    "fp8": {
        "fmt": ("changes", _unless("e4m3", None, what="codes of")),
        "expert_dtype": ("changes", _unless("fp8", None, what="experts in")),
        "store_dtype": ("changes", _unless("fp8", None, what="experts in")),
        "moe_quant_algo": ("changes", _unless("FP8", None, what="experts in")),
    },
}
MEANT_BY_LAYER = MEANT["modelopt"]


def field_remarks(form: str, said: Mapping[str, Any]) -> tuple[FieldRemark, ...]:
    """The fields of the quantization configuration `said`, of this form, that are not read."""
    return tuple(_remarks_of(form, said))


def _remarks_of(form: str, said: Mapping[str, Any]) -> Iterator[FieldRemark]:
    yield from _part(form, "", said)
    if form == "compressed-tensors":
        groups = said.get("config_groups")
        for name, group in groups.items() if isinstance(groups, dict) else ():
            yield from _part("group", f"config_groups.{name}.", group)
            for key in ("weights", "input_activations", "output_activations"):
                inner = group.get(key) if isinstance(group, dict) else None
                yield from _part(key, f"config_groups.{name}.{key}.", inner)
        yield from _part("kv_cache_scheme", "kv_cache_scheme.", said.get("kv_cache_scheme"))
    layers = said.get("quantized_layers") if form == "modelopt" else None
    for name, layer in layers.items() if isinstance(layers, dict) else ():
        yield from _part("layer", f"quantized_layers.{name}.", layer)


def _part(part: str, prefix: str, said: Any) -> Iterator[FieldRemark]:
    """Yield the fields of one object of a configuration that are not read."""
    meant = MEANT_BY_LAYER if part == "layer" else MEANT.get(part, {})
    for key, value in said.items() if isinstance(said, dict) else ():
        place = f"{prefix}{key}"
        if key in meant:
            effect, describe = meant[key]
            if (what := describe(value)) is not None:
                yield FieldRemark(place, effect, what if len(what) <= 160 else f"{what[:160]}…")
        elif key not in KNOWN[part] and value not in (None, False, "", 0) and value != [] and value != {}:
            yield FieldRemark(place, "unknown", "in no class that was read")
