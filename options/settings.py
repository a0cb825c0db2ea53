"""Options given by their names, as Python's functions take them: `calibrate(…, preset="exact", samples=64)`.

Names are those of the fields of option classes, whichever class within the options has the field; on the command line
they have hyphens and begin with two of them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from ..core.errors import InputError
from .calibrate import PRESETS, CalibrateOptions, Server, preset_options, server_of
from .declare import Options
from .export import ExportOptions
from .run import RunOptions
from .scales import RescaleOptions

First = TypeVar("First")
Second = TypeVar("Second")
#: The name of a set of options that go together.
PRESET = "preset"


def with_settings(options: First, settings: Mapping[str, Any], graph: bool = True) -> First:
    """Return `options` with the `settings` by name, among them a `preset`, which the others override.

    `graph`: whether a run of options without those of graphs has one, which tells the server that a preset is for.
    Raises InputError for a name that is no option of these, and for a preset that is none.
    """
    if not settings:
        return options
    asked = dict(settings)
    if PRESET in asked:
        name = asked.pop(PRESET)
        if name not in PRESETS or "weight_rounding" not in option_names(options):
            raise InputError(f"preset={name!r}", f"is none of {', '.join(PRESETS)} of these options")
        asked = {**preset_options(name, _server(options, asked, graph)), **asked}
        if isinstance(options, RunOptions):
            asked["form_named"] = True
    known = option_names(options)
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known))
            hint = f"did you mean {' or '.join(close)}?" if close else f"the options are {', '.join(sorted(known))}"
            raise InputError(f"{name}=", "is no option here", hint)
    return _replaced(options, asked)


def with_settings_of_both(first: First, second: Second, settings: Mapping[str, Any]) -> tuple[First, Second]:
    """Return two objects of options with the `settings` by name, each of the first that has the name.

    Raises InputError as `with_settings` does, for a name that neither has.
    """
    names = option_names(first) | {PRESET}
    later = {name: value for name, value in settings.items() if name not in names and name in option_names(second)}
    changed = with_settings(second, later)
    graph = changed.graph if isinstance(changed, ExportOptions) else True
    return with_settings(first, {name: settings[name] for name in settings.keys() - later}, graph), changed


def _server(options: Any, asked: Mapping[str, Any], graph: bool) -> Server:
    """Return the server that a preset is for: by what is `asked` for, else by the `options`; those of scales alone
    name none, and second codes are for the graph and the plugin.
    """
    if isinstance(options, RunOptions):
        graph = asked.get("graph", options.export.graph)
        options = options.calibrate
    if isinstance(options, CalibrateOptions):
        return server_of(asked.get("server", options.server), graph)
    return "tensorrt"


def option_names(options: Any) -> set[str]:
    """The names of all fields of `options`, with those of option classes within them."""
    names: set[str] = set()
    for field in fields(options):
        value = getattr(options, field.name)
        names |= {field.name} | (option_names(value) if is_dataclass(value) else set())
    return names


def _replaced(options: First, asked: Mapping[str, Any]) -> First:
    """Replace the fields that are `asked` for, in the first option class that has each."""
    changed: dict[str, Any] = {}
    left = dict(asked)
    for field in fields(options):  # type: ignore[arg-type]  # all options are dataclasses
        value = getattr(options, field.name)
        if field.name in left:
            changed[field.name] = left.pop(field.name)
        elif is_dataclass(value) and (inside := {name: left.pop(name) for name in option_names(value) & left.keys()}):
            changed[field.name] = _replaced(value, inside)
    if isinstance(options, RescaleOptions):
        return type(options)(**{**options.explicit, **changed})
    if isinstance(options, Options):
        return options.replaced(**changed)
    return replace(options, **changed)  # type: ignore[type-var]  # all options are dataclasses
