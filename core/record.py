"""The record of a run's stages: for each stage its inputs, outputs, options, versions and machine."""

import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, Field, JsonValue

from .errors import InputError
from .files import FirstSchema, Strict

#: The distributions whose versions are recorded with each stage.
DISTRIBUTIONS = [
    "torch",
    "transformers",
    "nvidia-modelopt",
    "compressed-tensors",
    "datasets",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "tensorrt",
    "tensorrt-rtx",
    "numpy",
]
#: The stages that write the files of the FP8 runtimes, in the order of work.
FP8_STAGES = ("measure", "quantize", "export")


Value = TypeVar("Value")


class Recorded(dict[str, Value]):
    """A mapping in a record; a missing key is an error that names the file."""

    file: Path | None = None

    def __missing__(self, key: str) -> Value:
        """Raise InputError, naming the file and the missing key."""
        raise InputError(
            f"{self.file or 'run.json'}",
            f"does not say `{key}`, which every run's does",
            "restore it, or calibrate again into a new directory",
        )


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError("names a place outside the run")
    if not path.parts:
        raise ValueError("names no file")
    return name


Texts = Annotated[dict[str, str], AfterValidator(Recorded)]


class StageRecord(Strict):
    """The inputs, options and outputs of one finished stage."""

    inputs: Texts = Field(description="name -> SHA-256 of what the stage read")
    options: Annotated[dict[str, JsonValue], AfterValidator(Recorded)]
    outputs: Annotated[dict[Annotated[str, AfterValidator(_inside)], str], AfterValidator(Recorded)] = Field(
        description="path in the run -> SHA-256 of what the stage wrote"
    )
    version: str
    libraries: dict[str, str]
    notes: list[str]
    seconds: float
    peak_memory_bytes: int
    machine: dict[str, JsonValue] = Field(
        default_factory=dict, description="what it was computed on, where that decides its last bits"
    )
    unfinished: tuple[str, ...] | None = Field(default=None, description="what failed of it, and is tried again")
    refused: str | None = Field(default=None, description="why nothing was written: the model, or an option")


class RunRecord(Strict):
    """The contents of `run.json`."""

    schema_: FirstSchema = 1
    model: Texts = Field(default_factory=dict, description="what identifies the source model")
    stages: Annotated[dict[str, StageRecord], AfterValidator(Recorded)] = Field(default_factory=dict)

    def with_stage(self, name: str, done: StageRecord | None) -> Self:
        """Replace the record of the stage `name`; None: without it."""
        stages = {other: record for other, record in self.stages.items() if other != name or done is not None}
        if done is not None:
            stages[name] = done
        return self.model_copy(update={"stages": stages})

    def of(self, file: Path) -> Self:
        """Make errors about this record name `file`."""
        parts = (part for stage in self.stages.values() for part in (stage.inputs, stage.options, stage.outputs))
        for part in (self.model, self.stages, *parts):
            if isinstance(part, Recorded):
                part.file = file
        return self


@dataclass
class StageLog:
    """Facts that a running stage notes for its record; `outputs` are hashed when it ends.

    `unfinished`: the parts that failed, and that the next call tries again; `refused`: the reason why the stage wrote
    nothing: the model, or an option. `seconds_before`: the time of work that was done for the stage before it began.
    """

    outputs: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, JsonValue] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()
    refused: str | None = None
    seconds_before: float = 0.0


def library_versions() -> dict[str, str]:
    """The versions of the installed distributions that fp8q works with, a mapping of the caller's own."""
    return dict(_installed())


@cache
def _installed() -> Mapping[str, str]:
    """The versions of `DISTRIBUTIONS` that are installed, read once a process."""
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def reset_peak_memory() -> None:
    """Restart the measurement of peak memory, where the system allows it."""
    with suppress(OSError):  # not Linux, or not allowed: the peak is then that of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """The peak resident memory of this process, in bytes: since the stage began on Linux, since the process began
    elsewhere.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
