"""The form of compressed-tensors (llm-compressor, fp8q), in config.json with `quant_method` compressed-tensors.

Sources: compressed-tensors 0.20 (`quantization/quant_args.py`, `quant_scheme.py`: FP8_DYNAMIC and FP8_BLOCK,
`utils/match.py`), vLLM (`layers/quantization/compressed_tensors.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calibrate.input.patterns import BoundedPattern, PatternFile
from ...core.errors import InputError
from ...options import AT_RUN_TIME, BF16, BLOCK, DYNAMIC, ONE, Form
from ..scales.scheme import BLOCK_SIDES, Granularity, Scheme, modules_in
from .quantization_config import (
    CacheUnit,
    Codec,
    DeclaredQuantization,
    Matcher,
    SchemeGroup,
    block_sides,
    listed_names,
    refused,
)
from .quantization_fields import ARGUMENTS, FieldList, FieldRemark, asymmetric, unless

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

#: Where transforms are computed while the model runs; at other places they are in the weights already.
OFFLINE = ("weight_input", "weight_output")
#: The parts of a weight that share a scale, as they are written.
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "channel", "block")
#: compressed-tensors' presets that are FP8.
PRESETS: Mapping[str, Scheme] = {
    "FP8": Scheme("tensor"),
    "FP8_DYNAMIC": Scheme("channel", DYNAMIC),
    "FP8_BLOCK": Scheme("block", BLOCK),
}
#: The GEMMs of experts, as a pattern of compressed-tensors.
EXPERTS = r"re:.*\.experts\.\d+\..*"
#: The end of the name by which vLLM asks whether the experts of a layer are quantized.
_ASKED_OF_EXPERTS = ".experts.0.down_proj"
#: The forms that the class Linear is declared with: the first of them that a module has.
_OF_THE_CLASS = (ONE, *AT_RUN_TIME, BF16)
#: Kind of a form with scales of run time -> the part of an input with one scale, as compressed-tensors names it.
STRATEGIES: dict[str, str] = {
    "dynamic": "token",
    "block": "group",
}


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


_FIELDS = FieldList(
    (
        "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status", "version",
        "global_compression_ratio", "run_compressed", "dequantize", "use_optimized_inference",
        "packed_modules_mapping", "total_num_heads", "total_num_kv_heads",
    ),
    {
        "transform_config": ("changes", _transforms),
        "sparsity_config": ("changes", _sparse),
        "moe_sparsity_config": ("changes", unless(None, what="experts that were taken out, by layer:")),
        "linear_fp8_config": ("changes", unless(None, what="another form of all linear layers:")),
    },
)  # fmt: skip
_GROUP_FIELDS = FieldList(
    ("targets", "weights", "input_activations", "format"),
    {"output_activations": ("inputs", unless(None, what="outputs that are rounded by"))},
)
_INPUT_FIELDS = FieldList(ARGUMENTS, {"symmetric": ("inputs", asymmetric)})
#: The fields of a part of a group.
_PART_FIELDS = {
    "weights": FieldList(
        ARGUMENTS,
        {
            "actorder": ("changes", _ordered),
            "symmetric": ("changes", asymmetric),
            "dynamic": ("changes", unless(None, False, what="weights that are rounded anew:")),
        },
    ),
    "input_activations": _INPUT_FIELDS,
    "output_activations": FieldList(ARGUMENTS),
}


def _remarks(said: Mapping[str, Any]) -> Iterator[FieldRemark]:
    yield from _FIELDS.remarks(said)
    groups = said.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        yield from _GROUP_FIELDS.remarks(group, f"config_groups.{name}.")
        for part, fields in _PART_FIELDS.items():
            inner = group.get(part) if isinstance(group, dict) else None
            yield from fields.remarks(inner, f"config_groups.{name}.{part}.")
    yield from _INPUT_FIELDS.remarks(said.get("kv_cache_scheme"), "kv_cache_scheme.")


def _matcher(text: str, source: PatternFile) -> Matcher:
    """Read a name, a regular expression after `re:`, or a class, which matches every module, since a checkpoint does
    not tell classes.
    """
    expression = text.removeprefix("re:")
    if expression != text:
        return Matcher(text, BoundedPattern(expression, source).matches, 1)
    if text.isidentifier() and text[:1].isupper():
        return Matcher(text, lambda _: True, 2, is_class=True)
    return Matcher(text, text.__eq__)


def _declared(source: Path, said: dict[str, Any]) -> DeclaredQuantization:
    written = str(said.get("format") or "")
    if written not in ("float-quantized", "naive-quantized", "mixed-precision"):
        raise refused(source, f"quant_method is 'compressed-tensors' with the format {written!r}", written)
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise InputError(source, "has no config_groups", "copy or download it again")
    schemes = tuple(_group(source, name, group) for name, group in groups.items())
    ignore = listed_names(said.get("ignore") or [], source, "ignore")
    cache = said.get("kv_cache_scheme")
    if isinstance(cache, dict) and cache and _kind(cache) != "FP8":
        raise refused(source, f"the cache is {_kind(cache)}", _kind(cache))
    scheme = cache if isinstance(cache, dict) and not cache.get("dynamic", False) else None
    heads = scheme is not None and str(scheme.get("strategy", "")).lower() == "attn_head"
    return DeclaredQuantization(source, COMPRESSED_TENSORS, said, schemes, ignore, scheme is not None, heads)


def _group(source: Path, name: str, group: Any) -> SchemeGroup:
    if isinstance(group, list):
        if name.upper() not in PRESETS:
            raise refused(source, f"config_groups has the preset {name!r}", name)
        return SchemeGroup(listed_names(group, source, name), PRESETS[name.upper()])
    if not isinstance(group, dict):
        raise InputError(source, f"config_groups.{name} is no object", "copy or download it again")
    said = group.get("weights")
    activations = group.get("input_activations")
    if not isinstance(said, dict) or (str(said.get("type", "int")).lower(), said.get("num_bits", 8)) != ("float", 8):
        raise refused(source, f"the weights of config_groups.{name} are {_kind(said)}", _kind(said))
    size = said.get("group_size")
    strategy = str(said.get("strategy") or ("tensor" if not size else "channel" if size == -1 else "group")).lower()
    granularity: Granularity | None = next((kind for kind in GRANULARITIES if kind == strategy), None)
    if granularity is None:
        raise refused(source, f"the weights of config_groups.{name} are FP8 by {strategy}", "mxfp8")
    form = BF16
    if isinstance(activations, dict):
        form = ONE
        if activations.get("dynamic", False):
            form = BLOCK if granularity == "block" else DYNAMIC
    scheme = Scheme(granularity, form)
    if granularity == "block":
        sides = block_sides(said.get("block_structure"), source, "block_structure")
        scheme = replace(scheme, block=sides or BLOCK_SIDES)
    return SchemeGroup(listed_names(group.get("targets"), source, f"config_groups.{name}.targets"), scheme)


def _kind(said: Any) -> str:
    """Name the number format, such as INT4 or NVFP4, that a group declares for its weights."""
    if not isinstance(said, dict):
        return "not quantized"
    bits = said.get("num_bits", 8)
    kind = str(said.get("type", "int")).lower()
    if kind == "float" and bits == 4:
        if said.get("group_size") == 16:
            return "NVFP4"
        return "MXFP4"
    return f"{'FP' if kind == 'float' else 'INT'}{bits}"


def _written(scheme: Scheme, unquantized: Sequence[str]) -> dict[str, object]:
    """Declare the class Linear in `scheme`, with inputs scaled where they are served."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    if scheme.weights == "block":
        weights: dict[str, object] = {"strategy": "block", "block_structure": [*BLOCK_SIDES], "dynamic": False}
        inputs: dict[str, object] = {"strategy": "group", "group_size": BLOCK_SIDES[1], "dynamic": True}
    else:
        weights = {"strategy": "channel", "dynamic": False}
        inputs = {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": number | weights, "input_activations": number | inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _ignored(unquantized),
    }


