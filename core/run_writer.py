"""Write to a run directory: run one stage at a time, and record what it made (`output_folder`)."""

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from .errors import InputError
from .files import remove_empty, sha256_file, write_document
from .output_folder import OutputFolder, WorkFolder
from .record import (
    RunRecord,
    StageLog,
    StageRecord,
    library_versions,
    peak_memory_bytes,
    reset_peak_memory,
)
from .run import Run
from .run_files import is_of_a_run
from .undo import undoing


def digests(root: Path, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of `files`, by their names in the directory `root`."""
    return {str(path.relative_to(root)): sha256_file(path) for path in files}


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
        with self._folder.opened() as created:
            if not all(map(is_of_a_run, self.run.root.iterdir())):  # another process has written here since it was made
                created = []
            before = self.run.record()
            with undoing(lambda: self._give_up(before, name, created)), WorkFolder(self.run.root, name).blamed():
                self.sweep(name)
                record = before.model_copy(update={"model": dict(model or before.model)}).with_stage(name, None)
                write_document(self.run.record_file, record)
                log = StageLog()
                start = time.monotonic()
                reset_peak_memory()
                yield log
                done = StageRecord(
                    inputs=dict(inputs),
                    options=json.loads(json.dumps(dict(options))),
                    outputs=digests(self.run.root, log.outputs),
                    version=__version__,
                    libraries=library_versions(),
                    notes=log.notes,
                    seconds=round(log.seconds_before + time.monotonic() - start, 3),
                    peak_memory_bytes=peak_memory_bytes(),
                    machine=log.machine,
                    unfinished=log.unfinished or None,
                    refused=log.refused,
                )
                write_document(self.run.record_file, record.with_stage(name, done))
                if not log.unfinished:
                    WorkFolder(self.run.root, name).remove()

    @contextmanager
    def amending(self, name: str, path: Path) -> Iterator[None]:
        """Rewrite `path`, an output of the finished stage `name`, in the block, and record the new file.

        Meanwhile the stage counts as not done, so that one killed here is done again; after an error it has its old
        record, and the file must be the old one.
        """
        with self._folder.lock():
            before = self.run.record()
            write_document(self.run.record_file, before.with_stage(name, None))
            with undoing(lambda: write_document(self.run.record_file, before)):
                yield
                old = before.stages[name]
                done = old.model_copy(update={"outputs": old.outputs | digests(self.run.root, [path])})
                write_document(self.run.record_file, before.with_stage(name, done))

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
        self._folder.sweep()
        old = before.stages.get(name)
        if old and all(
            (self.run.root / path).is_file() and sha256_file(self.run.root / path) == digest
            for path, digest in old.outputs.items()
        ):
            with suppress(OSError, InputError):
                write_document(self.run.record_file, before)

    def forget(self, name: str) -> None:
        """Remove the record of the stage `name`, if there is one, so that its progress is kept until it is done."""
        with self._folder.lock():
            record = self.run.record()
            if name in record.stages:
                write_document(self.run.record_file, record.with_stage(name, None))

    def sweep(self, current: str | None = None) -> None:
        """Remove leftovers of killed calls: half-written files, and work folders of finished stages; not the `current`
        stage's.

        The caller holds the lock.
        """
        self._folder.sweep()
        for name, done in self.run.record().stages.items():
            if name != current and not done.unfinished:
                WorkFolder(self.run.root, name).remove()

    @property
    def _folder(self) -> OutputFolder:
        return OutputFolder(self.run.root)
