"""Declare options: annotations of fields for the command line, and a base class that validates values.

A field reads `name: Annotated[type, option(panel, help, unit), rule, …] = default`. The command line makes its options
from these, a `--config` file and the Python functions fill the same fields, and a wrong value gets the same message
everywhere. A rule takes the option's name and its value, and returns the value or raises InputError.

`option` returns what the command line's own library reads (docs/decisions/0007), so that nothing translates between the
two; the library's parser is not imported here.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path, PurePath
from shlex import quote
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter, convert

from ..core.errors import InputError

#: The largest dimension that a runtime takes: int32.
LARGEST_SIZE = 2**31 - 1
# The panels of the help, in this order.
OPTIONS, TEXT, SCALES, MODEL, ENGINE, EVALUATION, GENERATION, SERVING, MEASUREMENT = map(
    Group.create_ordered,
    (
        "Options",
        "Text",
        "Scales",
        "Model and machine",
        "Graph and engine",
        "Evaluation",
        "Generation",
        "Serving",
        "Measurement",
    ),
)


Rule = Callable[[str, Any], Any]


@dataclass(frozen=True)
class FromText:
    """Read an option that is written as text, such as a share (1%), by its rule."""

    rule: Rule

    def __call__(self, _: type, tokens: Sequence[Any]) -> Any:
        """Convert one word of the command line to a value; raises InputError."""
        return self.rule(tokens[0].keyword, tokens[0].value)


def as_written(hint: Any, tokens: Sequence[Any]) -> Any:
    """Convert an option's text as cyclopts does, but accept only whole numbers for an int.

    cyclopts reads 3.7 as 4, and `none` as no value.
    """
    if hint is int and not re.fullmatch(r"[+-]?[0-9]{1,99}", tokens[0].value):
        raise InputError(f"{tokens[0].keyword} {tokens[0].value}", "is no whole number", "give one such as 8")
    return convert(hint, tokens)


def option(
    panel: Group,
    help: str,
    unit: str | None = None,
    default: str | None = None,
    text: Rule | None = None,
    **more: Any,
) -> Parameter:
    """Describe an option for the help: its panel, text and unit.

    `default`: the default in words, where it depends on other values. `text`: the rule that reads the value, where its
    text and its stored form differ. `more`: further arguments of cyclopts' Parameter, such as a `name` other than the
    field's.
    """
    if default is not None:  # without it, a class may set `show_default` for all its fields
        more |= {"show_default": default}
    more |= {"converter": FromText(text), "n_tokens": 1} if text else {"converter": as_written}
    return Parameter(group=panel, help=help, metavar=unit, **more)


def between(least: int, most: int | None = LARGEST_SIZE) -> Rule:
    """Make the rule of a number from `least` to `most`; the default is the largest size of a runtime, None is
    unlimited.
    """

    def check(option: str, value: int) -> int:
        if value < least:
            raise InputError(f"{option} {value}", f"must be at least {least}")
        if most is not None and value > most:
            raise InputError(f"{option} {value:,}", f"is more than {most:,}, the most that a runtime takes")
        return value

    return check


def percentage(option: str, value: float) -> float:
    """The rule of a percentile."""
    if not 0 < value <= 100:
        raise InputError(f"{option} {value}", "must lie in (0, 100]")
    return value


def number(value: float | str) -> float:
    """A number, or text with a number or a percentage; NaN where it is neither."""
    try:
        return float(str(value).removesuffix("%")) / (100 if str(value).endswith("%") else 1)
    except ValueError:
        return float("nan")


def increase_rule(option: str, value: float | str) -> float:
    """The rule of an increase, as a fraction: 1% or 0.01. As text 1 is refused, which may mean either."""
    ambiguous = isinstance(value, str) and not value.endswith("%") and number(value) >= 1
    if not 0 <= number(value) < float("inf") or ambiguous:
        raise InputError(f"{option} {value}", "is no share", "give one such as 1% or 0.01")
    return number(value)


def nats_rule(option: str, value: float | str) -> float:
    """The rule of a KL: a number of nats, which text may give too."""
    try:
        number_of_nats = float(value)
    except ValueError:
        number_of_nats = float("nan")
    if not 0 <= number_of_nats < float("inf"):
        raise InputError(f"{option} {value}", "is no number of nats", "give one such as 0.001")
    return number_of_nats


def share_of(what: str, example: str, all_of_it: bool = True) -> Rule:
    """Make the rule of a share of `what`, as a fraction: 96% or 0.96; its message names an `example`. Without
    `all_of_it` a share of 1 is refused.
    """

    def check(option: str, value: float | str) -> float:
        if not 0 <= number(value) <= 1:
            raise InputError(
                f"{option} {value}",
                f"is no share of the {what}",
                f"give one from 0 to 1, or in percent, such as {example}",
            )
        if number(value) == 1 and not all_of_it:
            raise InputError(f"{option} {value}", f"is all of the {what}", f"give a smaller share, such as {example}")
        return number(value)

    return check


def interval_of(option: str, value: tuple[int, int] | str) -> tuple[int, int]:
    """The rule of an interval of batches; as text A:B."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", value)
        if not match:
            raise InputError(
                f"{option} {value}", "is no interval", "give the first batch and the one after the last, as in 0:8"
            )
        value = int(match[1]), int(match[2])
    if not 0 <= value[0] < value[1]:
        raise InputError(
            f"{option} {value[0]}:{value[1]}",
            "holds no batch",
            "the first is 0, and the end is not one of them, as in 0:8",
        )
    return value


