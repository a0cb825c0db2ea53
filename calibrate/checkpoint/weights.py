"""Find the safetensors of a checkpoint, check their headers, and read them tensor by tensor.

A tensor is a view of the mapped file, which is unmapped when the tensor is released, so that memory holds one tensor
however large the checkpoint is. Pickled weights can run code when they are read, so they are refused and never opened.
"""

from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol

from ...core.errors import InputError
from ...core.files import json_text, regular_file
from ...core.headers import StoredTensor, damaged, read_header
from ...core.reporter import SILENT, Reporter
from ..input.untrusted import AGAIN, error_text, exists, foreign, local_path, read_json

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: How the name of a file of weights ends, and that of an index of several.
WEIGHTS_END = ".safetensors"
INDEX_END = ".safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: Values in one step of counting those that are not finite.
CHUNK = 1 << 24


@dataclass(frozen=True)
class TensorPart:
    """Part of a stored `tensor`: entry `index` of its first axis, transposed where it is `turned`, and of that every
    `step`-th row from `start` to `end`; the whole tensor where `index` is None.
    """

    tensor: str
    index: int | None = None
    start: int = 0
    end: int = 0
    step: int = 1
    turned: bool = False

    def cut(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The part as a view of the stored `tensor`."""
        if self.index is None:
            return tensor
        entry = tensor[self.index]
        return (entry.T if self.turned else entry)[self.start : self.end : self.step]

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a tensor in the shape `stored`."""
        if self.index is None:
            return stored
        others = stored[1:2] if self.turned else stored[2:]
        return (len(range(self.start, self.end, self.step)), *others)


@dataclass(frozen=True)
class JoinedTensors:
    """Stored `tensors` of one type, in a row along `axis`."""

    tensors: tuple[str, ...]
    axis: int

    def header(self, headers: Sequence[StoredTensor]) -> StoredTensor:
        """The header of all, from the `headers` of `tensors`: type and file of the first, and the shape of the row."""
        shape = [*headers[0].shape]
        shape[self.axis] = sum(header.shape[self.axis] for header in headers)
        return replace(headers[0], shape=tuple(shape))

    def joined(self, read: "Callable[[str], torch.Tensor]") -> "torch.Tensor":
        """Read all of `tensors`, and join them."""
        import torch

        return torch.cat([read(tensor) for tensor in self.tensors], self.axis)


def find_weights(directory: Path, name: str, named: str | None = None) -> tuple[Path, ...]:
    """The safetensors files of the checkpoint in `directory`, sorted by name, with valid headers; `name` is the user's
    name for it, `named` the `transformers_weights` of its config.json.

    Measuring, hashing, streaming and quantizing read exactly these files, and transformers receives their tensors and
    finds no files of its own. Raises InputError when there are none (naming what there is), when one is damaged, when
    the index does not read or lists missing files, and when an adapter lies beside them, which transformers may or may
    not apply.
    """
    first = _first(directory, name, named)
    if exists(directory / ADAPTER):
        raise InputError(
            name,
            f"holds an adapter ({ADAPTER}) beside its weights",
            "move the adapter's files to a directory of their own, and give that with --adapter",
        )
    if not first.name.endswith(INDEX_END):
        read_headers((first,))
        return (first,)
    index = first
    weight_map = read_index(first)
    shards = sorted({local_path(directory / shard) for shard in weight_map.values()})
    missing = [shard.name for shard in shards if not exists(shard)]
    if missing:
        raise InputError(
            index,
            f"names {missing[0]}, which is missing ({len(missing)} of {len(shards)} shards are)",
            "copy or download it again",
        )
    headers = read_headers(tuple(shards))
    for tensor, shard in weight_map.items():
        if tensor not in headers or headers[tensor].file.name != shard:
            raise InputError(
                index, f"promises {tensor} in {shard}, which does not hold it", "copy or download the checkpoint again"
            )
    return tuple(shards)


def _first(directory: Path, name: str, named: str | None) -> Path:
    """The single file of weights, or the index of several: the file `named`, or the first that exists."""
    if named is not None:
        if Path(named).name != named or not named.endswith((WEIGHTS_END, INDEX_END)):
            raise InputError(
                directory / "config.json",
                f"transformers_weights is {named!r}, and not a file of safetensors beside it",
                "the checkpoint is damaged or not to be trusted",
            )
        return local_path(directory / named)
    path = next((directory / file for file in (SINGLE, INDEX) if exists(directory / file)), None)
    if path is None:
        raise InputError(name, *_instead(directory))
    return path


def _instead(directory: Path) -> tuple[str, str]:
    """Describe the weights of a checkpoint that has no safetensors, as fault and remedy."""
    if exists(directory / ADAPTER):
        return "is an adapter without its base model", "give the base model as MODEL, and this directory with --adapter"
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
    if pickled:
        code = (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"[X.from_pretrained({str(directory)!r}).save_pretrained('NEW') for X in (M, T)]"
        )
        return (
            f"has only pickled weights ({pickled[0]}), which can run code when read and are refused",
            f'convert them where you trust them with `python -c "{code}"` and give NEW',
        )
    others = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".gguf", ".h5", ".msgpack")
    )
    other_format = f" (but {others[0]})" if others else ""
    return (
        f"has no safetensors weights: neither {SINGLE} nor {INDEX}{other_format}, and pickled ones are not read",
        "save the model with save_pretrained",
    )


