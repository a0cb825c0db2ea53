"""Check the folders of task files that the user gives, before lm-eval indexes them.

lm-eval passes over a file that does not parse without a word, and then has no task of its name. A task file may name
Python functions (`!function module.name`) or a `class`, which lm-eval imports: such a folder is code. Here nothing is
imported. Of two files with one name lm-eval takes the first. Rows of questions that are no objects end the process in
pyarrow 26's reader of JSON (a segmentation fault), so they are looked for before.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...calibrate.input.untrusted import error_text, foreign, read_bytes
from ...core.errors import InputError
from ...core.files import plain_text

#: The most bytes of a task file; those of lm-eval have less than 100 kB.
MOST_BYTES = 8 << 20
#: The most bytes of questions in one list, which is read whole, here and by lm-eval.
MOST_LIST_BYTES = 256 << 20
MEND = "mend it, or take it out of --include-path"
#: The most bytes of a row that are read at a time.
PIECE = 1 << 20
#: The folders that lm-eval passes over.
IGNORED = ("__pycache__", ".ipynb_checkpoints")


class TaskFile(BaseModel):
    """A task file, as lm-eval's index reads it: a file with a `class` or `task` is a task, and one with a `group` a
    group of the tasks that `task` lists; one with neither is included by others.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    task: str | list[Any] | None = None
    group: str | None = None
    tag: str | list[str] | None = None
    repeats: int | None = Field(default=None, ge=1)
    num_fewshot: int | None = Field(default=None, ge=0)
    class_: Any = Field(default=None, alias="class")
    dataset_kwargs: Any = None

    @property
    def name(self) -> str | None:
        """The name that a task or group is asked by; None for a file that others include."""
        if self.group is not None and self.class_ is None:
            return self.group
        if isinstance(self.task, str):
            return self.task
        return None

    @property
    def questions(self) -> list[Path]:
        """The local files of JSON that the questions are read from."""
        kwargs = self.dataset_kwargs if isinstance(self.dataset_kwargs, dict) else {}
        paths = [Path(name) for name in _texts(kwargs.get("data_files"))]
        return [path for path in paths if path.suffix in (".json", ".jsonl") and path.is_file()]


def _texts(value: object) -> Iterator[str]:
    """Every text in a value, its lists and its mappings."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(part)


def check_task_files(folders: Sequence[Path]) -> None:
    """Raise InputError for a folder that is not there or has no task file, for a file in it that is no task file, for
    two files that name one task, and for a task's questions of which one is no object.
    """
    named: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"--include-path {folder}", "there is no such folder", "give one that has task files (YAML)"
            )
        files = sorted(file for file in folder.rglob("*.yaml") if not {*IGNORED} & {*file.parts})
        if not files:
            raise InputError(f"--include-path {folder}", "holds no task file (*.yaml)", "give a folder that does")
        for file in files:
            task = check_task_file(file)
            for questions in task.questions:
                check_questions(questions)
            name = task.name
            if name is not None and named.setdefault(name, file) != file:
                raise InputError(
                    file,
                    f"names the task {name}, as {named[name]} does",
                    "name each task once, or take one of the files out of --include-path",
                )


def check_questions(file: Path) -> None:
    """Raise InputError for a file of questions, JSON lines or a list, with one that is no object. One object over
    several lines, which holds the questions in a field, is left to lm-eval.
    """
    with foreign(lambda error: _unreadable(file, error)), open(file, "rb") as rows:
        begins = rows.readline(PIECE).removeprefix(b"\xef\xbb\xbf").strip() or rows.readline(PIECE).strip()
    if file.suffix == ".json" and begins.startswith(b"["):
        check_list(file)
    elif file.suffix != ".json" or not begins.startswith(b"{") or begins.endswith(b"}"):
        check_rows(file)


def _unreadable(file: Path, error: BaseException) -> InputError:
    return InputError(file, f"cannot be read ({error_text(error)})", MEND)


def check_list(file: Path) -> None:
    """Raise InputError for a list of questions that does not parse, or has one that is no object; a list of texts alone
    is read too.
    """
    try:
        entries = json.loads(read_bytes(file, MOST_LIST_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(file, f"does not parse: {error_text(error)}", MEND) from None
    if all(isinstance(entry, str) for entry in entries):
        return
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise InputError(file, f"entry {number:,} is no JSON object, such as a question is", MEND)


def check_rows(file: Path) -> None:
    """Raise InputError for a row of a file of JSON lines that does not begin as an object does."""
    number = 0
    begins = True
    with (
        foreign(lambda error: _unreadable(file, error)),
        open(file, "rb") as rows,
    ):
        while piece := rows.readline(PIECE):
            number += begins
            row = piece.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip()
            if begins and row and not row.startswith(b"{"):
                raise InputError(file, f"row {number:,} is no JSON object, such as a question is", MEND)
            begins = piece.endswith(b"\n")


def check_task_file(file: Path) -> TaskFile:
    """Read a file's task or group; raise InputError, with the place, where it is no YAML, no mapping, or
    names a task by something else than text.
    """
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda _, suffix, node: f"!{suffix} {node.value}")  # the name of a function
    try:
        content = yaml.load(read_bytes(file, MOST_BYTES), Loader=loader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(file, f"is no YAML: {error.problem}{where}", MEND) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(file, f"is no YAML: {error_text(error)}", MEND) from None
    if not isinstance(content, dict):
        raise InputError(file, "is no task file, which has `task: NAME` and more such lines", MEND)
    try:
        return TaskFile.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InputError(file, f"`{first['loc'][0]}` {plain_text(first)}", MEND) from None
