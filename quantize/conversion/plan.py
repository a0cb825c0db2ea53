"""Plan the files of a converted checkpoint from the headers of its source: a file for each, with the same name.

Everything about a file that is written is known before a weight is read: its tensors, their types, shapes and places.
So parts of tensors can be written in any order, by several threads, and what a killed call has finished can be checked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ...core.headers import StoredTensor, make_header, read_header, value_bits
from ...options import BLOCK, DYNAMIC, ConvertForm, ConvertLayout, ScaleGrid
from ..codes.blocks import SIDE
from ..codes.formats import CODE_DTYPE, Float32s
from ..reading.codecs import CODECS
from ..scales.scheme import Scheme
from .name_tensors import WEIGHT
from .selection import Selection, Stack

#: A tensor to write: its type as safetensors spells it, and its shape.
Written = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Copied:
    """A tensor that keeps its bytes, or is cast to BF16: its name, and where it lies in the source."""

    name: str
    stored: StoredTensor
    cast: bool = False


@dataclass(frozen=True)
class Matrix:
    """A matrix to quantize: `rows` and `columns` at the byte `start` of the source, in its type `dtype`.

    Its codes are written as the tensor `codes`, its scales as `scales`. `stride`: of a matrix that is stored [in, out]
    as columns of a wider one, the values from one of its inputs to the next; 0 for one that is stored [out, in].
    `factors`: of codes in blocks the scales that they have, float32 [blocks, blocks].
    """

    name: str
    start: int
    dtype: str
    rows: int
    columns: int
    codes: str
    scales: str
    stride: int = 0
    factors: Float32s | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ShardPlan:
    """A file to write under the name of its `source`: its `head`, the bytes up to its data; where its
    `tensors` lie; and how they are made.

    The `file` of a tensor is the source, which is there before the file itself, and which messages name.
    """

    source: Path
    head: bytes
    tensors: Mapping[str, StoredTensor]
    copies: tuple[Copied, ...]
    matrices: tuple[Matrix, ...]

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.source.name

    @property
    def nbytes(self) -> int:
        """The bytes of the file."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class CheckpointPlan:
    """All files to write, in `form` and `layout`, and why matrices are kept, by the name of each tensor.

    `cast`: the type of the source's weights, where the tensors that are kept are cast from it to BF16. `declared`,
    `decided_by` and `unloadable` are the selection's; `blocks`: the grid of the scales of blocks, None for channels;
    `quantization`: of a source in blocks what its config.json says of that, which stays.
    """

    form: ConvertForm
    layout: ConvertLayout
    shards: tuple[ShardPlan, ...]
    unquantized: Mapping[str, str]
    cast: str | None = None
    declared: frozenset[str] = frozenset()
    decided_by: str = ""
    unloadable: str | None = None
    blocks: ScaleGrid | None = None
    quantization: Mapping[str, object] | None = None

    @property
    def scheme(self) -> Scheme:
        """The scheme of all modules that are quantized."""
        if self.form == "block":
            return Scheme("block", BLOCK)
        return Scheme("channel", DYNAMIC)

    @property
    def quantized(self) -> int:
        """The number of tensors of codes."""
        return sum(tensor.dtype == CODE_DTYPE for shard in self.shards for tensor in shard.tensors.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors.values())


def plan_checkpoint(
    files: Sequence[Path],
    headers: Mapping[str, StoredTensor],
    selection: Selection,
    form: tuple[ConvertForm, ConvertLayout],
    grid: ScaleGrid = "power-of-two",
) -> CheckpointPlan:
    """Plan the checkpoint in the form and layout `form`, whose source has `files` with their `headers`; `grid`: that of
    the scales of blocks.
    """
    types = Counter[str]()
    for name in (*selection.matrices, *selection.stacks):
        types[headers[name].dtype] += prod(headers[name].shape)
    usual = types.most_common(1)[0][0]
    planner = _Planner(form, selection, None if usual == "BF16" else usual)
    shards = tuple(planner.shard(file) for file in files)
    return CheckpointPlan(
        *form,
        shards,
        selection.unquantized,
        planner.cast,
        selection.declared,
        selection.decided_by,
        selection.unloadable,
        grid if form[0] == "block" else None,
    )


@dataclass
class _Planner:
    """Plans one file after the other."""

    form: tuple[ConvertForm, ConvertLayout]
    selection: Selection
    cast: str | None
    _written: dict[str, Written] = field(default_factory=dict)

    def shard(self, file: Path) -> ShardPlan:
        """Plan the file that is made of `file`."""
        self._written = {}
        copies: list[Copied] = []
        matrices: list[Matrix] = []
        for stored_name, stored in read_header(file).items():
            name = self.selection.renamed.get(stored_name, stored_name)
            if stored_name in self.selection.stacks:
                matrices += self._experts(self.selection.stacks[stored_name], stored)
            elif stored_name in self.selection.matrices:
                rows, columns = stored.shape
                matrices.append(self._matrix(name.removesuffix(WEIGHT), stored, stored.start, (rows, columns)))
            else:
                cast = stored.dtype == self.cast and len(stored.shape) > 1
                copies.append(Copied(name, stored, cast))
                self._written[name] = ("BF16" if cast else stored.dtype, stored.shape)
        return ShardPlan(file, *make_header(file, self._written), tuple(copies), tuple(matrices))

    def _experts(self, stack: Stack, stored: StoredTensor) -> Iterator[Matrix]:
        """Cut a stack of experts into matrices, and plan their codes and scales."""
        count, *sides = stored.shape
        outputs, inputs = reversed(sides) if stack.turned else sides
        parts = len(stack.modules) // count
        high = outputs // parts
        size = value_bits(stored.dtype) // 8
        for index, module in enumerate(stack.modules):
            expert, place = divmod(index, parts)
            start = stored.start + expert * outputs * inputs * size
            if stack.turned:
                yield self._matrix(module, stored, start + place * high * size, (high, inputs), outputs)
            else:
                yield self._matrix(module, stored, start + place * high * inputs * size, (high, inputs))

    def _matrix(self, module: str, stored: StoredTensor, start: int, sides: tuple[int, int], stride: int = 0) -> Matrix:
        rows, columns = sides
        blocks = self.form[0] == "block"
        codec = CODECS[self.form[1]]
        codes = f"{module}{WEIGHT}"
        scales = f"{module}.{codec.weight_scales[0]}"
        self._written[codes] = (CODE_DTYPE, (rows, columns))
        self._written[scales] = ("F32", (-(-rows // SIDE), -(-columns // SIDE)) if blocks else (rows, *codec.end))
        return Matrix(codes, start, stored.dtype, rows, columns, codes, scales, stride)