def sizes_of(option: str, value: Sequence[int] | str) -> tuple[int, ...]:
    """The rule of a list of sizes, as text separated by commas: ascending, without duplicates."""
    words = value.split(",") if isinstance(value, str) else [str(size) for size in value]
    sizes = [int(word) if re.fullmatch(r"\s*[0-9]{1,10}\s*", word) else 0 for word in words]
    if not sizes or not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise InputError(
            f"{option} {','.join(words) or '(none)'}",
            f"is no list of whole numbers from 1 to {LARGEST_SIZE:,}",
            "give one such as 1,8",
        )
    return tuple(sorted(set(sizes)))


def not_empty(_: str, value: Sequence[str]) -> tuple[str, ...]:
    """The rule of a list of patterns: empty patterns are dropped, since they match nothing."""
    return tuple(pattern for pattern in value if pattern)


@dataclass(frozen=True)
class Of:
    """Mark an option that belongs to one method of choosing scales."""

    method: str


@dataclass(frozen=True)
class Unkeyed:
    """Mark an option that changes no recorded output of a stage, so it is no part of the stage's key; `why` is the
    reason.
    """

    why: str


@dataclass(frozen=True)
class Declared:
    """The parts of a field's annotation beside its type: the option's name, rules and choices (none: any value).

    `is_path`: the value is a path or several, which Python may give as text. `kinds`: the kinds of values that it takes
    by themselves, and `many` those of which it takes several; no kinds: any.
    """

    option: str
    rules: tuple[Rule, ...]
    choices: tuple[str | int, ...]
    of: str | None
    is_path: bool = False
    kinds: tuple[type, ...] = ()
    many: tuple[type, ...] = ()

    def check_kind(self, value: Any) -> None:
        """Raise InputError for a value of another kind, which Python alone can give."""
        if not self.kinds or _is_one_of(value, self.kinds):
            return
        several = self.many and isinstance(value, list | tuple | set | frozenset)
        if several and all(_is_one_of(one, self.many) for one in value):
            return
        wanted = [KINDS[kind] for kind in self.kinds if kind is not NoneType]
        wanted += [f"a sequence of {PLURALS[kind]}" for kind in self.many]
        kind = KINDS.get(type(value), type(value).__name__)
        words = " or ".join(wanted)
        raise InputError(f"{self.option} {value!r}", f"is {kind}, not {words}", f"give {words}")


#: The kinds of values in words.
KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "True or False", str: "text", Path: "a path"}
PLURALS: dict[type, str] = {int: "whole numbers", float: "numbers", bool: "booleans", str: "texts", Path: "paths"}


def _is_one_of(value: Any, kinds: Iterable[type]) -> bool:
    """Tell whether a value is of one of the `kinds`: a whole number is a number too, and True is none."""
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, Integral):
        return int in kinds or float in kinds
    if isinstance(value, Real):
        return float in kinds
    return isinstance(value, tuple(kinds)) or (isinstance(value, PurePath) and Path in kinds)


