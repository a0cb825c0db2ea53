"""Write the planned files of a checkpoint, part by part in several threads, and check those that a killed call wrote.

A part is read, encoded, proven, written and read back, so that memory holds a few parts however large a tensor is. A
file has its name once it is whole and on the disk; until then it is `.NAME.partial`. A finished file of an earlier call
is checked by making each of its parts again, without writing it: then its bytes are what they would be.

Reading with `preadv` and writing with `pwrite` at offsets needs no lock, and no mapped page stays in memory.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...core.errors import BackendError, InputError
from ...core.files import PARTIAL, created, disk_errors, is_own_file, not_followed, remove
from ...core.headers import damaged, header_bytes
from ...options import ScaleGrid
from ..codes.blocks import SIDE
from ..codes.encoding import CODE
from ..codes.formats import CODE_DTYPE
from .coding import Errors, encode_again, encode_part, refused_values
from .name_tensors import WEIGHT
from .plan import CheckpointPlan, Copied, Matrix, ShardPlan

#: Values of a matrix, and bytes of a tensor that is copied, in one part; blocks may make the least part larger.
PART_VALUES = 1 << 21
PART_BYTES = 8 << 20
#: The largest error of a code in steps: codes are rounded to nearest.
HALF_STEP = 0.5
#: The types that matrices are read in: safetensors' name -> torch's.
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, CODE_DTYPE: CODE}
#: The types that are looked through for NaN where a tensor is copied, and the bytes of the widest value of any type.
FLOATS = {**TYPES, "F64": torch.float64}
WIDEST = 8
#: The largest tensor that is looked through before anything is written, bytes.
SMALL_BYTES = 1 << 20


class OtherBytesError(Exception):
    """A finished file has other bytes than its parts would have now."""


@dataclass(frozen=True)
class Shard:
    """A file that is written or checked: descriptors of its source and of itself."""

    plan: ShardPlan
    blocks: ScaleGrid | None
    source: int
    target: int
    written: bool

    def put(self, content: npt.NDArray[Any], at: int) -> None:
        """Write `content` at the byte `at` and read it back; or, where the file is checked, compare it.

        Raises BackendError where what is read differs from what was written, OtherBytesError where it is compared.
        """
        raw = content.reshape(-1).view(np.uint8)
        if self.written:
            _write(self.target, raw, at)
        there = np.empty_like(raw)
        if _read(self.target, there, at) != raw.size or not np.array_equal(there, raw):
            if not self.written:
                raise OtherBytesError
            raise BackendError(self.plan.name, "reads back as other bytes than were written", "check the disk")

    def get(self, start: int, size: int) -> npt.NDArray[np.uint8]:
        """Read `size` bytes of the source from the byte `start` on; raises InputError for a file that ends before."""
        return _read_source(self.plan.source, self.source, start, size)


def _read_source(file: Path, handle: int, start: int, size: int) -> npt.NDArray[np.uint8]:
    raw = np.empty(size, np.uint8)
    if _read(handle, raw, start) != size:
        raise damaged(file, "it has become shorter")
    return raw


def _read(handle: int, into: npt.NDArray[np.uint8], at: int) -> int:
    done = 0
    while done < into.size and (count := os.preadv(handle, [into[done:].data], at + done)):
        done += count
    return done


def _write(handle: int, raw: npt.NDArray[np.uint8], at: int) -> None:
    done = 0
    while done < raw.size:
        done += os.pwrite(handle, raw[done:].data, at + done)


#: Makes one part: its errors, and the bytes of the source that it took.
Part = Callable[[Shard], tuple[Errors, int]]


def parts_of(plan: ShardPlan, blocks: bool) -> Iterator[Part]:
    """Cut the work of a file into parts, in the order of the source's bytes."""
    for matrix in plan.matrices:
        rows = max(1, PART_VALUES // matrix.columns)
        rows = -(-rows // SIDE) * SIDE if blocks else rows
        for top in range(0, matrix.rows, rows):
            yield _matrix_part(matrix, top, min(top + rows, matrix.rows))
    step = PART_BYTES // WIDEST * WIDEST  # no value lies in two parts
    for copied in plan.copies:
        for start in range(copied.stored.start, copied.stored.end, step):
            yield _copied_part(copied, start, min(start + step, copied.stored.end))


def check_small_tensors(plan: CheckpointPlan) -> None:
    """Check the values of the tensors that are copied and small, as norms and biases are, before anything is written;
    those of the others are checked as they are read. Raises InputError as `check_values` does.
    """
    for shard in plan.shards:
        with open(shard.source, "rb") as source:
            for copied in shard.copies:
                start = copied.stored.start
                size = copied.stored.nbytes
                if 0 < size <= SMALL_BYTES and copied.stored.dtype in FLOATS:
                    raw = _read_source(shard.source, source.fileno(), start, size)
                    check_values(copied, torch.from_numpy(raw).view(FLOATS[copied.stored.dtype]))


def check_values(copied: Copied, values: torch.Tensor) -> None:
    """Raise InputError, naming the tensor, for `values` of it that are NaN, which make every answer NaN, and for
    infinite ones of a weight; masks and biases may be infinite.
    """
    if copied.name.endswith(WEIGHT):
        if bool(values.isfinite().all()):
            return
    elif not bool(values.isnan().any()):
        return
    raise refused_values(copied.name, int(values.isnan().sum()), int(values.isinf().sum()), values.numel())


def _matrix_part(matrix: Matrix, top: int, bottom: int) -> Part:
    """The work on the rows from `top` to `bottom` of `matrix`: codes, proof, scales."""

    def work(shard: Shard) -> tuple[Errors, int]:
        values = _rows(shard, matrix, top, bottom)
        if matrix.factors is None:
            coded = encode_part(matrix.name, values, shard.blocks)
        else:
            coded = encode_again(matrix.name, values, matrix.factors[top // SIDE : -(-bottom // SIDE)])
        if not coded.errors.steps <= HALF_STEP:
            raise BackendError(
                matrix.name,
                f"has a code {coded.errors.steps:.3g} steps from its number in the rows {top:,} to {bottom - 1:,}, and "
                "half a step is the most",
                "check this machine's memory, and report it",
            )
        codes = shard.plan.tensors[matrix.codes]
        scales = shard.plan.tensors[matrix.scales]
        first = top // SIDE if shard.blocks else top
        shard.put(coded.codes, codes.start + top * matrix.columns)
        shard.put(coded.scales, scales.start + 4 * first * coded.scales.shape[1])
        return coded.errors, values.nbytes

    return work


def _rows(shard: Shard, matrix: Matrix, top: int, bottom: int) -> torch.Tensor:
    """Read the rows from `top` to `bottom` of `matrix`; of one that is stored [in, out] they are columns."""
    kind = TYPES[matrix.dtype]
    if not matrix.stride:
        start = matrix.start + top * matrix.columns * kind.itemsize
        size = (bottom - top) * matrix.columns
        return torch.from_numpy(shard.get(start, size * kind.itemsize)).view(kind).reshape(-1, matrix.columns)
    wide = [
        shard.get(matrix.start + (row * matrix.stride + top) * kind.itemsize, (bottom - top) * kind.itemsize)
        for row in range(matrix.columns)
    ]
    return torch.from_numpy(np.stack(wide)).view(kind).T.contiguous()


def _copied_part(copied: Copied, start: int, end: int) -> Part:
    """The work on the bytes from `start` to `end` of a tensor that is copied."""

    def work(shard: Shard) -> tuple[Errors, int]:
        raw = shard.get(start, end - start)
        at = start - copied.stored.start
        content = raw
        kind = FLOATS.get(copied.stored.dtype)
        if kind is not None:
            values = torch.from_numpy(raw).view(kind)
            if copied.cast:
                values = values.to(torch.bfloat16)
                at = at // kind.itemsize * torch.bfloat16.itemsize
                content = values.view(torch.int16).numpy()
            check_values(copied, values)
        shard.put(content, shard.plan.tensors[copied.name].start + at)
        return Errors(), raw.size

    return work


class CheckpointWriter:
    """Writes the files of a plan into a directory, by a number of threads.

    `errors`: the largest ones of all parts; `checked`: the files of an earlier call that are whole.
    """

    def __init__(self, plan: CheckpointPlan, directory: Path, threads: int, advance: Callable[[int], None]):
        """Write into `directory`, which exists; `advance` is called with the bytes of the source that are done."""
        self.plan = plan
        self.directory = directory
        self.threads = threads
        self.advance = advance
        self.errors = Errors()
        self.checked = list[str]()

    def write(self) -> None:
        """Write or check every file; raises InputError for the disk's errors and for weights that are not finite."""
        with _single_threaded_torch(), ExitStack() as pools:
            pool = pools.enter_context(_pool(self.threads))
            flusher = pools.enter_context(_pool(1))
            flushing: Future[None] | None = None
            for shard in self.plan.shards:
                file = self.directory / shard.name
                if is_own_file(file) and self._check(pool, shard, file):
                    self.checked.append(shard.name)
                    continue
                remove(file)
                partial = self.directory / f".{shard.name}{PARTIAL}"
                with disk_errors(file):
                    self._make(pool, shard, partial)
                if flushing is not None:
                    flushing.result()
                flushing = flusher.submit(_finish, partial, file)
            if flushing is not None:
                flushing.result()

    def _make(self, pool: ThreadPoolExecutor, plan: ShardPlan, partial: Path) -> None:
        remove(partial)
        with open(plan.source, "rb") as source, open(partial, "wb+", opener=created) as target:
            target.write(plan.head)
            target.flush()
            os.ftruncate(target.fileno(), plan.nbytes)
            self._run(pool, Shard(plan, self.plan.blocks, source.fileno(), target.fileno(), written=True))

    def _check(self, pool: ThreadPoolExecutor, plan: ShardPlan, file: Path) -> bool:
        """Tell whether the finished `file` is what its parts make."""
        try:
            if file.stat().st_size != plan.nbytes or header_bytes(file) != plan.head[8:]:
                return False
            with open(plan.source, "rb") as source, open(file, "rb") as target:
                self._run(pool, Shard(plan, self.plan.blocks, source.fileno(), target.fileno(), written=False))
        except (OtherBytesError, InputError):
            return False
        return True

    def _run(self, pool: ThreadPoolExecutor, shard: Shard) -> None:
        waiting = [pool.submit(part, shard) for part in parts_of(shard.plan, shard.blocks is not None)]
        try:
            for future in waiting:
                errors, done = future.result()
                self.errors |= errors
                self.advance(done)
        finally:
            for future in waiting:
                future.cancel()
            for future in waiting:
                if not future.cancelled():
                    future.exception()  # the descriptors are closed once no thread uses them


def _finish(partial: Path, file: Path) -> None:
    """Write what the system still holds of a file to the disk, and give it its name."""
    with disk_errors(file):
        with open(partial, "rb+", opener=not_followed) as handle:
            os.fsync(handle.fileno())
        partial.rename(file)


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that end with the block, without what has not begun where it fails."""
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """Let each torch operation run in the thread that calls it: parts are what runs in parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
