"""The statistics of the float model: values that merge by addition and are independent of FP8.

`statistics.safetensors` holds the arrays, `statistics.json` their record. For each distinct tensor T (`<module>.input`,
`<module>.k`, `<module>.v`): `T.bits` int16 and `T.counts` int64 (the exact histogram), `T.amax_batches` float32
[batches], indexed by the batch's number in the corpus (NaN: not measured here), `T.amax_channels` float32 [width]. For
each weight: `<module>.weight.amax_channels` float32 [output channels]. Tensors are written in name order and nothing
depends on time or on the order of work, so equal measurements give equal bytes.

The histogram of the input of an expert's last GEMM has one value for each token and channel, so it also says how many
tokens the expert saw.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field
from safetensors.numpy import load_file, save_file

from ...core.errors import InputError
from ...core.files import FirstSchema, Strict, read_document, reading, replacing, write_document
from ...core.run import Run
from .histogram import Histogram

if TYPE_CHECKING:
    from ..checkpoint.adapter import Adapter


#: The ending of a weight's array name.
WEIGHT = ".weight.amax_channels"


class ModelIdentity(Strict):
    """The identity of the measured model."""

    name: str = Field(description="the directory's name or the hub's name")
    revision: str | None = None
    architecture: str
    fingerprint: str = Field(description="SHA-256 over config.json and the weights")
    tokenizer: str | None = Field(default=None, description="SHA-256 over the tokenizer's vocabulary files")
    adapters: dict[str, str] | None = Field(
        default=None, description="adapters that were on, one after the other, after the model alone: name -> SHA-256"
    )


class TextSource(Strict):
    """One of the texts that the windows were cut from."""

    name: str
    weight: float
    windows: int
    tokens: int = Field(description="tokens of it that there were to calibrate on")
    fingerprint: str = Field(description="SHA-256 over its documents, as they were read (chats: as they were rendered)")
    chat: bool = Field(description="whether these are chats, rendered by the tokenizer's template")
    images: int | None = Field(default=None, description="rows with images that were measured, each by itself")


class Corpus(Strict):
    """The identity of the measured tokens, of one text or of several that `merge` joined."""

    name: str
    fingerprint: str = Field(
        description="SHA-256 of the tokens, int64 little-endian, in batch order; of several texts: of their SHA-256"
    )
    windows: int
    seq_len: int
    batch_size: int
    prefix: list[int] = Field(
        default=[], description="ids of the tokens that each window begins with; none: cut from the text as it is"
    )
    sources: list[TextSource] | None = Field(
        default=None, description="the texts the windows were cut from, in the order they were given"
    )
    texts: "list[Corpus] | None" = Field(
        default=None, description="the several texts, in the order of their fingerprints; each begins a batch"
    )
    images: int | None = Field(
        default=None, description="rows with images, each a batch of its own behind those of the windows"
    )

    @property
    def parts(self) -> "list[Corpus]":
        """The texts of a joined corpus; for a single text, itself."""
        return self.texts or [self]

    @property
    def image_rows(self) -> int:
        """The number of rows with images."""
        return sum(text.images or 0 for text in self.parts)

    @property
    def batches(self) -> int:
        """The number of batches that the windows and the rows with images make."""
        return sum(-(-text.windows // text.batch_size) + (text.images or 0) for text in self.parts)

    def numbered(self) -> "list[tuple[Corpus, int]]":
        """All batches in order, each as its text and its index in that text."""
        return [(text, batch) for text in self.parts for batch in range(text.batches)]

    def merge(self, other: "Corpus") -> "Corpus":
        """Join the texts of both, without duplicates and ordered by fingerprint, so that the order of merging has no
        effect.

        Both have windows and batches of the same size, and the same prefix.
        """
        distinct: dict[str, Corpus] = {}
        for text in sorted(
            [*self.parts, *other.parts], key=lambda text: (text.fingerprint, text.name, text.model_dump_json())
        ):
            # two machines may name one text differently: always keep the same name
            distinct.setdefault(text.fingerprint, text)
        texts = list(distinct.values())
        if len(texts) == 1:
            return texts[0]
        fingerprint = hashlib.sha256("".join(f"{text.fingerprint}\n" for text in texts).encode()).hexdigest()
        windows = sum(text.windows for text in texts)
        name = " + ".join(text.name for text in texts)
        return Corpus(
            name=name,
            fingerprint=fingerprint,
            windows=windows,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            prefix=self.prefix,
            texts=texts,
        )


def _named_by_a_member(groups: dict[str, list[str]]) -> dict[str, list[str]]:
    """Check that every group has the name of one of its members."""
    if foreign := next((first for first, members in groups.items() if first not in members), None):
        raise ValueError(f"{foreign} is none of the modules that it stands for")
    return groups


class StatisticsRecord(Strict):
    """`statistics.json`."""

    schema_: FirstSchema = 1
    model: ModelIdentity
    corpus: Corpus
    tokens: int = Field(description="tokens measured so far")
    groups: Annotated[dict[str, list[str]], AfterValidator(_named_by_a_member)] = Field(
        description="first module -> the modules that receive the same tensor, itself included"
    )
    experts: dict[str, list[str]] | None = Field(
        default=None, description="a layer's experts -> the module of each expert that some tokens alone reach"
    )
    all_experts: bool | None = Field(
        default=None, description="whether every expert was shown every token, whichever it was routed to"
    )


@dataclass(frozen=True)
class TensorStatistics:
    """The statistics of one tensor: histogram, amax_batches float32 [batches], amax_channels float32 [width]."""

    histogram: Histogram
    amax_batches: npt.NDArray[np.float32]
    amax_channels: npt.NDArray[np.float32]

    def check(self, name: str) -> None:
        """Raise ValueError, naming the tensor `name`, for arrays of wrong type, shape or content."""
        bits = self.histogram.bits
        counts = self.histogram.counts
        for array, dtype in (
            (bits, np.int16), (counts, np.int64), (self.amax_batches, np.float32), (self.amax_channels, np.float32),
        ):  # fmt: skip
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name}: {array.dtype} {list(array.shape)} where {np.dtype(dtype)} [n] belongs")
        if len(bits) != len(counts) or (bits < 0).any() or (np.diff(bits) <= 0).any() or (counts <= 0).any():
            raise ValueError(f"{name}: its histogram's patterns do not ascend, or their counts are not positive")

    def merge(self, other: "TensorStatistics") -> "TensorStatistics":
        """Add the statistics of other batches of this tensor; the caller checks that no batch is in both."""
        # as integers NaN is the largest, and NaNs have an order
        channels = np.maximum(self.amax_channels.view(np.int32), other.amax_channels.view(np.int32)).view(np.float32)
        return TensorStatistics(
            self.histogram + other.histogram, np.fmax(self.amax_batches, other.amax_batches), channels
        )

    def renumbered(self, places: Sequence[int], batches: int) -> "TensorStatistics":
        """Return a copy in which batch i is number `places[i]` of `batches`."""
        amax_batches = np.full(batches, np.nan, np.float32)
        amax_batches[list(places)] = self.amax_batches
        return replace(self, amax_batches=amax_batches)


@dataclass(frozen=True)
class Statistics:
    """All statistics of one model.

    `tensors`: tensor name -> statistics; `weights`: module -> amax_channels float32 [output channels].
    """

    record: StatisticsRecord
    tensors: Mapping[str, TensorStatistics]
    weights: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def merge(self, other: "Statistics") -> "Statistics":
        """Add two measurements of one model: of different batches of one text, of different texts, or of both.

        The result does not depend on which is added to which. Raises InputError when models, tokenizers, groups, or
        sizes of windows and batches differ, and when a batch was measured in both.
        """
        for what, mine, theirs in self._must_agree(other):
            if mine != theirs:
                raise InputError(
                    "",
                    f"statistics cannot be added: their {what} differs ({mine} and {theirs})",
                    "measure both with the same model and options",
                )
        corpus = self.record.corpus.merge(other.record.corpus)
        parts = [part._placed(corpus) for part in (self, other)]
        twice = parts[0].batches_measured & parts[1].batches_measured
        if twice:
            text, batch = corpus.numbered()[min(twice)]
            raise InputError(
                "",
                f"statistics cannot be added: both measured batch {batch} of {text.name} ({len(twice)} batches in all)",
                "give each batch to one of them",
            )
        record = replace_record(
            self.record,
            # whichever is added to which, the same name of the model
            model=min(self.record.model, other.record.model, key=lambda model: (model.name, model.revision or "")),
            corpus=corpus,
            tokens=self.record.tokens + other.record.tokens,
        )
        return Statistics(
            record,
            {name: tensor.merge(parts[1].tensors[name]) for name, tensor in parts[0].tensors.items()},
            self.weights,
        )

    def with_variant(self, adapter: "Adapter", other: "Statistics") -> "Statistics":
        """Add statistics of the same batches, measured with `adapter` on; scales from the sum serve both."""
        adapters = {**(self.record.model.adapters or {}), adapter.name: adapter.fingerprint}
        record = replace_record(
            self.record,
            model=self.record.model.model_copy(update={"adapters": adapters}),
            tokens=self.record.tokens + other.record.tokens,
        )
        tensors = {name: tensor.merge(other.tensors[name]) for name, tensor in self.tensors.items()}
        return Statistics(record, tensors, self.weights)

    def _must_agree(self, other: "Statistics") -> Iterator[tuple[str, object, object]]:
        """Yield the name and both values of each property that must be equal in statistics that are added."""
        for part, fields in (
            ("model", ("architecture", "fingerprint", "tokenizer", "adapters")),
            ("corpus", ("seq_len", "batch_size", "prefix")),
        ):
            for name in fields:
                yield (
                    f"{part} {name}{' (--bos)' * (name == 'prefix')}",
                    *(getattr(getattr(record, part), name) for record in (self.record, other.record)),
                )
        yield "all_experts (--all-experts)", bool(self.record.all_experts), bool(other.record.all_experts)
        for what, mine, theirs in (
            ("groups", self.record.groups, other.record.groups),
            ("tensors", self._widths(), other._widths()),
        ):
            differing = min(
                (name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)), default=None
            )
            yield f"{what} {differing}", mine.get(differing or ""), theirs.get(differing or "")

    def _widths(self) -> dict[str, int]:
        return {name: len(tensor.amax_channels) for name, tensor in self.tensors.items()}

    def _placed(self, corpus: Corpus) -> "Statistics":
        """Return these statistics with batches numbered as in `corpus`, which contains all of them."""
        numbers = {(text.fingerprint, batch): place for place, (text, batch) in enumerate(corpus.numbered())}
        places = [numbers[text.fingerprint, batch] for text, batch in self.record.corpus.numbered()]
        return replace(
            self, tensors={name: tensor.renumbered(places, len(numbers)) for name, tensor in self.tensors.items()}
        )

    @property
    def batches_measured(self) -> set[int]:
        """The indices of all measured batches. An expert may have got no token in one of them."""
        measured = [np.flatnonzero(~np.isnan(tensor.amax_batches)) for tensor in self.tensors.values()]
        if measured:
            return set(np.concatenate(measured).tolist())
        return set()


def added_tensors(
    some: Mapping[str, TensorStatistics], others: Mapping[str, TensorStatistics]
) -> dict[str, TensorStatistics]:
    """Add the statistics of `some` tensors and `others`, of other batches; a tensor may be in one of them alone."""
    both = {name: tensor.merge(others[name]) for name, tensor in some.items() if name in others}
    return {**some, **others, **both}


def replace_record(record: StatisticsRecord, **changes: object) -> StatisticsRecord:
    """Return a validated copy of `record` with `changes`."""
    return StatisticsRecord.model_validate({**record.model_dump(by_alias=True), **changes})


def save_statistics(run: Run, statistics: Statistics) -> list[Path]:
    """Write `statistics.safetensors` and `statistics.json`; returns both paths."""
    save_arrays(run.statistics, statistics.tensors, statistics.weights)
    write_document(run.statistics_json, statistics.record)
    return [run.statistics, run.statistics_json]


def save_arrays(
    path: Path, tensors: Mapping[str, TensorStatistics], weights: Mapping[str, npt.NDArray[np.float32]]
) -> None:
    """Write tensors and weights to `path`, atomically, in the form that this module's docstring describes."""
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
    """Load the tensors and weights that `save_arrays` wrote, in name order; raise InputError for a damaged file."""
    with reading(path, "statistics", "delete it and run `fp8q calibrate` again"):
        arrays = load_file(path)
        tensors = {
            name: TensorStatistics(
                Histogram(arrays[f"{name}.bits"], arrays[f"{name}.counts"]),
                arrays[f"{name}.amax_batches"],
                arrays[f"{name}.amax_channels"],
            )
            for name in sorted(key.removesuffix(".bits") for key in arrays if key.endswith(".bits"))
        }
        for name, tensor in tensors.items():
            tensor.check(name)
    return tensors, {name.removesuffix(WEIGHT): array for name, array in arrays.items() if name.endswith(WEIGHT)}