def read_index(path: Path, linted: bool = False) -> dict[str, str]:
    """Read `weight_map` of an index: tensor -> name of a file beside it.

    `linted`: the names of files are shown in quotes, and numbers beside the map are not looked at. Raises InputError
    for an index that does not parse, or points out of the directory.
    """
    content = read_json(path, finite=not linted)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise InputError(
            path, "does not read as a safetensors index (an object with a weight_map)", "copy or download it again"
        )
    for shard in shards.values():
        if Path(shard).name == shard and not (linted and "\0" in shard):
            continue
        shown = repr(shard) if linted else shard
        raise InputError(
            path, f"names {shown}, which is not a file beside it", "the checkpoint is damaged or not to be trusted"
        )
    return shards


def index_text(files: Mapping[str, str], nbytes: int) -> bytes:
    """Make the text of an index of `files` (tensor -> name of its file); `nbytes`: the bytes of all tensors."""
    return json_text({"metadata": {"total_size": nbytes}, "weight_map": {name: files[name] for name in sorted(files)}})


def read_headers(files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Tensor name -> header, in the order of the tensors in `files`.

    Raises InputError, naming the file, when one is damaged or cut short, and when two files have a tensor of one name.
    """
    from safetensors import safe_open

    headers: dict[str, StoredTensor] = {}
    for file in files:
        regular_file(file, AGAIN)
        with foreign(partial(_damaged, file)), safe_open(file, framework="numpy"):
            stored = read_header(file)
        file_headers = dict(sorted(stored.items(), key=lambda item: (item[1].start, item[1].end)))
        for name in file_headers.keys() & headers.keys():
            raise InputError(
                file, f"holds {name}, and so does {headers[name].file.name}", "copy or download the checkpoint again"
            )
        headers |= file_headers
    return headers


def _damaged(file: Path, error: BaseException) -> InputError:
    return damaged(file, error_text(error))


class Coding(Protocol):
    """The dequantized tensors of a checkpoint, where some of its tensors are codes with scales."""

    @property
    def other_files(self) -> tuple[Path, ...]:
        """The files that were read for it besides config.json and the weights."""

    def headers(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The headers of the decoded tensors: without scales, and with a type of numbers for codes."""

    def decoded(self, name: str, read: "Callable[[str], torch.Tensor]") -> "torch.Tensor | None":
        """Decode a tensor that is stored as codes to float32; None for other tensors. `read` reads a stored tensor."""


class Weights:
    """The tensors of a source checkpoint, by their names in the files, in the order of the files' data."""

    def __init__(
        self,
        files: tuple[Path, ...],
        coding: Coding | None = None,
        parts: Mapping[str, TensorPart] | None = None,
        joined: Mapping[str, JoinedTensors] | None = None,
    ):
        """Read the headers of `files`, but no tensor.

        `parts`: by name, the tensors that are parts of a stored one; `joined`: those that are several of these in a
        row, which are no tensors then. Raises InputError for files that have been damaged since they were checked.
        """
        self._coding = coding
        self._stored = read_headers(files)
        self._headers = coding.headers(self._stored) if coding else self._stored
        self._parts = parts or {}
        if parts:
            stored = {name: self._headers[part.tensor] for name, part in parts.items()}
            cut = {name: replace(header, shape=parts[name].shape(header.shape)) for name, header in stored.items()}
            self._headers = coding.headers(cut) if coding else cut
        self._joined = joined or {}
        if joined:
            rows = {name: row.header([self._headers[tensor] for tensor in row.tensors]) for name, row in joined.items()}
            in_rows = {tensor for row in joined.values() for tensor in row.tensors}
            others = {name: header for name, header in self._headers.items() if name not in in_rows}
            self._headers = coding.headers(others | rows) if coding else others | rows

    def names(self) -> KeysView[str]:
        """The names of all tensors."""
        return self._headers.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._headers[name].shape

    def dtype(self, name: str) -> str:
        """The type of a tensor as safetensors spells it: `BF16`, `F16`, `F32` …."""
        return self._headers[name].dtype

    def coded(self, name: str) -> bool:
        """Tell whether a tensor is stored as codes."""
        first = self._joined[name].tensors[0] if name in self._joined else name
        part = self._parts.get(first, TensorPart(first))
        return self._headers[name].dtype != self._stored[part.tensor].dtype

    def file(self, name: str) -> Path:
        """The file of a tensor."""
        return self._headers[name].file

    def tensor(self, name: str) -> "torch.Tensor":
        """Read a tensor: mapped from its file, read only, in its stored type; codes are dequantized to float32 in
        memory.
        """
        if name in self._joined:
            return self._changed(name, self._joined[name].joined(self.tensor))
        part = self._parts.get(name, TensorPart(name))
        decoded = self._coding.decoded(part.tensor, self.stored) if self._coding else None
        tensor = self.stored(part.tensor) if decoded is None else decoded
        if part.index is None:
            return tensor
        return self._changed(name, part.cut(tensor))

    def _changed(self, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return the `tensor` that was cut or joined, with the adapter that is merged into it, if any."""
        changed = self._coding.decoded(name, lambda _: tensor) if self._coding else None
        return tensor if changed is None else changed

    def stored(self, name: str) -> "torch.Tensor":
        """Read a stored tensor by its name in the files; this includes codes and scales."""
        from safetensors import safe_open

        file = self._stored[name].file
        with foreign(partial(_damaged, file)), safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


@dataclass(frozen=True)
class UnreadTensor:
    """The tensor `name` of `weights`, which is read when it is indexed, as slices of safetensors are: whoever casts it
    holds its mapped file no longer than that takes.
    """

    weights: Weights
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return self.weights.shape(self.name)

    def __getitem__(self, index: EllipsisType) -> "torch.Tensor":
        """Read the whole tensor, by `[...]`."""
        return self.weights.tensor(self.name)[index]


def check_finite(weights: Weights, report: Reporter = SILENT) -> None:
    """Raise InputError for the first weight with NaN or Inf, or with values that become Inf in BF16, and count
    these.
    """
    with report.track("Checking weights", len(weights.names()), "tensors") as advance:
        for name in weights.names():
            tensor = weights.tensor(name)
            if tensor.is_floating_point() and tensor.numel() and not _all_finite(tensor):
                raise InputError(
                    name,
                    f"holds {_offenders(tensor)} among {tensor.numel():,} values, in {weights.file(name)}",
                    "take an earlier checkpoint of the training, or copy or download the file again",
                )
            advance(1)


def _all_finite(tensor: "torch.Tensor") -> bool:
    """Tell whether all values are finite in BF16.

    `aminmax` runs at memory speed and propagates NaN and Inf. Rounding to BF16 is monotone, so the extremes decide for
    all values.
    """
    import torch

    extremes = torch.stack(tuple(torch.aminmax(tensor)))
    return bool(torch.isfinite(extremes.to(torch.bfloat16)).all())


def _offenders(tensor: "torch.Tensor") -> str:
    import torch

    nan = infinite = beyond = 0
    for chunk in tensor.flatten().split(CHUNK):
        nan += int(chunk.isnan().sum())
        infinite += int(chunk.isinf().sum())
        beyond += int((chunk.to(torch.bfloat16).isinf() & chunk.isfinite()).sum())
    counts = {"NaN": nan, "Inf": infinite, "beyond BF16's largest (3.39e38)": beyond}
    return " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
