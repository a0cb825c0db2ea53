"""The directory that `fp8q convert` writes to: one process holds it, goes on after a kill, and leaves it clean.

While it is written it holds `PROGRESS`, by which a killed call is recognized. Only who holds the lock looks
at what is there, and removes anything. Everything is written under a temporary name and renamed, so that a link that
somebody put into the directory is replaced, and its target never written.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..calibrate.checkpoint.weights import INDEX_END, WEIGHTS_END
from ..calibrate.input.untrusted import exists
from ..core.errors import Fp8qError, InputError
from ..core.files import (
    PARTIAL,
    Strict,
    disk_errors,
    is_own_file,
    locked,
    make_directory,
    read_document,
    remove,
    remove_empty,
    write_document,
)
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
    with disk_errors(out):
        made = make_directory(out)
        had_lock = exists(out / LOCK)
        with _held(out):
            fresh = not exists(out / PROGRESS)
            try:
                if fresh:
                    check_contents(out)  # again, since another call may have written it meanwhile
                    _check_room(out, planned, 0)
                else:
                    _go_on(out, planned, progress)
            except InputError:
                if not had_lock:
                    (out / LOCK).unlink(missing_ok=True)
                remove_empty(made)
                raise
            sweep = partial(_sweep, out)
            try:
                write_document(out / PROGRESS, ConvertProgress(key=planned.key))
                with at_end(sweep):
                    yield
                (out / PROGRESS).unlink()
                (out / LOCK).unlink()
            except Fp8qError:
                sweep()
                if fresh:
                    _remove_written(out, planned, made)
                raise
            except BaseException:
                sweep()
                raise


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Hold the lock of the directory; raises InputError where another process does."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(out / LOCK))
        except BlockingIOError:
            raise InputError(out, "another fp8q process is writing here", "wait for it, or name another") from None
        yield


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


def _sweep(out: Path) -> None:
    """Remove files that are not whole."""
    for partly in out.glob(f"**/.*{PARTIAL}"):
        remove(partly)


def _remove_written(out: Path, planned: PlannedFiles, made: list[Path]) -> None:
    """Remove what a failed call wrote, and the directories that it made, where nothing else is in them."""
    for name in (*planned.names, PROGRESS):
        with suppress(NotADirectoryError):
            (out / name).unlink(missing_ok=True)
    for folder in sorted(planned.folders, reverse=True):
        remove_empty([out / folder])
    (out / LOCK).unlink(missing_ok=True)
    remove_empty(made)