def _ignored(modules: Sequence[str]) -> list[str]:
    """Name `modules` that stay in BF16, those that vLLM asks for twice: its class of gpt_oss renames what ends like a
    tensor of all experts, but no expression.
    """
    return [*modules, *(f"re:{re.escape(name)}$" for name in modules if name.endswith(_ASKED_OF_EXPERTS))]


def quantization_config(
    ignore: Sequence[str], cache: CacheUnit | None, schemes: Mapping[str, Scheme], experts: bool
) -> dict[str, object]:
    """Make the `quantization_config` of config.json by compressed-tensors' own schema.

    `ignore`: the modules that stay in BF16; `cache`: whose values share a scale of the cache, None where it has none;
    `schemes`: the name in the files of each quantized module -> its scheme; `experts`: whether the model has any.

    The class Linear has the first of `_OF_THE_CLASS` that a module has; modules in other forms are named one by one,
    since loaders take the scheme of a name before that of a class. Experts are declared with a scale for each token:
    loaders have no static one where weights have channel scales.
    """
    from compressed_tensors.quantization import QuantizationScheme

    forms = {module: scheme.input for module, scheme in schemes.items()}
    declared = {ONE if form.static else form for form in forms.values()}  # loaders take two codes, or a tail, for one
    of_the_class = next((form for form in _OF_THE_CLASS if form in declared), BF16)
    by_tensor = any(scheme.weights == "tensor" for scheme in schemes.values())
    strategy = "tensor" if by_tensor else "channel"
    groups: dict[str, QuantizationScheme] = {}

    def add(name: str, targets: Sequence[str], form: Form, strategy: str) -> None:
        if targets:
            weights = _arguments("block" if form == BLOCK else strategy)
            groups[name] = QuantizationScheme(targets=[*targets], weights=weights, input_activations=_inputs(form))

    def named(form: Form) -> list[str]:
        if form == of_the_class:
            return []
        return sorted(modules_in(forms, form))

    def split(modules: Sequence[str]) -> tuple[list[str], list[str]]:
        of_experts = [name for name in modules if re.fullmatch(EXPERTS.removeprefix("re:"), name)]
        return [name for name in modules if name not in of_experts], of_experts

    add("group_0", ["Linear"], of_the_class, strategy)
    dense_alone, experts_alone = split(named(BF16))
    add("weights_alone", dense_alone if by_tensor else named(BF16), BF16, strategy)
    if by_tensor:
        add("experts_alone", experts_alone, BF16, "channel")
    for form in AT_RUN_TIME:
        dense, _ = split(named(form))
        add(str(form), dense if by_tensor and form != BLOCK else named(form), form, strategy)
    if experts and of_the_class != BLOCK and (of_the_class != BF16 or by_tensor):
        add("group_1", [EXPERTS], BF16 if of_the_class == BF16 else DYNAMIC, "channel")
    return _of_groups(groups, ignore, cache)