def load_record(run: Run) -> StatisticsRecord:
    """Read `statistics.json`; raise InputError as `load_statistics` does."""
    return read_document(run.require(run.statistics_json, "measure"), StatisticsRecord)


def load_statistics(run: Run) -> Statistics:
    """Read the statistics of a run.

    Raises InputError for a file that is missing, damaged, or other than `fp8q calibrate` wrote it.
    """
    record = load_record(run)
    tensors, weights = load_arrays(run.require(run.statistics, "measure"))
    return Statistics(record, tensors, weights)


@dataclass(frozen=True)
class Coverage:
    """The experts of one layer: their module, the last GEMM of each, and the tokens that each got."""

    experts: str
    gemms: tuple[str, ...]
    tokens: tuple[int, ...]


def coverage(statistics: Statistics) -> list[Coverage]:
    """The coverage of each layer that has experts, in order; none for statistics of a version without experts."""
    return [
        Coverage(experts, tuple(gemms), tuple(tokens_of(statistics, gemm) for gemm in gemms))
        for experts, gemms in (statistics.record.experts or {}).items()
    ]


def tokens_of(statistics: Statistics, gemm: str) -> int:
    """The number of tokens that reached `gemm`, whose input no other module reads."""
    tensor = statistics.tensors.get(f"{gemm}.input")
    if tensor:
        return tensor.histogram.samples // len(tensor.amax_channels)
    return 0
