"""The run directory: the files that the stages of one model read and write, and the record of how each file was made.

A stage is a type: "not calibrated yet" is a missing file. Every file is written under a temporary name and renamed. So
a killed process leaves the last complete state, and perhaps a `*.partial`, which the next call removes, or a `*.work`
folder, with which it goes on. `run.json` has, for each stage, the hashes of its inputs and outputs and its options. A
stage runs again when any of these, or the version of fp8q, has changed, and a file that its stage did not write is
refused.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import JsonValue
from safetensors import SafetensorError

from .. import __version__
from .arithmetic import changed_machine
from .commands import stage_command
from .errors import InputError, NoGraphError
from .files import PARTIAL, disk_errors, locked, read_document, remove, replacing, sha256_file, write_document
from .record import (
    RunRecord,
    StageLog,
    StageRecord,
    library_versions,
    peak_memory_bytes,
    reset_peak_memory,
)
from .undo import undoing

#: The ending of the folder with which a killed stage goes on.
WORK = ".work"
#: The model card in a checkpoint. It is no output in a stage's record: nothing reads it but people, who may edit it.
CARD = "README.md"
#: The file names of the graph, and of the same graph computing in FP32.
GRAPH, GRAPH_FP32 = "model.onnx", "model.fp32.onnx"


def graph_names(adapter: str | None) -> tuple[str, str]:
    """Return the file names of the two graphs of the model, with `adapter` on or (None) without one."""
    return (f"model.{adapter}.onnx", f"model.{adapter}.fp32.onnx") if adapter else (GRAPH, GRAPH_FP32)


Choices_co = TypeVar("Choices_co", covariant=True)
Facts_co = TypeVar("Facts_co", covariant=True)


class Readable(Protocol[Choices_co, Facts_co]):
    """A stage whose record can be read back with types (`stages.pipeline.stage.Stage`)."""

    @property
    def name(self) -> str:
        """The name of the stage in `run.json`."""

    def read(self, recorded: Mapping[str, JsonValue], file: Path) -> tuple[Choices_co, Facts_co]:
        """Return the options and facts of the object `recorded` in `file`; raises InputError for malformed ones."""


class _Path:
    """A path in the run directory, as an attribute of `Run`."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, run: "Run", kind: type | None = None) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class Run:
    """The paths of a run directory, and its record; nothing is read or created until asked for."""

    root: Path

    record_file = _Path("run.json")
    calibration = _Path("calibration.npz")
    evaluation = _Path("evaluation.npz")
    statistics = _Path("statistics.safetensors")
    statistics_json = _Path("statistics.json")
    moments = _Path("moments")
    queries = _Path("queries.safetensors")
    scales = _Path("scales.json")
    attention = _Path("attention.json")
    model = _Path("model")
    card = _Path(f"model/{CARD}")
    onnx = _Path(f"model/{GRAPH}")
    onnx_fp32 = _Path(f"model/{GRAPH_FP32}")
    baselines = _Path("baselines")
    engines = _Path("engines")
    accuracy = _Path("accuracy.json")
    tokens = _Path("tokens.npz")
    top_logits = _Path("top_logits.npz")
    comparison = _Path("compare.json")
    evaluated = _Path("evaluation.json")
    answers = _Path("answers")
    needles = _Path("needles.json")
    sensitivity = _Path("sensitivity.json")
    continuations = _Path("continuations.json")
    tuning = _Path("tune.json")
    distilled = _Path("distilled.safetensors")
    distillation = _Path("distill.json")
    training = _Path("training")
    adapter = _Path("adapter")
    adapter_learning = _Path("adapter.json")
    bench = _Path("bench.json")
    triton = _Path("triton")
    report_html = _Path("report.html")
    report_ipynb = _Path("report.ipynb")

    def exists(self) -> bool:
        """Tell whether the directory has a record, so that at least one stage has begun."""
        return self.record_file.is_file()

    def record(self) -> RunRecord:
        """Read `run.json`; an empty record where there is none yet.

        Raises InputError for a directory that contains other files than a run, and for a malformed record.
        """
        if self.exists():
            return read_document(self.record_file, RunRecord).of(self.record_file)
        if self.root.is_dir() and any(not _is_ours(path) for path in self.root.iterdir()):
            raise InputError(
                self.root, "is not empty and holds no run.json, so it is no fp8q run", "name a new or empty directory"
            )
        if self.root.exists() and not self.root.is_dir():
            raise InputError(self.root, "is a file, not a run directory", "name another with --out")
        return RunRecord()

    def options(self, stage: "Readable[Choices_co, Facts_co]") -> Choices_co:
        """Read back the options of `stage`.

        Raises InputError for a stage that was not run, and for a malformed record.
        """
        return stage.read(self.record().stages[stage.name].options, self.record_file)[0]

    def facts(self, stage: "Readable[Choices_co, Facts_co]") -> Facts_co:
        """Read back the facts of `stage`; raises InputError as `options` does."""
        return stage.read(self.record().stages[stage.name].options, self.record_file)[1]

    def require(self, path: Path, stage: str) -> Path:
        """Return `path`, if it is the file that `stage` wrote.

        Raises InputError with the command to run, when the stage was not run or the file has changed since, and with
        the reason, when the stage is impossible for this model.
        """
        if not self.exists():
            raise InputError(
                self.root,
                "is no fp8q run (there is no run.json)",
                f"make one with `fp8q calibrate MODEL --data TEXT --out {self.root}`",
            )
        recorded, again = self.record().stages.get(stage), stage_command(stage, self.root)
        if stage.startswith("export"):
            self.refuse_without_graph()
        name = str(path.relative_to(self.root))
        if recorded is None or name not in recorded.outputs or not path.is_file():
            raise InputError(path, "is missing", f"`{again}` writes it, run that first")
        if sha256_file(path) != recorded.outputs[name]:
            raise InputError(
                path,
                f"is not the file that `{again}` wrote (its SHA-256 differs from run.json)",
                f"restore it, or delete it and run `{again}` again",
            )
        return path

    def is_current(self, stage: str, inputs: Mapping[str, str], options: Mapping[str, object]) -> bool:
        """Tell whether `stage` was completed with these inputs and options by this version, and its outputs exist.

        Raises InputError for an output that is not the file that the stage wrote.
        """
        recorded = self.record().stages.get(stage)
        asked = (dict(inputs), json.loads(json.dumps(dict(options))), __version__)
        if recorded is None or recorded.unfinished or recorded.refused:
            return False
        if (recorded.inputs, recorded.options, recorded.version) != asked:
            return False
        if not all((self.root / name).is_file() for name in recorded.outputs):
            return False
        for name in recorded.outputs:
            self.require(self.root / name, stage)
        return True

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
        self.record()  # refuses a directory that is no run before anything is written
        with disk_errors(self.root):
            created = self._create()
        with self.lock():
            before = self.record()
            with undoing(lambda: self._give_up(before, name, created)), self._blamed(name):
                self.sweep(name)
                others = {other: done for other, done in before.stages.items() if other != name}
                record = before.model_copy(update={"model": dict(model or before.model), "stages": others})
                write_document(self.record_file, record)
                log, start = StageLog(), time.monotonic()
                reset_peak_memory()
                yield log
                done = StageRecord(
                    inputs=dict(inputs),
                    options=json.loads(json.dumps(dict(options))),
                    outputs={str(path.relative_to(self.root)): sha256_file(path) for path in log.outputs},
                    version=__version__,
                    libraries=library_versions(),
                    notes=log.notes,
                    seconds=round(time.monotonic() - start, 3),
                    peak_memory_bytes=peak_memory_bytes(),
                    machine=log.machine,
                    unfinished=log.unfinished or None,
                    refused=log.refused,
                )
                write_document(self.record_file, record.model_copy(update={"stages": {**others, name: done}}))
                if not log.unfinished:
                    remove(self._work_folder(name))

    @contextmanager
    def amending(self, name: str, path: Path) -> Iterator[None]:
        """Rewrite `path`, an output of the finished stage `name`, in the block, and record the new file.

        Meanwhile the stage counts as not done, so that one killed here is done again; after an error it has its old
        record, and the file must be the old one.
        """
        with self.lock():
            before = self.record()
            others = {other: done for other, done in before.stages.items() if other != name}
            write_document(self.record_file, before.model_copy(update={"stages": others}))
            with undoing(lambda: write_document(self.record_file, before)):
                yield
                old = before.stages[name]
                outputs = old.outputs | {str(path.relative_to(self.root)): sha256_file(path)}
                stages = before.stages | {name: old.model_copy(update={"outputs": outputs})}
                write_document(self.record_file, before.model_copy(update={"stages": stages}))

    def _create(self) -> bool:
        """Create the directory; tell whether it is new."""
        try:
            self.root.mkdir(parents=True)
        except FileExistsError:
            return False
        return True

    def _give_up(self, before: RunRecord, name: str, created: bool) -> None:
        """Remove the half-written files of a failed stage; keep the record of its earlier outputs if they are
        unchanged.
        """
        with suppress(OSError, InputError):
            if name in self.record().stages:  # it was recorded at that moment
                return
        if created:
            shutil.rmtree(self.root, ignore_errors=True)
            return
        self._clear_partial()
        old = before.stages.get(name)
        if old and all(
            (self.root / path).is_file() and sha256_file(self.root / path) == digest
            for path, digest in old.outputs.items()
        ):
            with suppress(OSError, InputError):
                write_document(self.record_file, before)

    def without_graph(self) -> str | None:
        """The reason why the run has no ONNX graph, as `export` recorded it; None where it has one or can have one."""
        exported = self.record().stages.get("export")
        return exported.refused if exported else None

    def refuse_without_graph(self) -> None:
        """Raise InputError, with the reason, where the run has no ONNX graph."""
        if reason := self.without_graph():
            raise NoGraphError(self.root, reason)

    def is_stale(self, stage: str) -> bool:
        """Tell whether an input of the finished `stage` has been written again since."""
        stages = self.record().stages
        outputs = {name: digest for record in stages.values() for name, digest in record.outputs.items()}
        files = {name: digest for name, digest in stages[stage].inputs.items() if "." in name}
        return any(outputs.get(name) != digest for name, digest in files.items())

    def refuse_stale(self, *stages: str) -> None:
        """Raise InputError, with the command to run, when one of `stages` is stale: its outputs belong to older
        inputs.
        """
        for stage in stages:
            if stage in self.record().stages and self.is_stale(stage):
                raise InputError(
                    self.root,
                    f"what the stage {stage} wrote is of other files than are there now, which were made anew since",
                    f"run `{stage_command(stage, self.root)}` again",
                )

    @contextmanager
    def work(
        self, name: str, key: Mapping[str, object], rank: int = 0, note: Callable[[str], None] | None = None
    ) -> Iterator[Path]:
        """A folder in which the running stage `name` keeps its progress for the case that it is killed; removed when
        the stage is done.

        `key`: everything that the contents depend on; a folder left under another key is emptied. Errors of the user or
        the disk leave nothing behind: rank 0's folder is removed when the stage fails. `rank`: each of several
        processes of a stage has a folder of its own, inside that of rank 0. `note` is called where a folder is emptied
        because this machine computes in another way.
        """
        folder = self._work_folder(name, rank)
        written, wanted = folder / "key.json", json.dumps(dict(key), sort_keys=True)
        before = written.read_text(encoding="utf-8") if written.is_file() else None
        if before != wanted:
            if before is not None and note is not None and (changed := changed_machine(before, wanted)):
                note(f"begins anew: an earlier call, which stopped half-way, had {changed}")
            remove(folder)
            folder.mkdir(parents=True)
            with replacing(written) as partial:
                partial.write_text(wanted, encoding="utf-8")
        try:
            yield folder
        except (InputError, OSError, SafetensorError):
            if rank:  # rank 0's is removed with its stage
                self.leave_work(name, rank)
            raise

    @contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Remove the work folder of the stage `name` when the user, or the disk, caused the failure."""
        try:
            with disk_errors(self.root):
                yield
        except InputError:
            with suppress(OSError):  # a rank may still be writing there
                remove(self._work_folder(name))
            raise

    def leave_work(self, name: str, rank: int) -> None:
        """Remove the folder of a rank above 0 and, where it was alone on its machine, the directories around it."""
        shutil.rmtree(self._work_folder(name, rank), ignore_errors=True)
        with suppress(OSError):
            self._work_folder(name).rmdir()
            self.root.rmdir()

    def _work_folder(self, name: str, rank: int = 0) -> Path:
        folder = self.root / f".{name}{WORK}"
        return folder / f"rank-{rank}" if rank else folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock on this run, as long as `files.locked` says.

        Raises InputError where another process holds it, or the directory cannot be written to.
        """
        with disk_errors(self.root), ExitStack() as held:
            try:
                held.enter_context(locked(self.root / LOCK))
            except BlockingIOError:
                raise InputError(
                    self.root, "another fp8q process is working here", "wait for it, or name another directory"
                ) from None
            yield

    def sweep(self, current: str | None = None) -> None:
        """Remove leftovers of killed calls: half-written files, and work folders of finished stages; not the `current`
        stage's.

        The caller holds the lock.
        """
        self._clear_partial()
        for name, done in self.record().stages.items():
            if name != current and not done.unfinished:
                remove(self._work_folder(name))

    def _clear_partial(self) -> None:
        for path in [*self.root.glob(f"**/.*{PARTIAL}")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


LOCK = ".lock"


def _is_ours(path: Path) -> bool:
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith((PARTIAL, WORK)))
