"""Decide by names and shapes which matrices of a checkpoint are quantized, and why the others stay as they are.

The rule is data: `rules.toml` beside this file, or a copy that a user changed. Names tell what a class would: a router
is called gate, a tower visual. What no entry knows is quantized, if it is a matrix named `MODULE.weight`.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ...calibrate.checkpoint.mtp_layers import mtp_prefixes
from ...calibrate.checkpoint.weights import TensorHeader
from ...core.errors import InputError
from ...core.files import Strict, plain_text, regular_file

RULES = Path(__file__).with_name("rules.toml")
#: The types that are quantized, as safetensors spells them.
FLOAT_TYPES = ("BF16", "F16", "F32")
WEIGHT = ".weight"


class Keep(Strict):
    """An entry of the rule: modules that stay as they are, and the reason."""

    reason: str = Field(min_length=1)
    parts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    mtp: bool = False
    model_types: tuple[str, ...] = ()
    calibrate: bool = False

    def matches(self, module: str) -> bool:
        """Tell whether a pattern of this entry matches the name of a module."""
        parts = module.split(".")
        return (
            any(fnmatchcase(part, pattern) for pattern in self.parts for part in parts)
            or any(fnmatchcase(parts[-1], pattern) for pattern in self.ends)
            or any(fnmatchcase(module, pattern) for pattern in self.names)
        )


class Stacks(Strict):
    """The tensors that hold all experts of a layer, and how they are split into a module for each."""

    modules: tuple[str, ...] = ()
    in_out: tuple[str, ...] = ()
    alternating: tuple[str, ...] = ()
    split: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class Rules(Strict):
    """The rule: which modules are kept, which matrices are too small, and which tensors are stacks of experts."""

    least_side: int = Field(default=1, ge=1)
    keep: tuple[Keep, ...] = ()
    stacks: Stacks = Stacks()


def load_rules(file: Path | None = None) -> Rules:
    """Read the rule in `file` (None: the one of the package); raises InputError for one that does not read."""
    path = file or RULES
    regular_file(path)
    try:
        return Rules.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(path, f"{where} {plain_text(first)}", f"{RULES} shows how a rule is written") from None
    except (ValueError, RecursionError) as error:
        raise InputError(path, f"is no TOML ({' '.join(str(error).split())})", "mend it there") from None


@dataclass(frozen=True)
class Selection:
    """The tensors to quantize, `matrices` and `stacks` by name, and those `unquantized` although they are matrices: the
    reason of each, by the name of its tensor.
    """

    matrices: tuple[str, ...]
    stacks: tuple[str, ...]
    unquantized: Mapping[str, str]


def select_tensors(
    rules: Rules,
    config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    skip: Sequence[str] = (),
    mtp: bool = False,
) -> Selection:
    """Choose the tensors of `headers` to quantize by `rules`, `config` (config.json) and the patterns `skip`.

    `mtp`: quantize the layers of multi-token prediction too. Raises InputError for a pattern that matches no matrix,
    and where nothing is left to quantize.
    """
    matrices, stacks, unquantized = list[str](), list[str](), dict[str, str]()
    drafts = () if mtp else mtp_prefixes(config, headers)
    types = _model_types(config)
    entries = [
        rule_entry
        for rule_entry in rules.keep
        if not rule_entry.model_types or types.intersection(rule_entry.model_types)
    ]
    used: set[str] = set()
    for name, header in headers.items():
        is_stack = len(header.shape) == 3 and any(fnmatchcase(name, pattern) for pattern in rules.stacks.modules)
        if header.dtype not in FLOAT_TYPES or not (is_stack or (len(header.shape) == 2 and name.endswith(WEIGHT))):
            continue
        module = name.removesuffix(WEIGHT)
        asked = next((pattern for pattern in skip if fnmatchcase(module, pattern)), None)
        used |= {pattern for pattern in skip if fnmatchcase(module, pattern)}
        reason = f"stays in BF16 (--skip {asked})" if asked else _reason(entries, module, drafts)
        if reason is None and min(header.shape[-2:]) < rules.least_side:
            reason = f"a side of {min(header.shape[-2:])}, smaller than {rules.least_side}"
        if reason is not None:
            unquantized[name] = reason
        elif is_stack:
            stacks.append(name)
        else:
            matrices.append(name)
    for pattern in skip:
        if pattern not in used:
            raise InputError(f"--skip {pattern}", "matches no matrix of the checkpoint", "`*` stands for any letters")
    if not matrices and not stacks:
        raise InputError(
            "",
            f"all {len(unquantized)} matrices of the checkpoint stay as they are, so there is nothing to quantize",
            f"skip fewer with --skip, or change a copy of {RULES} and give it with --rules",
        )
    return Selection(tuple(matrices), tuple(stacks), unquantized)


def state_modules(modules: Iterable[str]) -> dict[str, str]:
    """Map those of `modules` that compute a state which layers keep, by their names, to the reason why they stay."""
    entries = [entry for entry in load_rules().keep if entry.calibrate]
    reasons = {module: _reason(entries, module, ()) for module in modules}
    return {module: reason for module, reason in reasons.items() if reason is not None}


def _reason(entries: Sequence[Keep], module: str, drafts: tuple[str, ...]) -> str | None:
    for entry in entries:
        if entry.matches(module) or (entry.mtp and module.startswith(drafts)):
            return entry.reason
    return None


def _model_types(config: Mapping[str, Any]) -> set[str]:
    """The types of models that config.json names: of the whole, and of the language model in it."""
    return {str(part["model_type"]) for part in _parts(config) if isinstance(part.get("model_type"), str)}


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def stack_split(rules: Rules, config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> tuple[str, ...] | str:
    """The projections that the rows of each expert in the stack `name` belong to, in equal parts; or the reason why it
    cannot be split into modules.
    """
    parts, types = rules.stacks.split.get(name.rpartition(".")[2]), _model_types(config)
    if parts is None:
        return "a stack of experts that the rule has no modules for"
    if len(parts) > 1 and types.intersection(rules.stacks.alternating):
        return "a stack of experts whose projections alternate, row by row"
    hidden = next((part["hidden_size"] for part in _parts(config)[::-1] if type(part.get("hidden_size")) is int), None)
    side = 1 if name.endswith("down_proj") else 2  # the axis that has the hidden size where rows are outputs
    turned = bool(types.intersection(rules.stacks.in_out)) if shape[1] == shape[2] else shape[side] != hidden
    if turned or hidden is None or shape[1] % len(parts):
        return "a stack of experts stored [experts, in, out]"
    return parts
