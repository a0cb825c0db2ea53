"""Plan the files of a converted checkpoint from the headers of its source: a file for each, with the same name.

Everything about a file that is written is known before a weight is read: its tensors, their types, shapes and places.
So parts of tensors can be written in any order, by several threads, and what a killed call has finished can be checked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ...calibrate.checkpoint.weights import TensorHeader
from ...core.headers import StoredTensor, make_header, read_header
from ...options import ConvertForm, ConvertLayout
from ..codes.blocks import SIDE
from ..codes.formats import CODE_DTYPE
from .rules import WEIGHT, Rules, Selection, stack_split

#: The bytes of a value, by the type as safetensors spells it, where it has a power of two of them.
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Written:
    """A tensor to write: its type as safetensors spells it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return prod(self.shape) * _SIZES.get(self.dtype, 1)


@dataclass(frozen=True)
class Copied:
    """A tensor that keeps its bytes, or is cast to BF16: its name, and where it lies in the source."""

    name: str
    stored: StoredTensor
    cast: bool = False


@dataclass(frozen=True)
class Matrix:
    """A matrix to quantize: `rows` and `columns` at the byte `start` of the source, in its type `dtype`.

    Its codes are written as the tensor `codes`, its scales as `scales`.
    """

    name: str
    start: int
    dtype: str
    rows: int
    columns: int
    codes: str
    scales: str


@dataclass(frozen=True)
class ShardPlan:
    """A file to write under the `name` of its `source`: its tensors, and how each is made."""

    source: Path
    name: str
    written: Mapping[str, Written]
    copies: tuple[Copied, ...]
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True)
class CheckpointPlan:
    """All files to write, in `form` and `layout`, and why matrices are kept, by the name of each tensor.

    `cast`: the type of the source's weights, where the tensors that are kept are cast from it to BF16.
    """

    form: ConvertForm
    layout: ConvertLayout
    shards: tuple[ShardPlan, ...]
    unquantized: Mapping[str, str]
    cast: str | None = None

    @property
    def quantized(self) -> int:
        """The number of tensors of codes."""
        return sum(tensor.dtype == CODE_DTYPE for shard in self.shards for tensor in shard.written.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.written.values())


def plan_checkpoint(
    files: Sequence[Path],
    headers: Mapping[str, TensorHeader],
    config: Mapping[str, Any],
    rules: Rules,
    selection: Selection,
    form: tuple[ConvertForm, ConvertLayout],
) -> CheckpointPlan:
    """Plan the checkpoint in the form and layout `form`, whose source has `files`, their `headers`, and `config`."""
    types = Counter[str]()
    for name in (*selection.matrices, *selection.stacks):
        types[headers[name].dtype] += prod(headers[name].shape)
    usual = types.most_common(1)[0][0]
    planner = _Planner(form, config, rules, selection, None if usual == "BF16" else usual, dict(selection.unquantized))
    shards = tuple(planner.shard(file) for file in files)
    return CheckpointPlan(*form, shards, planner.unquantized, planner.cast)


@dataclass
class _Planner:
    """Plans one file after the other, and adds to `unquantized` the stacks that cannot be split."""

    form: tuple[ConvertForm, ConvertLayout]
    config: Mapping[str, Any]
    rules: Rules
    selection: Selection
    cast: str | None
    unquantized: dict[str, str]
    _written: dict[str, Written] = field(default_factory=dict)

    def shard(self, file: Path) -> ShardPlan:
        """Plan the file that is made of `file`."""
        self._written, copies, matrices = {}, list[Copied](), list[Matrix]()
        chosen = {*self.selection.matrices, *self.selection.stacks}
        for name, stored in read_header(file).items():
            made = tuple(self._matrices(name, stored)) if name in chosen else ()
            matrices += made
            if not made:
                cast = stored.dtype == self.cast and len(stored.shape) > 1
                copies.append(Copied(name, stored, cast))
                self._written[name] = Written("BF16" if cast else stored.dtype, stored.shape)
        return ShardPlan(file, file.name, self._written, tuple(copies), tuple(matrices))

    def _matrices(self, name: str, stored: StoredTensor) -> Iterator[Matrix]:
        """Cut the tensor `name` into matrices, and plan their codes and scales; nothing for one that must be kept."""
        if len(stored.shape) == 2:
            yield self._matrix(name.removesuffix(WEIGHT), stored, stored.start, *stored.shape)
            return
        count, rows, columns = stored.shape
        parts = stack_split(self.rules, self.config, name, stored.shape)
        if isinstance(parts, str):
            self.unquantized[name] = parts
            return
        high, stem, size = rows // len(parts), name.rpartition(".")[0], _SIZES[stored.dtype] * columns
        for index in range(count):
            for place, part in enumerate(parts):
                start = stored.start + (index * rows + place * high) * size
                yield self._matrix(f"{stem}.{index}.{part}", stored, start, high, columns)

    def _matrix(self, module: str, stored: StoredTensor, start: int, rows: int, columns: int) -> Matrix:
        blocks, fp8 = self.form[0] == "block", self.form[1] == "fp8"
        codes, scales = f"{module}{WEIGHT}", f"{module}{WEIGHT}_scale{'_inv' if fp8 else ''}"
        self._written[codes] = Written(CODE_DTYPE, (rows, columns))
        self._written[scales] = Written("F32", (-(-rows // SIDE), -(-columns // SIDE)) if blocks else (rows, 1))
        return Matrix(codes, start, stored.dtype, rows, columns, codes, scales)


def placed(written: Mapping[str, Written]) -> tuple[bytes, dict[str, StoredTensor]]:
    """The first bytes of a file of these tensors, up to its data, and the place of each in it.

    Wider types come first, so that each value lies at a multiple of its size, which readers that map a file need.
    """
    order = sorted(written, key=lambda name: -_SIZES.get(written[name].dtype, 1))
    return make_header({name: (written[name].dtype, written[name].shape, written[name].nbytes) for name in order})
