"""Tell whether a repository is fp8q's: one that fp8q wrote is replaced, anything else is left alone.

`repository.json` at its top, which Triton ignores, lists the files that were written. Any other file belongs to
somebody: a plan that was put there, a model of their own. Only the caches that Python leaves beside executed code do
not count.
"""

from collections.abc import Collection
from pathlib import Path

from ... import __version__
from ...core.errors import InputError
from ...core.files import Strict, disk_errors, read_document

MARK = "repository.json"
CACHE = "__pycache__"


class Mark(Strict):
    """`repository.json`: the version of fp8q, and the files that it wrote, relative to the repository."""

    fp8q: str
    files: list[str]


def mark_written(repository: Path) -> None:
    """Mark a repository that was just written."""
    files = sorted(_files(repository))
    (repository / MARK).write_text(
        Mark(fp8q=__version__, files=[*files, MARK]).model_dump_json(indent=1) + "\n", encoding="utf-8"
    )


def refuse_foreign(out: Path, recorded: Collection[str] = ()) -> None:
    """Raise InputError if fp8q did not write the files in `out`; `recorded`: files there that a run's record lists."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise InputError(out, "is no directory, and the Triton repository would be one", "name another with --out")
    with disk_errors(out):
        there = _files(out)
        known = {*recorded, *_marked(out)}
    if there and not known:
        raise InputError(
            out, "is not empty and is no repository that fp8q wrote", "name a new or empty directory with --out"
        )
    if foreign := sorted(there - known):
        raise InputError(
            out,
            f"holds {foreign[0]}, which `fp8q triton` did not write and would take away",
            "move it, or name another directory with --out",
        )


def _marked(out: Path) -> list[str]:
    try:
        return read_document(out / MARK, Mark).files
    except InputError:
        return []


def _files(folder: Path) -> set[str]:
    """List the files and the empty folders in a folder, as names relative to it."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if CACHE not in path.relative_to(folder).parts
        and (path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    }
