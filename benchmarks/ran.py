"""Record the options of a benchmark while it runs: those of every stage, and those that its own code makes.

A figure depends on all options of the stages behind it, also on those that a benchmark does not name. So they are not
listed by hand: `Stage.writing`, through which every stage passes, notes the options it ran with, and an option class
notes each value that a file of `benchmarks/` makes, which covers functions that are no stage. Child processes that
import `result` note theirs in the same file, whose path they find in `FILE`. Servers started as commands are not seen;
their options are in the command.
"""

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, get_type_hints

from fp8q.options.declare import Unkeyed

#: The environment variable with the path of the file that all processes of a benchmark write to.
FILE = "FP8Q_BENCHMARK_OPTIONS"
#: The mark of a gate in the declaration of an option: it decides about a figure, and changes none.
GATE = Unkeyed("a gate on what is written")
#: Functions between a check of an option value and the code that makes the value.
BETWEEN = ("__post_init__", "replace", "_replace")
FOLDER = Path(__file__).resolve().parent


def defaults(kind: type) -> dict[str, Any]:
    """Return the default of each field of an option class, as JSON has it; gates and required fields are left out."""
    values = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    return _plain(kind, values)


def start() -> None:
    """Record from now on, in this process and in its children."""
    if FILE not in os.environ:
        handle, os.environ[FILE] = tempfile.mkstemp(suffix=".jsonl")
        os.close(handle)
        atexit.register(os.unlink, os.environ[FILE])
        _watch()


def options() -> dict[str, dict[str, Any]]:
    """Return what was recorded: option class -> `defaults`, and `used`: the differences of each distinct value."""
    found: dict[str, dict[str, Any]] = {}
    for line in Path(os.environ[FILE]).read_text(encoding="utf-8").splitlines():
        name, usual, values = json.loads(line)
        differing = {field: value for field, value in values.items() if field not in usual or usual[field] != value}
        of_class = found.setdefault(name, {"defaults": usual, "used": []})
        if differing not in of_class["used"]:
            of_class["used"].append(differing)
    return {name: found[name] for name in sorted(found)}


def note(kind: type, value: object) -> None:
    """Record the fields of `kind`, an option class, in `value`, which may be of a subclass."""
    if fields(kind):
        values = _plain(kind, {field.name: getattr(value, field.name) for field in fields(kind)})
        line = json.dumps([kind.__name__, defaults(kind), values])
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _plain(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of an option class to JSON's types, without gates; of a path outside the repository only the
    name is left.
    """
    hints = get_type_hints(kind, include_extras=True)
    gates = {name for name, hint in hints.items() if GATE in getattr(hint, "__metadata__", ())}
    nested = {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
        if name not in gates
    }
    plain: dict[str, Any] = json.loads(json.dumps(nested, default=str), object_hook=_without_folders)
    return plain


def _without_folders(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _name(value) for name, value in values.items()}


def _name(value: Any) -> Any:
    if isinstance(value, list):
        return [_name(each) for each in value]
    return PurePath(value).name if isinstance(value, str) and value.startswith("/") else value


def _watch() -> None:
    """Wrap `Stage.writing` and the check that every option class makes of a new value."""
    from fp8q.options.declare import Options
    from fp8q.stages.pipeline.stage import Stage

    writing, check = Stage.writing, Options.__post_init__

    def noted_writing(stage: Any, run: Any, key: Any, *rest: Any, **named: Any) -> AbstractContextManager[Any]:
        note(stage.options, key.options)
        return writing(stage, run, key, *rest, **named)

    def noted_check(value: Options) -> None:
        check(value)
        if _made_here():
            note(type(value), value)

    Stage.writing = noted_writing  # type: ignore[assignment]
    Options.__post_init__ = noted_check  # type: ignore[assignment]


def _made_here() -> bool:
    """Tell whether a benchmark's own code makes the option value whose check is running."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith("<") or frame.f_code.co_name in BETWEEN:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return FOLDER in Path(frame.f_code.co_filename).resolve().parents


if FILE in os.environ:
    _watch()
