"""Compare the configurations of two checkpoints field by field: config.json and generation_config.json.

A text shows what is computed within its windows, and by the settings of this comparison. A window, a scaling of rotary
positions, a limit of positions or a default of sampling acts beyond them, or in servers alone. So each field is
compared as transformers' class of the model reads it, with the defaults of the class and under one name each: a field
that is written out, or left out, where that is its default makes no difference.

Fields that change nothing of an answer are listed (`NO_EFFECT`). Any other difference is an error, since a list of
those that matter would be incomplete; of fields that no class of transformers has, it is a warning.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedConfig

from ...calibrate.checkpoint.class_defaults import DERIVED, config_field
from ...calibrate.checkpoint.companions import GENERATION
from ...calibrate.checkpoint.config_fields import POSITIONS, abbreviated
from ...calibrate.checkpoint.recognizer import QUANTIZATION_KEYS
from ...calibrate.input.untrusted import exists, read_json
from ...calibrate.model.architecture import max_positions
from ...quantize.reading.run_checkpoint import FP8Q_CONFIG
from .document import Cause

#: The rules of these causes.
CONFIG_RULE = "config"
GENERATION_RULE = "generation-config"
#: Fields of config.json without effect on an answer: who wrote it, in which type weights are stored, what else is
#: returned, how it was trained, and the token that fills up rows of a batch, which attention does not see.
NO_EFFECT = re.compile(
    "|".join(
        [
            "_name_or_path|_commit_hash|_attn_\\w+|_experts_\\w+|transformers_version|architectures|auto_map|torchscript",
            "torch_dtype|dtype|use_bfloat16|use_cache|return_dict|chunk_size_feed_forward|pad_token_id",
            "output_(attentions|hidden_states|router_logits|scores|logits)",
            r"(\w+_)?(dropout|pdrop|drop|layerdrop)(_prob|_rate|_p)?|initializer_\w+|init_std|gradient_checkpointing",
            r"router_(aux_loss_coef|jitter_noise|z_loss_coef)|aux_loss_alpha|seq_aux|pretraining_tp|problem_type",
            r"(num_)?labels|id2label|label2id|finetuning_task|task_specific_params|summary_\w+",
            *map(re.escape, (FP8Q_CONFIG, *QUANTIZATION_KEYS, "quantization")),
        ]
    )
)
#: Fields of generation_config.json without effect on the tokens of an answer.
NO_EFFECT_GENERATING = re.compile(
    r"_.*|transformers_version|pad_token_id|output_\w+|return_dict\w*|(use_|max_)?cache\w*|max_cache_len|\w*compile\w*|"
    r"\w*assistant\w*|prompt_lookup_num_tokens|max_matching_ngram_size|\w+_lookbehind|low_memory|"
    r"continuous_batching_config|prefill_chunk_size|speculation_type|use_mtp"
)
#: Values of generation_config.json that are as if nothing was written.
UNSET: Mapping[str, object] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0, "diversity_penalty": 0.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "early_stopping": False, "max_length": 20,
    "min_length": 0, "remove_invalid_values": False, "renormalize_logits": False, "token_healing": False,
}  # fmt: skip
#: Parameters of rotary positions that are as if nothing was written.
ROTARY: Mapping[str, object] = {
    "rope_type": "default", "partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True,
}  # fmt: skip
#: Token ids that are compared as sets.
ID_SETS = ("eos_token_id",)
#: The consequences of a difference, by the field's path.
CONSEQUENCES = (
    (re.compile(r".*(rope|rotary|yarn).*"), "positions are rotated otherwise, beyond these windows too"),
    (re.compile(rf"(.*\.)?({'|'.join(POSITIONS)})"), "servers take texts of another length"),
    (re.compile(r".*(window|layer_types|chunk_size|pattern).*"), "attention reaches other positions"),
    (re.compile(r".*token_id"), "texts begin, or answers end, with other tokens"),
    (re.compile(r"(.*\.)?(model_type|architectures)"), "servers take another class for it"),
)
COMPUTED_OTHERWISE = "it is computed otherwise"
REMEDY = "write the original's value"
#: A leaf of a document by its path.
Leaves = dict[str, Any]


@dataclass(frozen=True)
class ConfigFile:
    """A config.json: the name in messages, its fields as they stand there, and as transformers' class reads them."""

    name: str
    raw: Mapping[str, Any]
    config: PreTrainedConfig

    @property
    def text(self) -> PreTrainedConfig:
        """The language model's part."""
        return self.config.get_text_config()

    def leaves(self, text_alone: bool) -> Leaves:
        """All fields with an effect, by path."""
        config = self.text if text_alone else self.config
        return {path: value for path, value in _leaves(config.to_dict()) if value is not None}

    def implied(self, path: str) -> object:
        """The value that models take for a field that is not set; None where that is not known."""
        fields = self.text.to_dict()
        field = path.rpartition(".")[2]
        if field in DERIVED:
            return config_field(fields, field)
        if field == "n_inner":
            return 4 * getattr(self.text, "hidden_size", 0)
        if field in POSITIONS:
            return max_positions(fields)
        return ROTARY.get(field) if "rope" in path else None


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if NO_EFFECT.fullmatch(str(key)):
            continue
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{path}.")
        else:
            yield path, inner


