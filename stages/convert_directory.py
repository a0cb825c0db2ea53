"""The directory that `fp8q convert` writes to: one process holds it, goes on after a kill, and leaves it clean.

While it is written it holds `PROGRESS`, by which a killed call is recognized (`OutputFolder`). What is written replaces
a link that somebody put into the directory, whose target is never written.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..calibrate.checkpoint.weights import INDEX_END, WEIGHTS_END
from ..calibrate.input.untrusted import exists
from ..core.errors import Fp8qError, InputError
from ..core.files import PARTIAL, Strict, is_own_file, read_document, remove, remove_empty, write_document
from ..core.output_folder import OutputFolder
from ..core.reporter import Reporter
from ..core.undo import at_end

#: The file of a directory that is being written, and its lock.
PROGRESS = ".convert.json"
LOCK = ".convert.lock"


class ConvertProgress(Strict):
    """The record of a directory that is being written: what is converted, in one digest."""

    key: str


@dataclass(frozen=True)
class PlannedFiles:
    """The names of all files that a conversion writes: `shards` of weights and `others`, relative to its directory, of
    which all take `nbytes`; `key`: a digest of what is converted.
    """

    shards: frozenset[str]
    others: frozenset[str]
    nbytes: int
    key: str

    @property
    def names(self) -> frozenset[str]:
        """The names of all files."""
        return self.shards | self.others

    @property
    def folders(self) -> frozenset[str]:
        """The folders that they lie in."""
        return frozenset(str(parent) for name in self.others for parent in Path(name).parents) - {"."}


def check_contents(out: Path) -> None:
    """Raise InputError for a directory that holds anything but a convert in progress, or what one began with."""
    begun = {LOCK, f".{PROGRESS}{PARTIAL}", f".{PROGRESS}.old{PARTIAL}"}
    if out.is_dir() and not exists(out / PROGRESS) and any(path.name not in begun for path in out.iterdir()):
        raise InputError(out, "is not empty, and holds no convert in progress", "name a new or empty directory")


@contextmanager
def writing(out: Path, planned: PlannedFiles, progress: Reporter) -> Iterator[None]:
    """Hold the directory `out` while it is written; leave nothing of a call that fails, and what is finished of one
    that is killed.

    Raises InputError where another process writes there, and leaves all of it to that.
    """
    folder = OutputFolder(out, "writing", remedy="wait for it, or name another", lock_file=LOCK)
    had_lock = exists(out / LOCK)
    with folder.opened() as created:
        fresh = not exists(out / PROGRESS)
        try:
            if fresh:
                check_contents(out)  # again, since another call may have written it meanwhile
                _check_room(out, planned, 0)
            else:
                _go_on(out, planned, progress)
        except InputError:
            if not had_lock:
                folder.leave(created)
            raise
        try:
            write_document(out / PROGRESS, ConvertProgress(key=planned.key))
            with at_end(folder.sweep):
                yield
            (out / PROGRESS).unlink()
            (out / LOCK).unlink()
        except BaseException as error:
            folder.sweep()
            if fresh and isinstance(error, Fp8qError):
                _remove_written(out, planned)
                folder.leave(created)
            raise


def _go_on(out: Path, planned: PlannedFiles, progress: Reporter) -> None:
    """Clear the directory of a killed call of all but its finished files of weights, so that nothing stays in it that
    is not written by this call. Raises InputError for another model's, for what no conversion writes, and for a disk
    without the room; then nothing is changed.
    """
    if read_document(out / PROGRESS, ConvertProgress).key != planned.key:
        raise InputError(
            out, "holds a convert in progress of another model, or with other options", "remove it, or name another"
        )
    finished = [name for name in planned.shards if is_own_file(out / name)]
    stale = [*_stale(out, "", planned)]
    _check_room(out, planned, sum((out / name).stat().st_size for name in finished))
    for name in stale:
        remove(out / name)
        if name not in planned.names and not name.endswith(PARTIAL):
            progress.note(f"{name}: was removed from {out}, since it is not of this conversion")


def _stale(out: Path, prefix: str, planned: PlannedFiles) -> Iterator[str]:
    """Yield the names of what is removed before a killed call is gone on with: links, weights of others, and whatever
    is written anew.
    """
    for path in sorted((out / prefix).iterdir()):
        name = f"{prefix}{path.name}"
        if name in (PROGRESS, LOCK) or (name in planned.shards and is_own_file(path)):
            continue
        if name in planned.folders and path.is_dir() and not path.is_symlink():
            yield from _stale(out, f"{name}/", planned)
        elif path.is_symlink() or (path.is_file() and _is_written(name, planned)):
            yield name
        else:
            raise InputError(
                path, "is not of the conversion in progress there", "move it away, or name another with --out"
            )


def _is_written(name: str, planned: PlannedFiles) -> bool:
    """Tell whether a conversion writes files of this name."""
    return name in planned.names or name.endswith((PARTIAL, WEIGHTS_END, INDEX_END))


def _check_room(out: Path, planned: PlannedFiles, done: int) -> None:
    free = shutil.disk_usage(out).free
    needed = planned.nbytes - done
    if free < needed:
        raise InputError(
            out, f"has {free:,} bytes free, and the checkpoint takes {needed:,}", "free some, or name another"
        )


def _remove_written(out: Path, planned: PlannedFiles) -> None:
    """Remove what a failed call wrote, and the folders of it, where nothing else is in them."""
    for name in (*planned.names, PROGRESS):
        with suppress(NotADirectoryError):
            (out / name).unlink(missing_ok=True)
    for folder in sorted(planned.folders, reverse=True):
        remove_empty([out / folder])
