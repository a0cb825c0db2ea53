"""Check the folders of task files that the user gives, before lm-eval indexes them.

lm-eval passes over a file that does not parse without a word, and then has no task of its name. A task file may name
Python functions (`!function module.name`), which lm-eval imports: such a folder is code. Here no function is imported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...calibrate.input.untrusted import error_text, read_bytes
from ...core.errors import InputError

#: Bytes that a task file may have; those of lm-eval have less than 100 kB.
MOST_BYTES = 8 << 20


def check_task_files(folders: Sequence[Path]) -> None:
    """Raise InputError for a folder that is not there or has no task file, and for a file in it that is no YAML."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"--include-path {folder}: there is no such folder; give one that has task files (YAML)")
        files = sorted(folder.rglob("*.yaml"))
        if not files:
            raise InputError(f"--include-path {folder}: holds no task file (*.yaml); give a folder that does")
        for file in files:
            check_task_file(file)


def check_task_file(file: Path) -> None:
    """Raise InputError, with the place, for a task file that is no YAML or no mapping."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda _, suffix, node: f"!{suffix} {node.value}")  # the name of a function
    remedy = "mend it, or take it out of --include-path"
    try:
        content = yaml.load(read_bytes(file, MOST_BYTES), Loader=loader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{file}: is no YAML: {error.problem}{where}; {remedy}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: is no YAML: {error_text(error)}; {remedy}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: is no task file, which has `task: NAME` and more such lines; {remedy}")