def config_differences(original: ConfigFile, candidate: ConfigFile) -> Iterator[Cause]:
    """Yield the differences of two config.json that change what is served."""
    yield from _architectures(original, candidate)
    text_alone = type(original.config) is not type(candidate.config) and type(original.text) is type(candidate.text)
    if text_alone:
        yield _cause(CONFIG_RULE, "warning", candidate.name, "", (
            f"is a {candidate.config.model_type}, and the original's a {original.config.model_type}: only their "
            "language models are compared"
        ))  # fmt: skip
    ours = original.leaves(text_alone)
    theirs = candidate.leaves(text_alone)
    for path in sorted({*ours, *theirs}, key=lambda path: (path.count("."), path)):
        values = ours.get(path, original.implied(path)), theirs.get(path, candidate.implied(path))
        if not _same(path, *values) and not _head_apart(path, values):
            known = _declared(original.config, path) or _declared(candidate.config, path) or _anywhere(path)
            severity = "error" if known else "warning"
            yield _cause(CONFIG_RULE, severity, candidate.name, path, _told(path, *values))
    yield from _older_names(original, candidate)


def _architectures(original: ConfigFile, candidate: ConfigFile) -> Iterator[Cause]:
    ours, theirs = (file.raw.get("architectures") or [] for file in (original, candidate))
    if ours and {*ours} != {*theirs}:
        fault = _told("architectures", ours, theirs or None)
        yield _cause(CONFIG_RULE, "error" if theirs else "warning", candidate.name, "architectures", fault)


def _head_apart(path: str, values: tuple[object, object]) -> bool:
    """Tell whether the candidate has a head of its own where the original shares the embedding: all positions of the
    windows went through it, and every server reads it.
    """
    return path.rpartition(".")[2] == "tie_word_embeddings" and values == (True, False)


def _older_names(original: ConfigFile, candidate: ConfigFile) -> Iterator[Cause]:
    """The base of rotary positions beside `rope_parameters`, which older servers read and transformers does not."""
    ours, theirs = (getattr(file.text, "rope_parameters", None) or {} for file in (original, candidate))
    if "rope_theta" not in ours or ours.get("rope_theta") != theirs.get("rope_theta"):
        return
    for prefix, fields in (("", candidate.raw), ("text_config.", candidate.raw.get("text_config"))):
        written = fields.get("rope_theta") if isinstance(fields, Mapping) else None
        before = original.raw.get("rope_theta") if not prefix else None
        if written not in (None, ours["rope_theta"], before):
            path = f"{prefix}rope_theta"
            yield _cause(CONFIG_RULE, "error", candidate.name, path, _told(path, ours["rope_theta"], written))


