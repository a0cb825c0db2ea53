"""Write to a run directory: run one stage at a time, under a lock, with a folder of progress for the case that it dies.

Every file is written under a temporary name and renamed. So a killed process leaves the last complete state, and
perhaps a `*.partial`, which the next call removes, or a `*.work` folder, with which it goes on.

The key of a work folder has the arithmetic of the machine: sums in another order have other bits, so what a killed
stage left there is of use only where they are made alike.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from .. import __version__
from .errors import InputError
from .files import (
    PARTIAL,
    disk_errors,
    locked,
    make_directory,
    remove,
    remove_empty,
    replacing,
    sha256_file,
    write_document,
)
from .record import (
    RunRecord,
    StageLog,
    StageRecord,
    library_versions,
    peak_memory_bytes,
    reset_peak_memory,
)
from .run import Run
from .run_files import LOCK, WORK, is_of_a_run
from .undo import undoing

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
    """The folder in which the running `stage` of `run` keeps its progress for the case that it is killed.

    `rank`: each of several processes of a stage has a folder of its own, inside that of rank 0.
    """

    run: Run
    stage: str
    rank: int = 0

    @property
    def path(self) -> Path:
        """The folder, which need not be there."""
        folder = self.run.root / f".{self.stage}{WORK}"
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

    def left(self, key: Mapping[str, object]) -> Path | None:
        """Return the folder, if a killed call of the stage left its progress under this `key`."""
        left = self._key_file.is_file() and self._key_file.read_text(encoding="utf-8") == key_text(key)
        return self.path if left else None

    def leave(self) -> None:
        """Remove the folder of a rank above 0 and, where it was alone on its machine, the directories around it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
            self.run.root.rmdir()

    def remove(self) -> None:
        """Remove the folder, with those of all ranks."""
        remove(self.path)

    @property
    def _key_file(self) -> Path:
        return self.path / "key.json"


def key_text(key: Mapping[str, object]) -> str:
    """The text of a key, which is the same for equal keys."""
    return json.dumps(dict(key), sort_keys=True)


@dataclass(frozen=True)
class RunWriter:
    """The process that writes to `run`."""

    run: Run

    @contextmanager
    def stage(
        self,
        name: str,
        inputs: Mapping[str, str],
        options: Mapping[str, object],
        model: Mapping[str, str] | None = None,
    ) -> Iterator[StageLog]:
        """Run one stage: lock the directory, remove leftovers of a killed process, and record the outputs at the end.

        The old record of the stage is removed first, so that a stage that dies does not count as done. `model`: the
        identity of the source model, to record. If the stage fails, a directory that was created for it is removed.
        """
        self.run.record()  # refuses a directory that is no run before anything is written
        with disk_errors(self.run.root):
            created = make_directory(self.run.root)
        with self.lock():
            if not all(map(is_of_a_run, self.run.root.iterdir())):  # another process has written here since it was made
                created = []
            before = self.run.record()
            with undoing(lambda: self._give_up(before, name, created)), self._blamed(name):
                self.sweep(name)
                others = {other: done for other, done in before.stages.items() if other != name}
                record = before.model_copy(update={"model": dict(model or before.model), "stages": others})
                write_document(self.run.record_file, record)
                log = StageLog()
                start = time.monotonic()
                reset_peak_memory()
                yield log
                done = StageRecord(
                    inputs=dict(inputs),
                    options=json.loads(json.dumps(dict(options))),
                    outputs={str(path.relative_to(self.run.root)): sha256_file(path) for path in log.outputs},
                    version=__version__,
                    libraries=library_versions(),
                    notes=log.notes,
                    seconds=round(log.seconds_before + time.monotonic() - start, 3),
                    peak_memory_bytes=peak_memory_bytes(),
                    machine=log.machine,
                    unfinished=log.unfinished or None,
                    refused=log.refused,
                )
                write_document(self.run.record_file, record.model_copy(update={"stages": {**others, name: done}}))
                if not log.unfinished:
                    WorkFolder(self.run, name).remove()

    @contextmanager
    def amending(self, name: str, path: Path) -> Iterator[None]:
        """Rewrite `path`, an output of the finished stage `name`, in the block, and record the new file.

        Meanwhile the stage counts as not done, so that one killed here is done again; after an error it has its old
        record, and the file must be the old one.
        """
        with self.lock():
            before = self.run.record()
            others = {other: done for other, done in before.stages.items() if other != name}
            write_document(self.run.record_file, before.model_copy(update={"stages": others}))
            with undoing(lambda: write_document(self.run.record_file, before)):
                yield
                old = before.stages[name]
                outputs = old.outputs | {str(path.relative_to(self.run.root)): sha256_file(path)}
                stages = before.stages | {name: old.model_copy(update={"outputs": outputs})}
                write_document(self.run.record_file, before.model_copy(update={"stages": stages}))

    def _give_up(self, before: RunRecord, name: str, created: list[Path]) -> None:
        """Remove the half-written files of a failed stage; keep the record of its earlier outputs if they are
        unchanged.
        """
        with suppress(OSError, InputError):
            if name in self.run.record().stages:  # it was recorded at that moment
                return
        if created:
            shutil.rmtree(self.run.root, ignore_errors=True)
            remove_empty(created[1:])
            return
        self._clear_partial()
        old = before.stages.get(name)
        if old and all(
            (self.run.root / path).is_file() and sha256_file(self.run.root / path) == digest
            for path, digest in old.outputs.items()
        ):
            with suppress(OSError, InputError):
                write_document(self.run.record_file, before)

    @contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Remove the work folder of the stage `name` when the user, or the disk, caused the failure."""
        try:
            with disk_errors(self.run.root):
                yield
        except InputError:
            with suppress(OSError):  # a rank may still be writing there
                WorkFolder(self.run, name).remove()
            raise

    def forget(self, name: str) -> None:
        """Remove the record of the stage `name`, if there is one, so that its progress is kept until it is done."""
        with self.lock():
            record = self.run.record()
            if name in record.stages:
                stages = {other: done for other, done in record.stages.items() if other != name}
                write_document(self.run.record_file, record.model_copy(update={"stages": stages}))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock on this run, as long as `files.locked` says.

        Raises InputError where another process holds it, or the directory cannot be written to.
        """
        with disk_errors(self.run.root), ExitStack() as held:
            try:
                held.enter_context(locked(self.run.root / LOCK))
            except BlockingIOError:
                raise InputError(
                    self.run.root, "another fp8q process is working here", "wait for it, or name another directory"
                ) from None
            yield

    def sweep(self, current: str | None = None) -> None:
        """Remove leftovers of killed calls: half-written files, and work folders of finished stages; not the `current`
        stage's.

        The caller holds the lock.
        """
        self._clear_partial()
        for name, done in self.run.record().stages.items():
            if name != current and not done.unfinished:
                WorkFolder(self.run, name).remove()

    def _clear_partial(self) -> None:
        for path in [*self.run.root.glob(f"**/.*{PARTIAL}")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
