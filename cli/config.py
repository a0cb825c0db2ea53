"""Options from a TOML file (`--config FILE`), and the file that repeats a command (`--print-config`).

A file holds the options of one command under their names on the command line, and its arguments under theirs in lower
case. What is given on the command line goes before it. A key that the command does not take, or a value of another
type, is refused: a misspelt option that is silently left out is a wrong result. Paths are relative to the file, so that
it can lie beside what it names.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import reduce
from inspect import BoundArguments
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cyclopts import ArgumentCollection, Token
from cyclopts.argument import Argument

from .. import __version__
from ..calibrate.text.formats import SUFFIXES
from ..core.errors import InputError
from ..options import AS_THE_RUN_HAS_IT, PRESETS, Clipping, Server, preset_options, server_of
from ..options.declare import FromText
from .arguments import PATH_OR_NAME, Common

#: The types of options, and what a file holds for them.
WANTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Path: "a path in quotes",
}


def fill(arguments: ArgumentCollection, command: str) -> None:
    """Give each of the command's `arguments` that the command line does not give what the file of --config holds, and
    those that neither gives what --preset stands for.

    Raises InputError for a file that cannot be read, a key that is no option of the command, a value of another type.
    """
    known = dict(entries(arguments))
    asked = arguments.get("--config", None)
    if asked is not None and asked.tokens:
        _fill_from(Path(asked.tokens[0].value), known, command)
    preset = known.get("preset")
    if preset is not None and preset.tokens and preset.tokens[0].value in PRESETS:
        for name, value in _preset_options(known).items():
            of = known[name.replace("_", "-")]
            if not of.tokens:
                of.append(Token(keyword=of.name, value=str(value), source="--preset"))


def _preset_options(known: Mapping[str, Argument]) -> Mapping[str, Any]:
    """The options that the preset among the `known` arguments stands for, by the server and the graph beside it."""
    named = known["for"].tokens
    graph = all(token.implicit_value is not False for token in known["graph"].tokens)
    server: Any = named[0].value if named and named[0].value in get_args(Server) else None
    chosen: Any = known["preset"].tokens[0].value
    return preset_options(chosen, server_of(server, graph))


def _fill_from(file: Path, known: Mapping[str, Argument], command: str) -> None:
    """Give the `known` arguments that have no value those in `file`."""
    for name, value in read_config_table(file).items():
        if name not in known:
            raise InputError(file, f"{name}: is no option of `fp8q {command}`", suggestion(name, known))
        typed_value = typed(known[name], value, file)
        if typed_value is None:
            raise InputError(file, f"{name}: must be {wanted(known[name])}, and is {shortened_value(value)}")
        if not known[name].tokens:
            known[name].append(typed_value)


def read_config_table(file: Path) -> dict[str, Any]:
    """The table in a TOML file; raises InputError where it is none."""
    try:
        if not file.is_file():
            raise InputError(
                f"--config {file}", "there is no such file", "give a TOML file, such as --print-config writes"
            )
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {file}", f"cannot be read ({error.strerror})", "give a file that can") from None
    except (ValueError, RecursionError) as error:
        raise InputError(file, f"is no TOML ({' '.join(str(error).split())})", "mend it there") from None


def entries(arguments: ArgumentCollection) -> Iterator[tuple[str, Argument]]:
    """The arguments of a command that a file may hold, by their names in it."""
    outside = {field.option for field in Common.declared().values()}
    for argument in arguments:
        if argument.parse and argument.name != "*" and argument.name not in outside:
            yield argument.name.removeprefix("--").lower(), argument


def suggestion(name: str, known: Mapping[str, Argument]) -> str:
    """Suggest one of the `known` names for a misspelt one."""
    close = difflib.get_close_matches(name.lower().replace("_", "-"), known)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"it takes {', '.join(known)}"


def wanted(argument: Argument) -> str:
    """Describe the value that a file may hold for an option."""
    kind, inner = kinds(argument)
    text = ", or as on the command line" if isinstance(argument.parameter.converter, FromText) else ""
    return (f"{WANTED[inner]}, or an array of such" if kind in (list, tuple) else WANTED[inner]) + text


def shortened_value(value: object) -> str:
    """A value of a file, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def typed(argument: Argument, value: object, file: Path) -> Token | None:
    """A value of a file as cyclopts takes it, its paths made absolute; None where it is of another type."""
    if isinstance(value, str) and isinstance(argument.parameter.converter, FromText):
        return Token(keyword=argument.name, value=value, source=str(file))
    kind, inner = kinds(argument)
    items = value if isinstance(value, list) and kind in (list, tuple) else [value]
    if inner is float:  # infinity where a whole number is too large for one
        items = [float(str(item)) if type(item) is int else item for item in items]
    if any(isinstance(item, str) and "\0" in item for item in items):
        raise InputError(file, f"{argument.name}: holds a NUL, which no name or path has", "take it out")
    allowed = {str if choice is Path else choice for choice in _choice_types(argument) or (inner,)}
    if any(type(item) not in allowed for item in items):
        return None
    placed = [place(argument, item, file.absolute().parent) if isinstance(item, str) else item for item in items]
    placed_value = kind(placed) if kind in (list, tuple) else placed[0]
    if (
        isinstance(placed_value, str) or get_origin(argument.resolved_hint) is Literal
    ):  # held against the others when read
        placed_value = str(placed_value)
        return Token(keyword=argument.name, value=placed_value, source=str(file))
    return Token(keyword=argument.name, implicit_value=placed_value, source=str(file))


