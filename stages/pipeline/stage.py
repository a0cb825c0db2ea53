"""Define a stage as a value: its inputs and facts, its options, its key, and its record in `run.json`.

A stage's key is derived: its inputs, all fields of its options class but those marked `Unkeyed`, and its facts. So a
new field is part of the key at once, and a record is read back into the same classes, strictly. `run.json` holds
options and facts as one flat object; a field that an older version did not write has its default, or the value that
`older` gives for that version.

What all stages do besides is here too: notes, checks for an extra, the device, and the lock of a run.
"""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from ... import __version__
from ...calibrate.ranks.torchrun import process_rank
from ...core.commands import stage_command
from ...core.errors import BackendError, InputError
from ...core.files import Strict, keeping_locks, plain_text, write_document
from ...core.output_folder import OutputFolder, WorkFolder
from ...core.record import StageLog, library_versions
from ...core.reporter import Reporter
from ...core.run import Run
from ...core.run_writer import RunWriter, digests
from ...options.declare import Options

#: The import names of the packages of the extras `calibrate` and `serve`.
CALIBRATE_MODULES = ("torch", "transformers", "datasets", "compressed_tensors", "onnxscript")
SERVE_MODULES = ("fastapi", "starlette", "uvicorn", "prometheus_client", "jinja2")


def needs(extra: str, modules: Sequence[str]) -> None:
    """Raise BackendError, naming the extra, when one of `modules` is not installed."""
    if missing := lacking(modules):
        raise BackendError(
            "",
            f"{missing} is not installed and this command needs it",
            f"install it with `pip install 'fp8q[{extra}]'`",
        )


def lacking(modules: Sequence[str]) -> str | None:
    """Return the first of `modules` that is not installed; None where all are."""
    return next((name for name in modules if find_spec(name) is None), None)


class Notes:
    """A reporter that passes everything on and stores the notes."""

    def __init__(self, report: Reporter):
        """Pass everything on to `report`."""
        self.report = report
        self.track = report.track
        self.lines = list[str]()
        self.waiting = False

    def note(self, line: str) -> None:
        """Pass the line on, unless notes are held, and store it."""
        self.lines.append(line)
        if not self.waiting:
            self.report.note(line)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the notes of this block back until it ends; where it fails, only the error is shown."""
        said = len(self.lines)
        self.waiting = True
        yield
        self.waiting = False
        for line in self.lines[said:]:
            self.report.note(line)


def device() -> str:
    """Return the device that models run on: the first GPU, or the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def arithmetic() -> dict[str, object]:
    """Return everything that the bits of a model's sums depend on, besides the model and its inputs."""
    import torch

    return {
        "fp8q": __version__,
        "libraries": library_versions(),
        "threads": torch.get_num_threads(),
        "device": device(),
        **_bf16_arithmetic(device()),
    }


def _bf16_arithmetic(device: str) -> dict[str, JsonValue]:
    from ...calibrate.model.bf16_gemms import bf16_arithmetic

    return {**bf16_arithmetic(device)}


