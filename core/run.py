"""The run directory: its files, and the record of how each of them was made.

`run.json` has, for each stage, the hashes of its inputs and outputs and its options. A stage runs again when any of
these, or the version of fp8q, has changed, and a file that its stage did not write is refused. Nothing is written here:
`run_writer` runs stages.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import JsonValue

from .. import __version__
from .commands import stage_command
from .errors import InputError, NoGraphError
from .files import read_document, sha256_file
from .record import RunRecord
from .run_files import RunFiles, is_of_a_run

Choices_co = TypeVar("Choices_co", covariant=True)
Facts_co = TypeVar("Facts_co", covariant=True)


class Readable(Protocol[Choices_co, Facts_co]):
    """A stage whose record can be read back with types (`stages.pipeline.stage.Stage`)."""

    @property
    def name(self) -> str:
        """The name of the stage in `run.json`."""

    def read(self, recorded: Mapping[str, JsonValue], file: Path) -> tuple[Choices_co, Facts_co]:
        """Return the options and facts of the object `recorded` in `file`; raises InputError for malformed ones."""


@dataclass(frozen=True)
class Run(RunFiles):
    """A run directory and its record, read whenever it is asked for."""

    def exists(self) -> bool:
        """Tell whether the directory has a record, so that at least one stage has begun."""
        return self.record_file.is_file()

    def record(self) -> RunRecord:
        """Read `run.json`; an empty record where there is none yet.

        Raises InputError for a directory that contains other files than a run, and for a malformed record.
        """
        if self.exists():
            return read_document(self.record_file, RunRecord).of(self.record_file)
        if self.root.is_dir() and any(not is_of_a_run(path) for path in self.root.iterdir()):
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
        recorded = self.record().stages.get(stage)
        again = stage_command(stage, self.root)
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
