"""Define a stage as a value: its inputs and facts, its options, its key, and its record in `run.json`.

A stage's key is derived: its inputs, all fields of its options class but those marked `Unkeyed`, and its facts. So a
new field is part of the key at once, and a record is read back into the same classes, strictly. `run.json` holds
options and facts as one flat object; a field that an older version did not write has its default, or the value that
`older` gives for that version.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from ...core.commands import stage_command
from ...core.errors import InputError
from ...core.field_errors import plain_text
from ...core.files import Strict, sha256_file, write_document
from ...core.record import StageLog
from ...core.run import Run
from ...options.declare import Options
from .steps import Notes, arithmetic

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
        """Run this stage in the block, and record it with the notes since the last stage (see `Run.stage`)."""
        _check_declared(self.name, "input", key.inputs, self.inputs)
        with run.stage(self.name, key.inputs, self.dump(key.options, key.facts), model) as log:
            yield log
            _check_declared(
                self.name, "output", [str(path.relative_to(run.root)) for path in log.outputs], self.outputs
            )
            log.notes, notes.lines = notes.lines, []

    def amend(self, run: Run, key: Key[Choices, Facts], outputs: Sequence[Path], notes: Notes) -> None:
        """Record under `key` that outputs of this finished stage gained something; its versions, its time and its
        machine stay.
        """
        _check_declared(self.name, "input", key.inputs, self.inputs)
        with run.lock():
            record = run.record()
            before = record.stages[self.name]
            hashes = {str(path.relative_to(run.root)): sha256_file(path) for path in outputs}
            done = before.model_copy(
                update={
                    "inputs": dict(key.inputs),
                    "options": self.dump(key.options, key.facts),
                    "outputs": {**before.outputs, **hashes},
                    "notes": [*before.notes, *notes.lines],
                }
            )
            notes.lines = []
            write_document(run.record_file, record.model_copy(update={"stages": {**record.stages, self.name: done}}))

    def working(self, run: Run, key: Key[Choices, Facts], notes: Notes) -> AbstractContextManager[Path]:
        """Open the work folder of this stage for this `key` and arithmetic, with which a killed call goes on
        (`Run.work`).
        """
        depends = {"inputs": dict(key.inputs), "options": self.dump(key.options, key.facts)}
        return run.work(self.name, depends | arithmetic(), note=notes.note)


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