def note_other_arithmetic(run: Run, notes: Notes) -> None:
    """Note where this machine's CPU computes BF16 GEMMs in another way than the one that measured `run`."""
    measured = run.record().stages.get("measure")
    if measured is None or device() != "cpu" or measured.machine.get("device") != "CPU":
        return
    there, here = (
        "BF16" if "bf16_products" not in facts else "FP32" for facts in (measured.machine, _bf16_arithmetic("cpu"))
    )
    if there != here:
        notes.note(
            f"the run was measured where {there} units compute BF16 GEMMs, and {here} units do here: sums round in "
            "another order, and last bits differ; scales and checkpoint are the run's, and nothing is measured again"
        )


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Hold the lock of `run` in this block, over all of its stages, and remove leftovers of killed calls first.

    Another process that would write to the run meanwhile is refused.
    """
    with keeping_locks(), ExitStack() as held:
        if run.exists() and process_rank().rank == 0:
            _take(run, held)
        yield


def _take(run: Run, held: ExitStack) -> None:
    """Lock `run` and sweep it; a directory that may not be written to is left for a stage to refuse."""
    try:
        held.enter_context(OutputFolder(run.root).lock())
    except InputError as error:
        if isinstance(error.__cause__, PermissionError) or getattr(error.__cause__, "errno", None) == errno.EROFS:
            return
        raise
    RunWriter(run).sweep()


Choices = TypeVar("Choices", bound=Options)
Facts = TypeVar("Facts", bound=Strict)
Choices_co = TypeVar("Choices_co", bound=Options, covariant=True)
Facts_co = TypeVar("Facts_co", bound=Strict, covariant=True)


class NoFacts(Strict):
    """The facts of a stage whose key has only inputs and options."""


NO_FACTS = NoFacts()


@dataclass(frozen=True)
class Key(Generic[Choices_co, Facts_co]):
    """Everything that a stage's outputs depend on, besides the version of fp8q.

    `inputs`: name -> SHA-256, or another identity, of each input; `facts`: other conditions of the stage.
    """

    inputs: Mapping[str, str]
    options: Choices_co
    facts: Facts_co


@dataclass(frozen=True)
class Stage(Generic[Choices, Facts]):
    """One step of a run.

    `inputs`: patterns of its input files in the run, and names (without a dot) of other inputs; `outputs`: patterns of
    its output files; `older`: values of fields that older records lack, where these are not the defaults.
    """

    name: str
    options: type[Choices]
    facts: type[Facts]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    older: Mapping[str, JsonValue] = field(default_factory=dict)

    @cached_property
    def recorded_fields(self) -> frozenset[str]:
        """The names of the fields that `run.json` has of this stage."""
        return frozenset(self.options.keyed()) | self.facts.model_fields.keys()

    @cached_property
    def _unkeyed(self) -> frozenset[str]:
        return frozenset(self.options.declared()) - self.options.keyed().keys()

    @cached_property
    def _reader(self) -> TypeAdapter[Choices]:
        return TypeAdapter(self.options)

    def dump(self, options: Options, facts: Facts) -> dict[str, JsonValue]:
        """Return the flat object for `run.json` of `options`, which may be of a subclass, and `facts`."""
        chosen: dict[str, JsonValue] = to_jsonable_python(_values(self.options, options))
        return chosen | facts.model_dump(mode="json", exclude_none=True)

    def read(self, recorded: Mapping[str, JsonValue], file: Path) -> tuple[Choices, Facts]:
        """Read the record of this stage from the contents of `file`.

        Raises InputError, naming the command that makes it again, for an unknown field or an invalid value.
        """
        again = f"`{stage_command(self.name, file.parent)}` makes it again"
        if unknown := sorted(recorded.keys() - self.recorded_fields - self._unkeyed):
            raise InputError(
                file, f"the stage {self.name} has `{unknown[0]}`, which this version of fp8q does not know", again
            )
        known = {**self.older, **{name: value for name, value in recorded.items() if name not in self._unkeyed}}
        facts = {name: known[name] for name in self.facts.model_fields if name in known}
        try:
            return (
                self._reader.validate_json(json.dumps(_nested(self.options, known)), strict=True),
                self.facts.model_validate_json(json.dumps(facts), strict=True),
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"] if part != "clip")
            if first["type"] == "missing":
                raise InputError(file, f"does not say `{name}` of the stage {self.name}", again) from None
            value = json.dumps(first["input"])
            raise InputError(
                file, f"the stage {self.name} has `{name}` {value[:80]}, which {plain_text(first)}", again
            ) from None
        except InputError as error:
            raise InputError(file, f"the stage {self.name} has {error}", again) from None

    def is_current(self, run: Run, *keys: Key[Choices, Facts]) -> bool:
        """Tell whether `run` has all outputs of this stage, made by this version under one of `keys`.

        Raises InputError for an output that is not the file that the stage wrote.
        """
        recorded = run.record().stages.get(self.name)
        if recorded is None:
            return False
        try:
            done = self.read(recorded.options, run.record_file)
        except InputError:
            return False  # the stage runs again
        return any(
            done == self.read(self.dump(key.options, key.facts), run.record_file)
            and run.is_current(self.name, key.inputs, recorded.options)
            for key in keys
        )

    @contextmanager
    def writing(
        self, run: Run, key: Key[Choices, Facts], notes: Notes, model: Mapping[str, str] | None = None
    ) -> Iterator[StageLog]:
        """Run this stage in the block, and record it with the notes since the last stage (see `RunWriter.stage`)."""
        _check_declared(self.name, "input", key.inputs, self.inputs)
        with RunWriter(run).stage(self.name, key.inputs, self.dump(key.options, key.facts), model) as log:
            yield log
            _check_declared(
                self.name, "output", [str(path.relative_to(run.root)) for path in log.outputs], self.outputs
            )
            log.notes = notes.lines
            notes.lines = []

    def amend(self, run: Run, key: Key[Choices, Facts], outputs: Sequence[Path], notes: Notes) -> None:
        """Record under `key` that outputs of this finished stage gained something; its versions, its time and its
        machine stay.
        """
        _check_declared(self.name, "input", key.inputs, self.inputs)
        with OutputFolder(run.root).lock():
            record = run.record()
            before = record.stages[self.name]
            done = before.model_copy(
                update={
                    "inputs": dict(key.inputs),
                    "options": self.dump(key.options, key.facts),
                    "outputs": {**before.outputs, **digests(run.root, outputs)},
                    "notes": [*before.notes, *notes.lines],
                }
            )
            notes.lines = []
            write_document(run.record_file, record.with_stage(self.name, done))

    def working(
        self, run: Run, key: Key[Choices, Facts], notes: Notes, ranks: int = 1
    ) -> AbstractContextManager[Path]:  # fmt: skip
        """Open the work folder of this stage for this `key` and arithmetic, with which a killed call goes on
        (`WorkFolder`); `ranks`: those that share the work in it.
        """
        shared = {"ranks": ranks} if ranks > 1 else {}
        return WorkFolder(run.root, self.name).opened(self.work_key(key) | shared, notes.note)

    def work_key(self, key: Key[Choices, Facts]) -> dict[str, object]:
        """Everything that the contents of the work folder depend on."""
        return {"inputs": dict(key.inputs), "options": self.dump(key.options, key.facts), **arithmetic()}


def _check_declared(stage: str, what: str, names: Mapping[str, str] | list[str], patterns: tuple[str, ...]) -> None:
    """Check the inputs or outputs of a stage against its declaration."""
    for name in names:
        assert any(fnmatchcase(name, pattern) for pattern in patterns), f"{stage}: {name} is no {what} of the stage"


def _values(kind: type[Options], options: Options) -> dict[str, object]:
    """Return the keyed fields of `kind` in `options`, nested option classes included."""
    values: dict[str, object] = {}
    for option in fields(kind):
        value = getattr(options, option.name)
        if isinstance(value, Options):
            values |= _values(type(value), value)
        elif option.name in kind.keyed():
            values[option.name] = value
    return values


def _nested(kind: type[Options], recorded: Mapping[str, JsonValue]) -> dict[str, Any]:
    """The recorded fields of `kind`, with those of nested option classes in objects of their own."""
    options: dict[str, Any] = {}
    for option in fields(kind):
        if isinstance(option.default, Options):
            options[option.name] = _nested(type(option.default), recorded)
        elif option.name in recorded:
            options[option.name] = recorded[option.name]
    return options
