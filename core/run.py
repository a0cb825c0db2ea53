"""The run directory: what one model's stages read and write, and the record of how each file came about.

A stage is a type: "not calibrated yet" is a missing file. Every file is written under a temporary name and
renamed, so whatever a killed process leaves is either the last good state, a `*.partial` that the next call
removes, or a `*.work` folder that it goes on from. `run.json` keeps, for each stage, the hashes of what it read and
wrote and the options it was given: a stage is done again when any of these, or the version of fp8q, has changed, and a
file that is not the one its stage wrote is refused instead of used.
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
from .errors import InputError
from .files import PARTIAL, disk_errors, locked, read_document, remove, replacing, sha256_file, write_document
from .record import (
    RunRecord,
    StageLog,
    StageRecord,
    library_versions,
    peak_memory_bytes,
    reset_peak_memory,
    stage_command,
)
from .undo import undoing

#: How the folder ends that a killed stage goes on from.
WORK = ".work"
#: What the graph is called beside its weights, and the same graph computing in FP32.
GRAPH, GRAPH_FP32 = "model.onnx", "model.fp32.onnx"


def graph_names(adapter: str | None) -> tuple[str, str]:
    """Return the names of the two graphs of the model with an adapter beside it; None: without."""
    return (f"model.{adapter}.onnx", f"model.{adapter}.fp32.onnx") if adapter else (GRAPH, GRAPH_FP32)


Choices_co = TypeVar("Choices_co", covariant=True)
Facts_co = TypeVar("Facts_co", covariant=True)


class Readable(Protocol[Choices_co, Facts_co]):
    """A stage whose record is read back typed (`stages.shared.stage.Stage`)."""

    @property
    def name(self) -> str:
        """Return the name that `run.json` has the stage under."""

    def read(self, recorded: Mapping[str, JsonValue], file: Path) -> tuple[Choices_co, Facts_co]:
        """Return the options and facts `recorded` in `file`; raises InputError where they do not read."""


class _Path:
    """A path in the run directory, as an attribute of `Run`."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, run: "Run", kind: type | None = None) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class Run:
    """A run directory. Paths only: nothing is read or made until asked for."""

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
    onnx = _Path(f"model/{GRAPH}")
    onnx_fp32 = _Path(f"model/{GRAPH_FP32}")
    baselines = _Path("baselines")
    engines = _Path("engines")
    accuracy = _Path("accuracy.json")
    tokens = _Path("tokens.npz")
    sensitivity = _Path("sensitivity.json")
    continuations = _Path("continuations.json")
    tuning = _Path("tune.json")
    bench = _Path("bench.json")
    triton = _Path("triton")
    report_html = _Path("report.html")
    report_ipynb = _Path("report.ipynb")

    def exists(self) -> bool:
        """Tell whether a stage was begun here."""
        return self.record_file.is_file()

    def record(self) -> RunRecord:
        """Read `run.json`; an empty record where there is none yet.

        Raises InputError when the directory holds other things than a run, or the file does not read.
        """
        if self.exists():
            return read_document(self.record_file, RunRecord).of(self.record_file)
        if self.root.is_dir() and any(not _is_ours(path) for path in self.root.iterdir()):
            raise InputError(
                f"{self.root}: is not empty and holds no run.json, so it is no fp8q run; name a new or empty directory"
            )
        if self.root.exists() and not self.root.is_dir():
            raise InputError(f"{self.root}: is a file, not a run directory; name another with --out")
        return RunRecord()

    def options(self, stage: "Readable[Choices_co, Facts_co]") -> Choices_co:
        """Read back the options that `stage` was run with.

        Raises InputError where it was not run, or its record does not read.
        """
        return stage.read(self.record().stages[stage.name].options, self.record_file)[0]

    def facts(self, stage: "Readable[Choices_co, Facts_co]") -> Facts_co:
        """Read back what `stage` found beside its options. Raises InputError as `options` does."""
        return stage.read(self.record().stages[stage.name].options, self.record_file)[1]

    def require(self, path: Path, stage: str) -> Path:
        """Return `path` when it is the file that `stage` wrote.

        Raises InputError, naming the command to run, when the stage has not been run or the file has been changed, and
        with the reason where it cannot be done of this model.
        """
        if not self.exists():
            raise InputError(
                f"{self.root}: is no fp8q run (there is no run.json); make one with `fp8q calibrate MODEL --data TEXT "
                f"--out {self.root}`"
            )
        recorded, again = self.record().stages.get(stage), stage_command(stage, self.root)
        if stage.startswith("export"):
            self.refuse_without_graph()
        name = str(path.relative_to(self.root))
        if recorded is None or name not in recorded.outputs or not path.is_file():
            raise InputError(f"{path}: is missing; `{again}` writes it, run that first")
        if sha256_file(path) != recorded.outputs[name]:
            raise InputError(
                f"{path}: is not the file that `{again}` wrote (its SHA-256 differs from run.json); restore it, or "
                f"delete it and run `{again}` again"
            )
        return path

    def is_current(self, stage: str, inputs: Mapping[str, str], options: Mapping[str, object]) -> bool:
        """Tell whether all of `stage` was run with just these inputs and options by this version, and its outputs are
        there.

        Raises InputError when an output is there but is not what the stage wrote.
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
        """Run one stage: lock the directory, clear what a killed process left, and record the outputs at the end.

        The record of the stage is dropped first, so that a stage that dies half-way does not count as done. `model` is
        kept as the identity of the source model. A directory that was made for a stage that failed is removed.
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

    def _create(self) -> bool:
        """Make the directory; whether it was not there before."""
        try:
            self.root.mkdir(parents=True)
        except FileExistsError:
            return False
        return True

    def _give_up(self, before: RunRecord, name: str, created: bool) -> None:
        """Leave nothing half-written of a stage that failed; what it had made another time still counts, where it has
        not been touched.
        """
        with suppress(OSError, InputError):
            if name in self.record().stages:  # it was recorded in the very moment
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
        """Why no ONNX graph can be made of this model, as the stage `export` found; None where it can."""
        exported = self.record().stages.get("export")
        return exported.refused if exported else None

    def refuse_without_graph(self) -> None:
        """Raise InputError, with the reason, where no ONNX graph can be made of this model."""
        if reason := self.without_graph():
            raise InputError(no_graph(self.root, reason))

    def is_stale(self, stage: str) -> bool:
        """Tell whether a file that the finished `stage` read has been made anew since: what it wrote is of another
        checkpoint then.
        """
        stages = self.record().stages
        outputs = {name: digest for record in stages.values() for name, digest in record.outputs.items()}
        files = {name: digest for name, digest in stages[stage].inputs.items() if "." in name}
        return any(outputs.get(name) != digest for name, digest in files.items())

    def refuse_stale(self, *stages: str) -> None:
        """Raise InputError, naming the command to run, when one of `stages` was done with files that have been made
        anew since: parts that do not belong together.
        """
        for stage in stages:
            if stage in self.record().stages and self.is_stale(stage):
                raise InputError(
                    f"{self.root}: what the stage {stage} wrote is of other files than are there now, which were made "
                    f"anew since; run `{stage_command(stage, self.root)}` again"
                )

    @contextmanager
    def work(
        self, name: str, key: Mapping[str, object], rank: int = 0, note: Callable[[str], None] | None = None
    ) -> Iterator[Path]:
        """A folder in which the running stage `name` keeps what it goes on from when it is killed; removed when the
        stage is done.

        `key`: all that what is kept depends on; a folder left under another key is emptied. What the user or the disk
        is to blame for leaves nothing behind: rank 0's goes when the stage fails. `rank`: of several processes that run
        the stage, each has a folder of its own, inside that of rank 0. `note` is told where a folder is emptied since
        this machine computes otherwise.
        """
        folder = self._work_folder(name, rank)
        written, wanted = folder / "key.json", json.dumps(dict(key), sort_keys=True)
        before = written.read_text(encoding="utf-8") if written.is_file() else None
        if before != wanted:
            if before is not None and note is not None and (changed := _changed(before, wanted)):
                note(f"begins anew: an earlier call, which stopped half-way, had {changed}")
            remove(folder)
            folder.mkdir(parents=True)
            with replacing(written) as partial:
                partial.write_text(wanted, encoding="utf-8")
        try:
            yield folder
        except (InputError, OSError, SafetensorError):
            if rank:  # rank 0's goes with its stage
                self.leave_work(name, rank)
            raise

    @contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Remove what the stage `name` would go on from when the user, or the disk, is to blame."""
        try:
            with disk_errors(self.root):
                yield
        except InputError:
            with suppress(OSError):  # a rank may still be writing there
                remove(self._work_folder(name))
            raise

    def leave_work(self, name: str, rank: int) -> None:
        """Remove the folder of a rank above 0, and, where it was alone on its machine, the directories around it."""
        shutil.rmtree(self._work_folder(name, rank), ignore_errors=True)
        with suppress(OSError):
            self._work_folder(name).rmdir()
            self.root.rmdir()

    def _work_folder(self, name: str, rank: int = 0) -> Path:
        folder = self.root / f".{name}{WORK}"
        return folder / f"rank-{rank}" if rank else folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Work here alone, as long as `files.locked` says.

        Raises InputError where another process works here, or the directory cannot be written to.
        """
        with disk_errors(self.root), ExitStack() as held:
            try:
                held.enter_context(locked(self.root / LOCK))
            except BlockingIOError:
                raise InputError(
                    f"{self.root}: another fp8q process is working here; wait for it, or name another directory"
                ) from None
            yield

    def sweep(self, current: str | None = None) -> None:
        """Remove what killed calls left: all that is half-written, and the folders that finished stages went on from,
        but for the `current` one's. For who holds the lock.
        """
        self._clear_partial()
        for name, done in self.record().stages.items():
            if name != current and not done.unfinished:
                remove(self._work_folder(name))

    def _clear_partial(self) -> None:
        for path in [*self.root.glob(f"**/.*{PARTIAL}")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


LOCK = ".lock"
#: Facts of a work folder's key that are the machine's, and how each is told.
_ARITHMETIC: dict[str, Callable[[object], str]] = {
    "threads": lambda count: f"{count} threads",
    "device": lambda name: f"device {str(name).upper()}",
    "bf16_products": lambda name: f"BF16 products computed in {str(name).upper()}",
}


def _changed(before: str, wanted: str) -> str:
    """Name the machine's facts in which two keys of a work folder differ, as the first has them; empty where they agree
    in these, or do not read.
    """
    try:
        old, new = ({"bf16_products": "bf16"} | json.loads(key) for key in (before, wanted))
    except (ValueError, TypeError):
        return ""
    return ", ".join(
        tell(old[name]) for name, tell in _ARITHMETIC.items() if name in old and old[name] != new.get(name)
    )


def no_graph(root: Path, reason: str) -> str:
    """Explain that the run at `root` can have no ONNX graph."""
    return (
        f"{root}: has no ONNX graph, since {reason}; `fp8q generate {root} --runtime reference` runs its checkpoint, "
        f"and {root}/model/README.md says what else does"
    )


def _is_ours(path: Path) -> bool:
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith((PARTIAL, WORK)))
