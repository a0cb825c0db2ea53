"""What was measured of the float model: values that merge by addition and say nothing of FP8.

`statistics.safetensors` holds the arrays, `statistics.json` what they belong to. For each distinct tensor T
(`<module>.input`, `<module>.k`, `<module>.v`): `T.bits` int16 and `T.counts` int64 (the exact histogram), `T.amax_batches` float32 [batches]
under the batch's index in the corpus (NaN: not measured here), `T.amax_channels` float32 [width]; for each weight
`<module>.weight.amax_channels` float32 [output channels]. Tensors are written in name order and nothing depends on time or on
the order of work, so equal measurements are equal bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..errors import InputError
from ..run import Run, Strict, read_document, replacing, write_document
from .histogram import Histogram

#: How the name of a weight's statistics ends.
WEIGHT = ".weight.amax_channels"


class ModelIdentity(Strict):
    """Which model was measured."""

    name: str = Field(description="the directory's name or the hub's name")
    revision: str | None = None
    architecture: str
    fingerprint: str = Field(description="SHA-256 over config.json and the weights")


class TextSource(Strict):
    """One of the texts that the windows were cut from."""

    name: str
    weight: float
    windows: int
    tokens: int = Field(description="tokens of it that there were to calibrate on")
    fingerprint: str = Field(description="SHA-256 over its documents, as they were read (chats: as they were rendered)")
    chat: bool = Field(description="whether these are chats, rendered by the tokenizer's template")


class Corpus(Strict):
    """Which tokens were measured."""

    name: str
    fingerprint: str = Field(description="SHA-256 of the tokens, int64 little-endian, in batch order")
    windows: int
    seq_len: int
    batch_size: int
    sources: list[TextSource] | None = Field(default=None, description="the texts the windows were cut from, in the order they were given")

    @property
    def batches(self) -> int:
        """How many batches the windows make."""
        return -(-self.windows // self.batch_size)


class StatisticsRecord(Strict):
    """`statistics.json`."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=1)] = 1
    model: ModelIdentity
    corpus: Corpus
    tokens: int = Field(description="tokens measured so far")
    groups: dict[str, list[str]] = Field(description="first module -> the modules that receive the same tensor, itself included")


@dataclass(frozen=True)
class TensorStatistics:
    """One activation or cache tensor: its histogram, amax_batches float32 [batches] and amax_channels float32 [width]."""

    histogram: Histogram
    amax_batches: npt.NDArray[np.float32]
    amax_channels: npt.NDArray[np.float32]

    def merge(self, other: "TensorStatistics") -> "TensorStatistics":
        """The statistics of both; a batch measured in both is the caller's to refuse."""
        channels = np.maximum(self.amax_channels, other.amax_channels)  # NaN wins: a channel that was NaN once stays so
        return TensorStatistics(self.histogram + other.histogram, np.fmax(self.amax_batches, other.amax_batches), channels)


@dataclass(frozen=True)
class Statistics:
    """Everything measured of one model. `tensors` by name (see the module), `weights`: module -> amax_channels float32 [output channels]."""

    record: StatisticsRecord
    tensors: Mapping[str, TensorStatistics]
    weights: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def merge(self, other: "Statistics") -> "Statistics":
        """Add two measurements of different batches of one corpus.

        Raises InputError when models, corpora or groups differ, or when a batch was measured in both.
        """
        for what in ("model", "corpus", "groups"):
            mine, theirs = getattr(self.record, what), getattr(other.record, what)
            if mine != theirs:
                raise InputError(
                    f"statistics cannot be added: their {what} differs ({_first_difference(mine, theirs)}); measure both with the same model and data"
                )
        if self.tensors.keys() != other.tensors.keys():
            raise InputError(f"statistics cannot be added: only one of them has {min(self.tensors.keys() ^ other.tensors.keys())}")
        twice = self.batches_measured & other.batches_measured
        if twice:
            raise InputError(f"statistics cannot be added: both measured batch {min(twice)}; give each batch to one of them")
        return Statistics(
            replace_record(self.record, tokens=self.record.tokens + other.record.tokens),
            {name: tensor.merge(other.tensors[name]) for name, tensor in self.tensors.items()},
            self.weights,
        )

    @property
    def batches_measured(self) -> set[int]:
        """Indices of the batches that are in these statistics."""
        for tensor in self.tensors.values():
            return set(np.flatnonzero(~np.isnan(tensor.amax_batches)).tolist())
        return set()


def replace_record(record: StatisticsRecord, **changes: object) -> StatisticsRecord:
    """A validated copy of `record` with `changes`."""
    return StatisticsRecord.model_validate({**record.model_dump(by_alias=True), **changes})


def _first_difference(mine: object, theirs: object) -> str:
    left = dict(mine) if isinstance(mine, dict) else mine.model_dump() if isinstance(mine, Strict) else {}
    right = dict(theirs) if isinstance(theirs, dict) else theirs.model_dump() if isinstance(theirs, Strict) else {}
    key = next(key for key in [*left, *right] if left.get(key) != right.get(key))
    return f"{key}: {left.get(key)} and {right.get(key)}"


def save_statistics(run: Run, statistics: Statistics) -> list[Path]:
    """Write `statistics.safetensors` and `statistics.json`; returns both paths."""
    save_arrays(run.statistics, statistics.tensors, statistics.weights)
    write_document(run.statistics_json, statistics.record)
    return [run.statistics, run.statistics_json]


def save_arrays(path: Path, tensors: Mapping[str, TensorStatistics], weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Write what was measured to `path`, atomically, in the form that the module's docstring gives."""
    arrays: dict[str, npt.NDArray[np.generic]] = {f"{module}{WEIGHT}": amax for module, amax in weights.items()}
    for name, tensor in tensors.items():
        arrays |= {
            f"{name}.bits": tensor.histogram.bits,
            f"{name}.counts": tensor.histogram.counts,
            f"{name}.amax_batches": tensor.amax_batches,
            f"{name}.amax_channels": tensor.amax_channels,
        }
    with replacing(path) as partial:
        save_file({name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}, partial)


def load_arrays(path: Path) -> tuple[dict[str, TensorStatistics], dict[str, npt.NDArray[np.float32]]]:
    """Tensors and weights as `save_arrays` wrote them, in name order. Raises InputError for a file that is damaged."""
    try:
        arrays = load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path}: does not read as safetensors ({error}); delete it and run `fp8q calibrate` again") from None
    tensors = {
        name: TensorStatistics(Histogram(arrays[f"{name}.bits"], arrays[f"{name}.counts"]), arrays[f"{name}.amax_batches"], arrays[f"{name}.amax_channels"])
        for name in sorted(key.removesuffix(".bits") for key in arrays if key.endswith(".bits"))
    }
    return tensors, {name.removesuffix(WEIGHT): array for name, array in arrays.items() if name.endswith(WEIGHT)}


def load_statistics(run: Run) -> Statistics:
    """Read what `save_statistics` wrote.

    Raises InputError when a file is missing, damaged, or not the one `fp8q calibrate` wrote.
    """
    record = read_document(run.require(run.statistics_json, "measure"), StatisticsRecord)
    tensors, weights = load_arrays(run.require(run.statistics, "measure"))
    return Statistics(record, tensors, weights)
