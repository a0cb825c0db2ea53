"""The quantization that an FP8 checkpoint declares: how each module is quantized, in the words of every form.

A form is read, and some are written, by its `Codec` (`codecs`). Where the tensors differ from the configuration,
`fp8_tensors` goes by the tensors, and the lint (`quantize.lint`) reports the difference.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...calibrate.input.patterns import PatternFile
from ...calibrate.input.untrusted import read_json
from ...core.errors import InputError
from ..scales.scheme import UNQUANTIZED, Scheme
from .quantization_fields import FieldRemark

#: The part of a layer's cached keys, or values, that shares a scale, as compressed-tensors names it.
CacheUnit = Literal["tensor", "attn_head"]


@dataclass(frozen=True)
class Matcher:
    """An entry of a list of modules, and its matching of names as the format's own loader does it.

    `rank`: 0 for a name, 1 for a pattern, 2 for a class or for every module; of several entries that match, the lowest
    rank counts.
    """

    text: str
    matches: Callable[[str], bool]
    rank: int = 0
    is_class: bool = False


CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
#: The forms that are read, for error messages.
_FORMS = (
    "compressed-tensors (float-quantized)",
    "modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO)",
    "fp8 (blocks or one scale a tensor)",
)
READ = f"{', '.join(_FORMS[:-1])} and {_FORMS[-1]}"
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


@dataclass(frozen=True)
class SchemeGroup:
    """The modules that `targets` match, under one scheme."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True)
class DeclaredQuantization:
    """The quantization configuration in the file `source`: its codec, its fields (`said`), the schemes of modules, the
    modules that stay in BF16 (`ignore`), whether the `cache` has scales, and whether these are of its heads
    (`cache_heads`).

    `ignore` None: the configuration does not say, and each loader applies a default of its own. `block_assumed`: the
    form fp8 names no block, which transformers takes for one of 128 × 128, and vLLM and SGLang for one scale a tensor,
    as AutoFP8 writes it.
    """

    source: Path
    codec: "Codec"
    said: Mapping[str, Any]
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...] | None
    cache: bool
    cache_heads: bool = False
    block_assumed: bool = False

    @property
    def form(self) -> str:
        """The form of the checkpoint."""
        return self.codec.form

    @cached_property
    def remarks(self) -> tuple[FieldRemark, ...]:
        """The fields that are not read."""
        return tuple(self.codec.remarks(self.said))

    @cached_property
    def _patterns(self) -> PatternFile:
        return PatternFile(self.source)

    @cached_property
    def _matchers(self) -> tuple[Matcher, ...]:
        return tuple(self.codec.matcher(pattern, self._patterns) for pattern in self.ignore or ())

    @cached_property
    def _targets(self) -> tuple[tuple[Matcher, Scheme], ...]:
        """Matchers of all targets with their schemes, the most specific first (compressed-tensors' `match_targets`)."""
        targets = [
            (self.codec.matcher(target, self._patterns), group.scheme)
            for group in self.groups
            for target in group.targets
        ]
        return tuple(sorted(targets, key=lambda entry: entry[0].rank))

    def ignored_by(self, module: str) -> str | None:
        """The entry of `ignore` that leaves a module out; None where there is none."""
        return next((matcher.text for matcher in self._matchers if matcher.matches(module)), None)

    def scheme(self, module: str) -> Scheme:
        """The scheme of a module, which stays in BF16 where it is in `ignore` or no target matches it."""
        if self.ignored_by(module) is not None:
            return UNQUANTIZED
        return next((scheme for matcher, scheme in self._targets if matcher.matches(module)), UNQUANTIZED)

    def target_of(self, module: str) -> Matcher | None:
        """The target that a module's scheme is by, a name or an expression before a class; None where none matches."""
        return next((matcher for matcher, _ in self._targets if matcher.matches(module)), None)


@dataclass(frozen=True)
class Codec:
    """A form of checkpoints, read and written.

    `form`: its name, the `quant_method` of config.json. `weight_scales`, `input_scales`: the names that a scale may
    have beside its weight, of which the form's own loader reads the first; a form without static inputs has no names of
    theirs. A value is code × scale in every form, so a codec cannot store reciprocals. `matcher`: reads an entry of a
    file's lists of modules; raises InputError for an expression that does not compile, or may take forever to match.
    `remarks`: the fields of a configuration that are not read. `declared`: reads the quantization configuration of a
    file. `written`: makes the configuration of modules in one scheme, of which those named are left out; None where the
    form is not written. `of_run`: makes that of a run, of the modules that are left out, the part of the cache with one
    scale, each module's scheme, and whether there are experts; None where runs are not written in the form. `beside`:
    makes the files that say the same beside config.json, by their names.

    How scales are written: `end`: the last sides of their shapes, () for one number or [channels], (1,) for [1] or
    [channels, 1]. `cache_scale`: the name of that of a `part` of an `attention`'s cache. `below`: the entry of a list
    of modules for all whose name begins with a text.
    """

    form: str
    weight_scales: tuple[str, ...]
    input_scales: tuple[str, ...]
    matcher: Callable[[str, PatternFile], Matcher]
    remarks: Callable[[Mapping[str, Any]], Iterator[FieldRemark]]
    declared: Callable[[Path, Any], DeclaredQuantization]
    written: Callable[[Scheme, Sequence[str]], dict[str, object]] | None = None
    of_run: Callable[[Sequence[str], CacheUnit | None, Mapping[str, Scheme], bool], dict[str, object]] | None = None
    beside: Callable[[Mapping[str, Any]], dict[str, dict[str, object]]] = lambda _: {}
    end: tuple[int, ...] = (1,)
    cache_scale: str = "{attention}.{part}_scale"
    below: Callable[[str], str] = lambda start: f"re:{re.escape(start)}.*"


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
    said = json_object(directory / CONFIG).get("quantization_config")
    return isinstance(said, dict) and said.get("format") == FP8Q_FORM


def refused(source: Path, fault: str, form: str = "") -> InputError:
    """Make the error for an unknown form; `fault` says where it is named, `form` contains its name."""
    for part, name, remedy in OTHERS:
        if part in form.lower():
            return InputError(source, f"{fault} ({name}), and what is read is {READ}", remedy)
    return InputError(source, f"{fault}, and what is read is {READ}", ORIGINAL)


def json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raises InputError for another value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(path, "does not hold an object", "copy or download it again")
    return value


def listed_names(value: Any, source: Path, key: str) -> tuple[str, ...]:
    """Read the list of names at `key` of the file `source`; raises InputError for another value."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(source, f"{key} is no list of names", "copy or download it again")
    return tuple(value)


def block_sides(value: Any, source: Path, key: str) -> tuple[int, int] | None:
    """Read the sides of blocks at `key` of the file `source`, if any; raises InputError for other values."""
    if value is None:
        return None
    if isinstance(value, str):  # compressed-tensors once wrote 128x128
        value = [int(side) if side.isdecimal() and len(side) < 10 else 0 for side in value.split("x")]
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int and 0 < side < 1 << 31 for side in value):
        return value[0], value[1]
    raise InputError(
        source, f"{key} is {value!r}, and should be two sizes such as [128, 128]", "set those of the blocks"
    )
