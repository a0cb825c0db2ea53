"""Write what follows from the public functions: the types of their options, and the page on them.

    python docs/public_api.py --write

`options/keywords.py` lets type checkers and editors know the options that `fp8q.api`'s functions take by name. They
follow from the option classes, of which a checker cannot make keywords by itself. `tests/docs/test_public_api.py` holds
both files against what this makes.
"""

import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fp8q import api
from fp8q.options.declare import FromText
from fp8q.options.settings import PRESET, option_names

ROOT = Path(__file__).resolve().parent.parent
KEYWORDS, PAGE = ROOT / "options" / "keywords.py", ROOT / "docs" / "reference" / "api.md"
#: Fields that no user gives.
INNER = {"form_named", "explicit"}
HEAD = '''"""The options that the functions of `fp8q.api` take by name, for type checkers and editors.

Written by `docs/public_api.py` from the option classes; not to be changed by hand.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from . import {classes}
'''


def settings_name(function: str) -> str:
    """Return the name of the type of a function's options: `BuildEngineSettings`."""
    return "".join(word.title() for word in function.split("_")) + "Settings"


def functions() -> dict[str, Any]:
    """The public functions that take options by name."""
    public = {name: getattr(api, name) for name in api.__all__}
    return {
        name: value
        for name, value in public.items()
        if inspect.isfunction(value) and "settings" in inspect.signature(inspect.unwrap(value)).parameters
    }


def settings_of(function: Any) -> dict[str, str]:
    """The names of the options that `function` takes, in their order, with their types as they are written."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters
    taken: dict[str, str] = {}
    for parameter in parameters.values():
        if is_dataclass(parameter.default):
            for name, written in hints_of(type(parameter.default)):
                taken.setdefault(name, written)
            if "weight_rounding" in option_names(parameter.default):
                taken.setdefault(PRESET, 'Literal["fast", "exact"]')
    return {name: written for name, written in taken.items() if name not in parameters.keys() | INNER}


def hints_of(options: type) -> Iterator[tuple[str, str]]:
    """The fields of a class of options with their types, and those of option classes within it."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint, marks = hints[field.name], getattr(hints[field.name], "__metadata__", ())
        by_text = any(isinstance(getattr(mark, "converter", None), FromText) for mark in marks)
        words = written_type(hint)
        if by_text and "Literal[" not in words:
            words = " | ".join([*words.removesuffix(" | None").split(" | "), "str"]) + words[-7:] * words.endswith(
                " | None"
            )
        yield field.name, words
        inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if is_dataclass(inner):
            yield from hints_of(inner)


def written_type(hint: Any) -> str:
    """Write a type as Python has it: paths may be text, and any sequence is taken for a tuple of any length."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return written_type(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, arguments))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(written_type, arguments)))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"Sequence[{written_type(arguments[0])}]"
        return f"tuple[{', '.join(map(written_type, arguments))}]"
    if hint is Path:
        return "str | Path"
    return "None" if hint is types.NoneType else str(hint.__name__)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def keywords() -> str:
    """Make `options/keywords.py`."""
    classes = {
        type(value).__name__
        for function in functions().values()
        for parameter in inspect.signature(inspect.unwrap(function)).parameters.values()
        if is_dataclass(parameter.default)
        for value in vars(parameter.default).values()
        if is_dataclass(value)
    }
    parts = [HEAD.format(classes=", ".join(sorted(classes)))]
    for name, function in functions().items():
        lines = [f"    {option}: {written}" for option, written in settings_of(function).items()]
        head = f'class {settings_name(name)}(TypedDict, total=False):\n    """Options of `fp8q.api.{name}`."""\n\n'
        parts.append("\n\n" + head + "\n".join(lines) + "\n")
    return "".join(parts)


def main() -> None:
    """Write both files, or exit with 1 where one is not what this makes."""
    from generated_pages import api_page

    made = {KEYWORDS: keywords(), PAGE: api_page()}
    if "--write" in sys.argv:
        for file, text in made.items():
            file.write_text(text, encoding="utf-8")
    elif stale := [file for file, text in made.items() if file.read_text(encoding="utf-8") != text]:
        sys.exit(f"{', '.join(str(file.relative_to(ROOT)) for file in stale)}: run python docs/public_api.py --write")


if __name__ == "__main__":
    main()