def config_by_names(schemes: Mapping[str, Scheme], cache: bool) -> dict[str, object]:
    """Make a `quantization_config` that declares each module of `schemes` by its name, and no class; `cache`: keys and
    values have a scale each.
    """
    from compressed_tensors.quantization import QuantizationScheme

    groups: dict[str, QuantizationScheme] = {}
    for scheme in dict.fromkeys(schemes.values()):
        assert scheme.weights is not None, "these modules have codes"
        groups[f"group_{len(groups)}"] = QuantizationScheme(
            targets=[module for module, other in schemes.items() if other == scheme],
            weights=_arguments(scheme.weights),
            input_activations=_inputs(scheme.input),
        )
    return _of_groups(groups, [], "tensor" if cache else None)


def _of_groups(
    groups: "Mapping[str, QuantizationScheme]", ignore: Sequence[str], cache: CacheUnit | None
) -> dict[str, object]:
    """Make the `quantization_config` of modules in these `groups`."""
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(
        config_groups=dict(groups),
        format="float-quantized",
        quantization_status="compressed",
        ignore=_ignored(ignore),
        kv_cache_scheme=_arguments(cache) if cache else None,
    )
    return dict(config.model_dump(mode="json", exclude_none=True))


def _inputs(form: Form) -> "QuantizationArgs | None":
    """Declare an input in `form`; None for one in BF16."""
    if form == BF16:
        return None
    if form.static:
        return _arguments("tensor")
    return _arguments(STRATEGIES[form.kind], dynamic=True)


def _arguments(strategy: str, dynamic: bool = False) -> "QuantizationArgs":
    """Declare E4M3 codes with a scale for each part of a tensor that `strategy` names."""
    from compressed_tensors.quantization import QuantizationArgs

    sizes: dict[str, dict[str, Any]] = {
        "block": {"block_structure": [*BLOCK_SIDES]},
        "group": {"group_size": BLOCK_SIDES[1]},
    }
    size = sizes.get(strategy, {})
    return QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=dynamic, **size)


COMPRESSED_TENSORS = Codec(
    "compressed-tensors",
    ("weight_scale",),
    ("input_scale",),
    _matcher,
    _remarks,
    _declared,
    _written,
    quantization_config,
)