def _same(path: str, ours: object, theirs: object) -> bool:
    if path.rpartition(".")[2] in ID_SETS:
        return _id_set(ours) == _id_set(theirs)
    if path.endswith(".type") and "rope" in path:  # an older name of rope_type, which is compared
        return True
    return ours == theirs


def _id_set(value: object) -> set[object]:
    if isinstance(value, list):
        return {*value}
    return {value} - {None}


def _told(path: str, ours: object, theirs: object) -> str:
    """State both values of a field, and the consequence."""
    consequence = next((text for pattern, text in CONSEQUENCES if pattern.fullmatch(path)), COMPUTED_OTHERWISE)
    return f"{_values(ours, theirs)}: {consequence}"


def _values(ours: object, theirs: object) -> str:
    said = "is not set" if theirs is None else f"is {abbreviated(theirs)}"
    before = "has none" if ours is None else f"has {abbreviated(ours)}"
    return f"{said}, and the original {before}"


def _cause(rule: str, severity: Any, file: str, path: str, fault: str) -> Cause:
    subject = f"{file}: {path}" if path else file
    return Cause(rule=rule, severity=severity, subject=subject, fault=fault, remedy=REMEDY)


def _declared(config: PreTrainedConfig, path: str) -> bool:
    """Tell whether the class of a configuration knows the field at `path`."""
    first, _, rest = path.partition(".")
    inner = getattr(config, first, None)
    if rest and isinstance(inner, PreTrainedConfig):
        return _declared(inner, rest)
    return first in _fields(type(config))


def _fields(kind: type[PreTrainedConfig]) -> frozenset[str]:
    declared = getattr(kind, "__dataclass_fields__", ()), inspect.signature(kind.__init__).parameters
    return frozenset(name for names in (*declared, kind.attribute_map) for name in names)


@cache
def _anywhere(path: str) -> bool:
    """Tell whether the class of any configuration in transformers has the field, by its source, since importing them
    all takes seconds. Servers read some fields whatever the class.
    """
    first = path.partition(".")[0]
    line = re.compile(rf"^\s+{re.escape(first)}\s*[:=]", re.MULTILINE)
    sources = Path(transformers.__file__).parent.glob("models/*/configuration_*.py")
    return any(line.search(file.read_text(encoding="utf-8")) for file in sources)


def generation_differences(original: ConfigFile, candidate: ConfigFile, paths: tuple[Path, Path]) -> Iterator[Cause]:
    """Yield the differences of two generation_config.json, in the directories `paths`, that change an answer.

    The tokens that end one have a rule of their own.
    """
    ours, theirs = (_generation(path, file.config) for path, file in zip(paths, (original, candidate), strict=True))
    for field in sorted({*ours, *theirs}):
        values = ours.get(field), theirs.get(field)
        if values[0] == values[1]:
            continue
        severity = "error" if hasattr(GenerationConfig(), field) else "warning"
        fault = f"{_values(*values)}: requests that do not set it are answered otherwise"
        yield _cause(GENERATION_RULE, severity, GENERATION, field, fault)


def _generation(path: Path, config: PreTrainedConfig) -> dict[str, object]:
    """The settings of generation in a directory with an effect, those of config.json where there are none."""
    content = read_json(path / GENERATION) if exists(path / GENERATION) else {}
    fields = content if isinstance(content, dict) else {}
    text = config.get_text_config()
    for name in ("bos_token_id", "decoder_start_token_id"):
        if fields.get(name) is None:
            fields = fields | {name: getattr(text, name, None)}
    return {
        name: value
        for name, value in fields.items()
        if value is not None
        and name not in ID_SETS
        and value != UNSET.get(name)
        and not NO_EFFECT_GENERATING.fullmatch(name)
    }