def _kinds_of(hint: Any, by_text: bool) -> tuple[tuple[type, ...], tuple[type, ...]]:
    """The kinds of values that a field of the type `hint` takes, and those of which it takes several; none: any."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    one: list[type] = []
    many: list[type] = []
    for part in parts:
        kinds = get_args(part) if get_origin(part) is tuple else (part,)
        known = [kind for kind in kinds if kind in KINDS or kind is NoneType]
        if len(known) < len([kind for kind in kinds if kind is not Ellipsis]):
            return (), ()
        (many if get_origin(part) is tuple else one).extend(known)
    if by_text:
        one.append(str)
    return tuple(one or [NoneType]), tuple(dict.fromkeys(many))


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """The base of all option classes: each value is checked against its field's type, choices and rules.

    An object knows which options it was made with, whatever their values (`asks`): the command line, a `--config` file
    and Python hand over those alone that somebody wrote.
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Note the names of the options that are given; `dataclasses.replace` gives all, which says nothing."""
        options = super().__new__(cls)
        names = [field.name for field in fields(cls)]
        asked = {*named, *names[: len(values)]}
        object.__setattr__(options, "_asked", frozenset(asked) if asked < {*names} else frozenset())
        return options

    def asks(self, name: str) -> bool:
        """Tell whether the option `name` was asked for: given, be it with its default value, or not its default."""
        return name in vars(self)["_asked"] or getattr(self, name) != getattr(type(self), name)

    def replaced(self, **changes: Any) -> Self:
        """Replace the options in `changes`, which are asked for from now on; the others are as before."""
        options = replace(self, **changes)
        object.__setattr__(options, "_asked", vars(self)["_asked"] | changes.keys())
        return options

    def __post_init__(self) -> None:
        """Convert every value by its rules; raise InputError for the first invalid one."""
        for name, field in self.declared().items():
            value = _as_path(getattr(self, name)) if field.is_path else getattr(self, name)
            field.check_kind(value)
            if field.choices and value not in field.choices:
                raise InputError(f"{field.option} {value}", f"is none of {', '.join(map(str, field.choices))}")
            for rule in field.rules if value is not None else ():
                value = rule(field.option, value)
            object.__setattr__(self, name, value)

    @classmethod
    @cache
    def declared(cls) -> dict[str, Declared]:
        """The declarations of the fields by name, without those whose type is an option class."""
        names = {}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            marks: tuple[Any, ...] = getattr(hint, "__metadata__", ())
            shown = [mark for mark in marks if isinstance(mark, Parameter) and mark.help]
            if shown:
                inner = get_args(hint)[0]
                converter = shown[0].converter
                rules = [mark for mark in marks if callable(mark) and not isinstance(mark, Parameter)]
                names[name] = Declared(
                    next(iter(shown[0].name or ()), f"--{name.replace('_', '-')}"),
                    (*rules, *([converter.rule] if isinstance(converter, FromText) else [])),
                    get_args(inner) if get_origin(inner) is Literal else (),
                    next((mark.method for mark in marks if isinstance(mark, Of)), None),
                    Path in (inner, *get_args(inner)),
                    *_kinds_of(inner, isinstance(converter, FromText)),
                )
        return names

    @classmethod
    @cache
    def keyed(cls) -> dict[str, "type[Options]"]:
        """The fields of a stage's key with the class of each: all but the `Unkeyed`, with the fields of nested option
        classes.
        """
        hints = get_type_hints(cls, include_extras=True)
        owners: dict[str, type[Options]] = {}
        for field in fields(cls):
            marks = getattr(hints[field.name], "__metadata__", ())
            inner = (get_args(hints[field.name]) or (None,))[0]
            if isinstance(inner, type) and issubclass(inner, Options):
                owners |= dict.fromkeys(inner.keyed(), inner)
            elif not any(isinstance(mark, Unkeyed) for mark in marks):
                owners[field.name] = cls
        return owners


def _as_path(value: Any) -> Any:
    """Make a path of text, and paths of a sequence of text; anything else stays."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_path, value))
    if isinstance(value, str):
        return Path(value)
    return value


def first_changed(options: Options, names: Iterable[str]) -> str | None:
    """The first of the fields `names` that is not its default, as on the command line: `--interval 5`, or `--stream`;
    None if all are.
    """
    changed = next((name for name in names if getattr(options, name) != getattr(type(options), name)), None)
    if changed is None:
        return None
    flag = options.declared()[changed].option
    value = getattr(options, changed)
    return flag if value is True else f"{flag} {value}"


def words_of(cls: type[Options], recorded: Mapping[str, Any], but: Collection[str] = ()) -> list[str]:
    """The words of a command line for the options of `cls` that a stage's record has with other values than the
    defaults, without those named in `but`.
    """
    words: list[str] = []
    for name, owner in cls.keyed().items():
        value = recorded.get(name)
        values = tuple(value) if isinstance(value, list) else value
        if name in but or value is None or values == getattr(owner, name):
            continue
        flag = owner.declared()[name].option
        for one in values if isinstance(values, tuple) else (values,):
            words += [flag] if one is True else [flag, quote(str(one))]
    return words


def without(*names: str) -> Parameter:
    """Make the command-line parameter of an option class without the fields `names`, which keep their defaults."""
    return Parameter(name="*", parse=re.compile(f"^(?!({'|'.join(names)})$)"))


def only(*names: str) -> Parameter:
    """Make the command-line parameter, called `options`, of only the fields `names`; the others keep their defaults."""
    return Parameter(name="*", parse=re.compile(f"^({'|'.join(('options', *names))})$"))
