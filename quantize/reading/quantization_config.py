"""Read the quantization configuration of an FP8 checkpoint: its form, and how each module is quantized.

Three forms are read. compressed-tensors (llm-compressor, fp8q) and transformers' own fine-grained FP8 (DeepSeek-V3,
Qwen3-FP8) write `quantization_config` in config.json. ModelOpt writes hf_quant_config.json; newer versions repeat it in
config.json with `quant_method` modelopt, which vLLM reads and transformers 5.23 does not know. Where the tensors differ
from the configuration, `fp8_tensors` goes by the tensors, and the lint (`quantize.lint`) reports the difference.

Sources: compressed-tensors 0.20 (`quantization/quant_args.py`, `quant_scheme.py`, `utils/match.py`), transformers 5.23
(`FineGrainedFP8Config`, `quantizers_utils.should_convert_module`), ModelOpt 0.47 (`export/quant_utils.py`,
`convert_hf_config.py`), vLLM (`layers/quantization/{compressed_tensors,fp8,modelopt}.py`).

Each form names modules in another way. compressed-tensors has names, regular expressions after `re:`, and classes of
modules. ModelOpt has file name patterns. transformers' fine-grained FP8 takes each entry both for a regular expression,
matched from the first letter on, and for the end of a name (`should_convert_module`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...calibrate.input.patterns import BoundedPattern, PatternFile
from ...calibrate.input.untrusted import exists, read_json
from ...core.errors import InputError
from ..scales.scheme import Granularity
from .quantization_fields import FieldRemark, field_remarks

FileForm = Literal["compressed-tensors", "modelopt", "fp8"]


class Matcher:
    """One entry of a list of modules, matched as the form's own loader does.

    `rank`: 0 for a name, 1 for a pattern, 2 for a class; of several entries that match, the lowest rank counts.
    """

    def __init__(self, text: str, form: FileForm, source: PatternFile):
        """Take the entry `text` of the file `source`.

        Raises InputError for an expression that does not compile, or that might take forever to match.
        """
        self.text, self.form = text, form
        expression = text.removeprefix("re:") if form == "compressed-tensors" else text
        is_expression = form == "fp8" or expression != text
        self.is_class = not is_expression and text.isidentifier() and text[:1].isupper()
        self.rank = 2 if self.is_class or text == "*" else 1 if is_expression else 0
        self.expression = BoundedPattern(expression, source) if is_expression else None

    def matches(self, module: str) -> bool:
        """Tell whether the entry matches `module`; a class matches all, since a checkpoint does not tell classes.

        Raises InputError where that may take forever.
        """
        if self.is_class:
            return True
        if self.form == "modelopt":
            return fnmatchcase(module, self.text)
        if self.expression is None:
            return module == self.text
        return self.expression.matches(module) or (self.form == "fp8" and module.endswith(self.text))


CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
#: The parts of a weight that share a scale, as they are written.
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "channel", "block")
#: Inputs have one scale in the checkpoint, a scale that is computed at run time, or are not quantized.
Inputs = Literal["static", "dynamic", "none"]
#: The forms that are read, for error messages.
READ = (
    "compressed-tensors (float-quantized), modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO) and fp8 (blocks or "
    "one scale a tensor)"
)
ORIGINAL = "give the checkpoint it was made from, in BF16"
#: The format of fp8q's checkpoints that no other loader has a form for; they name no `quant_method`.
FP8Q_FORM = "fp8q"
#: Formats other than FP8: a part of the method or format, the name, and the remedy. The first that matches counts.
OTHERS = (
    (FP8Q_FORM, "fp8q's own form, of Conv1D or INT8", ORIGINAL),
    (
        "mxfp4",
        "MXFP4",
        "load it with transformers' Mxfp4Config(dequantize=True), save it with save_pretrained and give that",
    ),
    ("nvfp4", "NVFP4", ORIGINAL),
    ("mxfp6", "MXFP6", ORIGINAL),
    ("mxfp8", "MXFP8", ORIGINAL),
    ("gptq", "INT4 or INT8", ORIGINAL),
    ("awq", "INT4", ORIGINAL),
    ("bitsandbytes", "INT8, INT4 or NF4", ORIGINAL),
    ("pack-quantized", "INT4 or INT8", ORIGINAL),
    ("int-quantized", "INT8", ORIGINAL),
)
#: The block of transformers and vLLM where a configuration of fine-grained FP8 names none; ModelOpt never names one.
BLOCK = (128, 128)
#: compressed-tensors' presets that are FP8.
PRESETS: Mapping[str, tuple[Granularity, Inputs]] = {
    "FP8": ("tensor", "static"),
    "FP8_DYNAMIC": ("channel", "dynamic"),
    "FP8_BLOCK": ("block", "dynamic"),
}
#: ModelOpt's algorithms, in capitals.
MODELOPT: Mapping[str, tuple[Granularity, Inputs]] = {
    "FP8": ("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel", "dynamic"),
    "FP8_PB_WO": ("block", "none"),
}


@dataclass(frozen=True)
class DeclaredScheme:
    """The quantization of a module; `block`: rows and columns of the weight that share a scale, where it has blocks."""

    weights: Granularity
    inputs: Inputs
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class SchemeGroup:
    """The modules that `targets` match, under one scheme."""

    targets: tuple[str, ...]
    scheme: DeclaredScheme


@dataclass(frozen=True)
class DeclaredQuantization:
    """The quantization configuration in the file `source`: its form, the schemes of modules, the modules that stay in
    BF16 (`ignore`), whether the `cache` has scales, and whether these are of its heads (`cache_heads`).

    `ignore` None: the configuration does not say, and each loader applies a default of its own. `remarks`: the fields
    that are not read. `block_assumed`: the form fp8 names no block, which transformers takes for one of 128 × 128, and
    vLLM and SGLang for one scale a tensor, as AutoFP8 writes it.
    """

    source: Path
    form: FileForm
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...] | None
    cache: bool
    cache_heads: bool = False
    remarks: tuple[FieldRemark, ...] = ()
    block_assumed: bool = False

    @cached_property
    def _patterns(self) -> PatternFile:
        return PatternFile(self.source)

    @cached_property
    def _matchers(self) -> tuple[Matcher, ...]:
        return tuple(Matcher(pattern, self.form, self._patterns) for pattern in self.ignore or ())

    @cached_property
    def _targets(self) -> tuple[tuple[Matcher, DeclaredScheme], ...]:
        """Matchers of all targets with their schemes, the most specific first (compressed-tensors' `match_targets`)."""
        targets = [
            (Matcher(target, self.form, self._patterns), group.scheme)
            for group in self.groups
            for target in group.targets
        ]
        return tuple(sorted(targets, key=lambda entry: entry[0].rank))

    def ignored_by(self, module: str) -> str | None:
        """The entry of `ignore` that leaves a module out; None where there is none."""
        return next((matcher.text for matcher in self._matchers if matcher.matches(module)), None)

    def scheme(self, module: str) -> DeclaredScheme | None:
        """The scheme of a module; None where it is in `ignore` or no target matches it."""
        if self.ignored_by(module) is not None:
            return None
        return next((scheme for matcher, scheme in self._targets if matcher.matches(module)), None)

    def target_of(self, module: str) -> Matcher | None:
        """The target that a module's scheme is by, a name or an expression before a class; None where none matches."""
        return next((matcher for matcher, _ in self._targets if matcher.matches(module)), None)


def declared_form(directory: Path) -> DeclaredQuantization | None:
    """Read the quantization configuration in `directory`; None where there is none.

    Raises InputError for a configuration that does not parse, and for an unknown form: the error names the form, the
    forms that are read, and a remedy.
    """
    config = _object(directory / CONFIG)
    method = str((stated_quantization(config, directory / CONFIG) or {}).get("quant_method") or "")
    if exists(directory / MODELOPT_CONFIG) and (not method or method.startswith("modelopt")):
        return _modelopt(directory / MODELOPT_CONFIG, _object(directory / MODELOPT_CONFIG).get("quantization"))
    return declared_in(config, directory / CONFIG)


def declared_in(config: Mapping[str, Any], source: Path) -> DeclaredQuantization | None:
    """Read the quantization that `config`, the content of the file `source`, declares; as `declared_form` does."""
    said = stated_quantization(config, source)
    if not said:
        return None
    method = str(said.get("quant_method") or "")
    if method.startswith("modelopt"):
        return _modelopt(source, said)
    if method == "compressed-tensors":
        return _compressed_tensors(source, said)
    if method == "fp8":
        return _fine_grained(source, said)
    raise refused(source, f"quant_method is {method!r}", f"{method} {said.get('format', '')}")


def stated_quantization(config: Mapping[str, Any], source: Path) -> dict[str, Any] | None:
    """Return the quantization configuration in `config`, the content of the file `source`; None where it has none.

    Raises InputError for one that is no object.
    """
    text_config = config.get("text_config")
    inner = text_config.get("quantization_config") if isinstance(text_config, dict) else None
    said = config.get("quantization_config") or config.get("compression_config") or inner
    if said is not None and not isinstance(said, dict):
        raise InputError(source, "quantization_config is no object", "copy or download it again")
    return said


def read_by_fp8q_alone(directory: Path) -> bool:
    """Tell whether config.json in `directory` states the form that only fp8q and its graphs read."""
    said = _object(directory / CONFIG).get("quantization_config")
    return isinstance(said, dict) and said.get("format") == FP8Q_FORM


def refused(source: Path, fault: str, form: str = "") -> InputError:
    """Make the error for an unknown form; `fault` says where it is named, `form` contains its name."""
    for part, name, remedy in OTHERS:
        if part in form.lower():
            return InputError(source, f"{fault} ({name}), and what is read is {READ}", remedy)
    return InputError(source, f"{fault}, and what is read is {READ}", ORIGINAL)


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(path, "does not hold an object", "copy or download it again")
    return value


def _names(value: Any, source: Path, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(source, f"{key} is no list of names", "copy or download it again")
    return tuple(value)


def _modelopt(source: Path, said: Any) -> DeclaredQuantization:
    if not isinstance(said, dict):
        raise InputError(source, "has no object quantization", "copy or download it again")
    ignore = said.get("exclude_modules", said.get("ignore")) or []
    groups: list[SchemeGroup] = []
    algorithm = str(said.get("quant_algo") or "")
    layers = said.get("quantized_layers")
    if algorithm.upper() == "MIXED_PRECISION" and isinstance(layers, dict):
        for module, layer in layers.items():
            layer_algorithm = str(layer.get("quant_algo") if isinstance(layer, dict) else "")
            groups.append(SchemeGroup((module,), _modelopt_scheme(source, layer_algorithm)))
    else:
        groups.append(SchemeGroup(("*",), _modelopt_scheme(source, algorithm)))
    cache = said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
    if cache and not (isinstance(cache, dict) or str(cache).upper() == "FP8"):
        raise refused(source, f"the cache is {cache}", str(cache))
    names = _names(ignore, source, "exclude_modules")
    remarks = field_remarks("modelopt", said)
    return DeclaredQuantization(source, "modelopt", tuple(groups), names, bool(cache), remarks=remarks)


def _modelopt_scheme(source: Path, algorithm: str) -> DeclaredScheme:
    if algorithm.upper() not in MODELOPT:
        of = "awq" if algorithm.upper().startswith("W4A16") and "NVFP4" not in algorithm.upper() else algorithm
        raise refused(source, f"quant_method is 'modelopt' with quant_algo {algorithm or None!r}", of)
    return _scheme(*MODELOPT[algorithm.upper()])


def _scheme(weights: Granularity, inputs: Inputs) -> DeclaredScheme:
    return DeclaredScheme(weights, inputs, BLOCK if weights == "block" else None)


def _fine_grained(source: Path, said: dict[str, Any]) -> DeclaredQuantization:
    block = _block(said.get("weight_block_size", list(BLOCK)), source, "weight_block_size")
    activation = str(said.get("activation_scheme", "dynamic")).lower()
    if activation not in ("static", "dynamic"):
        raise refused(source, f"activation_scheme is {activation!r}")
    ignore = said.get("modules_to_not_convert") or said.get("ignored_layers")
    names = None if ignore is None else _names(ignore, source, "modules_to_not_convert")
    inputs: Inputs = "static" if activation == "static" else "dynamic"
    scheme = DeclaredScheme("block" if block else "tensor", inputs, block)
    cache = bool(said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo"))
    groups, assumed = (SchemeGroup((".*",), scheme),), "weight_block_size" not in said
    remarks = field_remarks("fp8", said)
    return DeclaredQuantization(source, "fp8", groups, names, cache, remarks=remarks, block_assumed=assumed)


def _block(value: Any, source: Path, key: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # compressed-tensors once wrote 128x128
        value = [int(side) if side.isdecimal() and len(side) < 10 else 0 for side in value.split("x")]
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int and 0 < side < 1 << 31 for side in value):
        return value[0], value[1]
    raise InputError(
        source, f"{key} is {value!r}, and should be two sizes such as [128, 128]", "set those of the blocks"
    )


def _compressed_tensors(source: Path, said: dict[str, Any]) -> DeclaredQuantization:
    written = str(said.get("format") or "")
    if written not in ("float-quantized", "naive-quantized", "mixed-precision"):
        raise refused(source, f"quant_method is 'compressed-tensors' with the format {written!r}", written)
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise InputError(source, "has no config_groups", "copy or download it again")
    schemes = tuple(_group(source, name, group) for name, group in groups.items())
    ignore = _names(said.get("ignore") or [], source, "ignore")
    cache = said.get("kv_cache_scheme")
    if isinstance(cache, dict) and cache and _kind(cache) != "FP8":
        raise refused(source, f"the cache is {_kind(cache)}", _kind(cache))
    scheme = cache if isinstance(cache, dict) and not cache.get("dynamic", False) else None
    heads = scheme is not None and str(scheme.get("strategy", "")).lower() == "attn_head"
    remarks = field_remarks("compressed-tensors", said)
    return DeclaredQuantization(source, "compressed-tensors", schemes, ignore, scheme is not None, heads, remarks)


def _group(source: Path, name: str, group: Any) -> SchemeGroup:
    if isinstance(group, list):
        if name.upper() not in PRESETS:
            raise refused(source, f"config_groups has the preset {name!r}", name)
        return SchemeGroup(_names(group, source, name), _scheme(*PRESETS[name.upper()]))
    if not isinstance(group, dict):
        raise InputError(source, f"config_groups.{name} is no object", "copy or download it again")
    said, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(said, dict) or (str(said.get("type", "int")).lower(), said.get("num_bits", 8)) != ("float", 8):
        raise refused(source, f"the weights of config_groups.{name} are {_kind(said)}", _kind(said))
    size = said.get("group_size")
    strategy = str(said.get("strategy") or ("tensor" if not size else "channel" if size == -1 else "group")).lower()
    granularity: Granularity | None = next((kind for kind in GRANULARITIES if kind == strategy), None)
    if granularity is None:
        raise refused(source, f"the weights of config_groups.{name} are FP8 by {strategy}", "mxfp8")
    static = isinstance(activations, dict) and not activations.get("dynamic", False)
    inputs: Inputs = "none" if not isinstance(activations, dict) else "static" if static else "dynamic"
    block = (_block(said.get("block_structure"), source, "block_structure") or BLOCK) if strategy == "block" else None
    scheme = DeclaredScheme(granularity, inputs, block)
    return SchemeGroup(_names(group.get("targets"), source, f"config_groups.{name}.targets"), scheme)


def _kind(said: Any) -> str:
    """Name the number format, such as INT4 or NVFP4, that a group declares for its weights."""
    if not isinstance(said, dict):
        return "not quantized"
    bits, kind = said.get("num_bits", 8), str(said.get("type", "int")).lower()
    if kind == "float" and bits == 4:
        return "NVFP4" if said.get("group_size") == 16 else "MXFP4"
    return f"{'FP' if kind == 'float' else 'INT'}{bits}"