def _choice_types(argument: Argument) -> set[type]:
    """The types of the values that an option chooses from; none for an option of any value."""
    hint: Any = argument.resolved_hint
    if get_origin(hint) is Literal:
        return {type(choice) for choice in get_args(hint)}
    return set()


def kinds(argument: Argument) -> tuple[type, type]:
    """The type of an option, None aside, and that of its items, where it has some (of a choice: that of its values)."""
    hint: Any = argument.resolved_hint
    if get_origin(hint) is Literal:
        hint = type(get_args(hint)[0])
    kind = get_origin(hint) if get_origin(hint) in (list, tuple) else hint
    inner = get_args(hint)[0] if kind in (list, tuple) else kind
    return kind, inner if inner in WANTED else str


def place(argument: Argument, text: str, folder: Path) -> str | Path:
    """Resolve the path `text` from `folder`: an absolute path, where it may name one; else the text itself."""
    if kinds(argument)[1] is Path:
        return at(folder, text)
    if PATH_OR_NAME not in getattr(argument.field_info.annotation, "__metadata__", ()):
        return text
    return path_or_name(text, folder)


def path_or_name(text: str, folder: Path) -> str:
    """`text` with the path in it made absolute: TEXT, or TEXT=WEIGHT.

    A hub name stays: what reads as one, ends unlike a text, and lies neither in `folder` nor in the working directory.
    """
    from ..calibrate.input.hub import is_hub_name

    head, equals, weight = text.rpartition("=")
    if equals and not lies_at(folder, text) and lies_at(folder, head):
        return f"{at(folder, head)}={weight}"
    spec = head if equals else text
    is_path = spec.endswith(SUFFIXES) or not is_hub_name(spec.partition(":")[0]) or lies_at(Path(), spec)
    if is_path or lies_at(folder, text):
        return str(at(folder, text))
    return text


def at(folder: Path, text: str) -> Path:
    """The path `text` as seen from `folder`, ~ included; of nobody's home it stays as it is."""
    try:
        return folder / Path(text).expanduser()
    except RuntimeError:
        return folder / text


def lies_at(folder: Path, text: str) -> bool:
    """Tell whether something lies at `text`, seen from `folder`; nothing where no file can be called so."""
    try:
        return at(folder, text).exists()
    except (OSError, ValueError):
        return False


def written(arguments: ArgumentCollection, bound: BoundArguments, command: str) -> str:
    """The TOML file that repeats a command: every option's value, by name; what has none in a comment."""
    lines = [f"# What `fp8q {command} --config FILE` repeats, as fp8q {__version__} understood it."]
    root = ""
    known = dict(entries(arguments))
    for argument in arguments:
        root = root if argument.keys else argument.field_info.name
        name = next((name for name, entry in known.items() if entry is argument), None)
        if name is None or argument.parameter.show is False:
            continue
        owner = reduce(getattr, argument.keys[:-1], bound.arguments[root])
        value = getattr(owner, argument.keys[-1]) if argument.keys else owner
        said = unsaid(argument, owner, value)
        if said is None or (argument.tokens and value is not None):
            lines.append(f"{name} = {toml(argument, value)}")
        else:
            lines.append(f"# {name}: {said}")
    return "\n".join(lines) + "\n"


def unsaid(argument: Argument, owner: object, value: object) -> str | None:
    """Why a value that nobody gave is not written: what it stands for, or which method it is for; None to write it."""
    said = argument.parameter.show_default
    if isinstance(owner, Clipping) and argument.keys[-1] in owner.idle:
        return f"for --method {owner.declared()[argument.keys[-1]].of}"
    if value in (None, ()) or said == AS_THE_RUN_HAS_IT:
        return said if isinstance(said, str) else "none"
    return None


def toml(argument: Argument, value: Any) -> str:
    """A value as TOML has it, its paths absolute. Raises InputError for a text that is no Unicode."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml(argument, item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(place(argument, str(value), Path.cwd()))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{argument.name} {text!r}", "is no Unicode, which TOML is written in", "give another"
        ) from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's but for this
