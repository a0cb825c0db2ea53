"""Read the rule of what `fp8q convert` keeps and quantizes: `rules.toml` beside this file, or a copy that a user
changed.

The rule has three parts. `keep` is a choice among linear layers, with or without a class of transformers: routers,
gates, towers, drafts. `linear` and `stacks` take the place of a class where there is none: only what they know by its
name and its shape is quantized.
"""

import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ...core.errors import InputError
from ...core.files import Strict, plain_text, regular_file

RULES = Path(__file__).with_name("rules.toml")


class Keep(Strict):
    """An entry of the rule: modules that stay as they are, and the reason."""

    reason: str = Field(min_length=1)
    parts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    mtp: bool = False
    towers: bool = False
    outside: bool = False
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


class Linear(Strict):
    """An entry of the rule: modules that are linear layers, by the end of their name, where no class says so.

    `width`: which axis of the weight has the model's width: its columns (`in`), its rows (`out`), any of the two
    (`either`), or none of them (`inner`: its columns have another size that config.json names).
    """

    width: Literal["in", "out", "either", "inner"]
    ends: tuple[str, ...]

    def matches(self, module: str) -> bool:
        """Tell whether the name of a module ends in one of these, whole parts of it."""
        return any(fnmatchcase(module, end) or fnmatchcase(module, f"*.{end}") for end in self.ends)


class Stacks(Strict):
    """The tensors that hold all experts of a layer, and how they are split into a module for each."""

    modules: tuple[str, ...] = ()
    alternating: tuple[str, ...] = ()
    split: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class Rules(Strict):
    """The rule: which linear layers are kept, which are too small, and what is known of names without a class."""

    least_side: int = Field(default=1, ge=1)
    keep: tuple[Keep, ...] = ()
    linear: tuple[Linear, ...] = ()
    stacks: Stacks = Stacks()


def load_rules(file: Path | None = None) -> Rules:
    """Read the rule in `file` (None: the one of the package); raises InputError for one that does not read.

    What a file says neither of linear layers nor of stacks is taken from the package's.
    """
    path = file or RULES
    regular_file(path)
    try:
        rules = Rules.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(path, f"{where} {plain_text(first)}", f"{RULES} shows how a rule is written") from None
    except (ValueError, RecursionError) as error:
        raise InputError(path, f"is no TOML ({' '.join(str(error).split())})", "mend it there") from None
    if path == RULES:
        return rules
    missing = {"linear", "stacks"} - rules.model_fields_set
    return rules.model_copy(update={key: getattr(load_rules(), key) for key in missing})


def kept_by_name(entries: Sequence[Keep], module: str) -> str | None:
    """The reason of the first entry that matches the name of a module; None where none does."""
    return next((entry.reason for entry in entries if entry.matches(module)), None)


def state_modules(modules: Iterable[str]) -> dict[str, str]:
    """Map those of `modules` that compute a state which layers keep, by their names, to the reason why they stay."""
    entries = [entry for entry in load_rules().keep if entry.calibrate]
    reasons = {module: kept_by_name(entries, module) for module in modules}
    return {module: reason for module, reason in reasons.items() if reason is not None}
