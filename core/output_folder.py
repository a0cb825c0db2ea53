"""Write to a directory that is an output: one process at a time, under a lock, and go on where a killed one stopped.

A run, the results of a comparison and a converted checkpoint are such directories. Every file is written under a
temporary name and renamed (`files.replacing`). So a killed process leaves the last complete state, and perhaps a
`*.partial`, which the next call removes, or a `*.work` folder, with which it goes on. Only who holds the lock looks at
what is there, and removes anything.

The key of a work folder has the arithmetic of the machine where that computes: sums in another order have other bits,
so what a killed stage left there is of use only where they are made alike.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from pydantic import BaseModel
from safetensors import SafetensorError

from .errors import InputError
from .files import PARTIAL, disk_errors, locked, make_directory, reading, remove, remove_empty, replacing
from .run_files import LOCK, WORK


@dataclass(frozen=True)
class OutputFolder:
    """The directory `root`, which one process at a time writes to.

    Where another holds the lock, the error says what that is `doing`, with a `remedy`, of the directory as the user
    named it (`subject`, by default its path).
    """

    root: Path
    doing: str = "working"
    subject: str | None = None
    remedy: str = "wait for it, or name another directory"
    lock_file: str = LOCK

    @contextmanager
    def opened(self) -> Iterator[list[Path]]:
        """Make the directory where it is not there, and hold its lock; yield the directories that were made, the
        innermost first.
        """
        with disk_errors(self.root):
            created = make_directory(self.root)
        with self.lock():
            yield created

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock, as long as `files.locked` says.

        Raises InputError where another process holds it, or the directory cannot be written to.
        """
        with disk_errors(self.root), ExitStack() as held:
            try:
                held.enter_context(locked(self.root / self.lock_file))
            except BlockingIOError:
                fault = f"another fp8q process is {self.doing} here"
                raise InputError(self.subject or self.root, fault, self.remedy) from None
            yield

    def sweep(self) -> None:
        """Remove half-written files. The caller holds the lock."""
        for path in [*self.root.glob(f"**/.*{PARTIAL}")]:
            remove(path)

    def leave(self, created: list[Path]) -> None:
        """Remove the lock, which the caller holds, and the directories `created`, where nothing else is in them."""
        (self.root / self.lock_file).unlink(missing_ok=True)
        remove_empty(created)


#: The facts of a work folder's key that describe the machine, and the text for each.
_ARITHMETIC: dict[str, Callable[[object], str]] = {
    "threads": lambda count: f"{count} threads",
    "device": lambda name: f"device {str(name).upper()}",
    "bf16_products": lambda name: f"BF16 GEMMs computed in {str(name).upper()}",
}


def changed_machine(before: str, wanted: str) -> str:
    """List the facts of the machine that differ between two keys of a work folder, with the values of the first.

    Empty where none differ, or a key does not parse.
    """
    try:
        old, new = ({"bf16_products": "bf16"} | json.loads(key) for key in (before, wanted))
    except (ValueError, TypeError):
        return ""
    return ", ".join(
        tell(old[name]) for name, tell in _ARITHMETIC.items() if name in old and old[name] != new.get(name)
    )


@dataclass(frozen=True)
class WorkFolder:
    """The folder in the directory `root` in which the work `name`, such as a stage, keeps its progress for the case
    that it is killed.

    `rank`: each of several processes of a stage has a folder of its own, inside that of rank 0.
    """

    root: Path
    name: str
    rank: int = 0

    @property
    def path(self) -> Path:
        """The folder, which need not be there."""
        folder = self.root / f".{self.name}{WORK}"
        if self.rank:
            return folder / f"rank-{self.rank}"
        return folder

    @contextmanager
    def opened(self, key: Mapping[str, object], note: Callable[[str], None] | None = None) -> Iterator[Path]:
        """Open the folder for a block; it is removed when the stage is done.

        `key`: everything that the contents depend on; a folder left under another key is emptied. Errors of the user or
        the disk leave nothing behind: rank 0's folder is removed when the stage fails. `note` is called where a folder
        is emptied because this machine computes in another way.
        """
        written = self._key_file
        wanted = key_text(key)
        before = written.read_text(encoding="utf-8") if written.is_file() else None
        if before != wanted:
            if before is not None and note is not None and (changed := changed_machine(before, wanted)):
                note(f"begins anew: an earlier call, which stopped half-way, had {changed}")
            self.remove()
            self.path.mkdir(parents=True)
            with replacing(written) as partial:
                partial.write_text(wanted, encoding="utf-8")
        try:
            yield self.path
        except (InputError, OSError, SafetensorError):
            if self.rank:  # rank 0's is removed with its stage
                self.leave()
            raise

    @contextmanager
    def until_done(self, key: Mapping[str, object]) -> Iterator[Path]:
        """Open the folder for a block, and remove it at its end, or where the user or the disk causes a failure."""
        with self.blamed(), self.opened(key) as folder:
            yield folder
        self.remove()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Remove the folder when the user, or the disk, causes a failure in the block: nothing goes on from there."""
        try:
            with disk_errors(self.root):
                yield
        except InputError:
            with suppress(OSError):  # a rank may still be writing there
                self.remove()
            raise

    def left(self, key: Mapping[str, object]) -> Path | None:
        """Return the folder, if a killed call of the stage left its progress under this `key`."""
        left = self._key_file.is_file() and self._key_file.read_text(encoding="utf-8") == key_text(key)
        return self.path if left else None

    def leave(self) -> None:
        """Remove the folder of a rank above 0 and, where it was alone on its machine, the directories around it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
            self.root.rmdir()

    def remove(self) -> None:
        """Remove the folder, with those of all ranks."""
        remove(self.path)

    @property
    def _key_file(self) -> Path:
        return self.path / "key.json"


def key_text(key: Mapping[str, object]) -> str:
    """The text of a key, which is the same for equal keys."""
    return json.dumps(dict(key), sort_keys=True)


@dataclass
class Saved:
    """The progress of a stage, a base class: its fields, which JSON can store and which have defaults, are saved in the
    file at `path`, in a work folder. Of pydantic's models in them the subclass makes models again.
    """

    path: Path

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the results in the file at `path`, empty where there is none; raises InputError for a damaged file."""
        with reading(path, "what a killed call left", "remove it"):
            if path.is_file():
                return cls(path, **json.loads(path.read_text(encoding="utf-8")))
            return cls(path)

    def save(self) -> None:
        """Write all fields to the file."""
        values = {saved.name: getattr(self, saved.name) for saved in fields(self) if saved.name != "path"}
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(values, default=BaseModel.model_dump), encoding="utf-8")
