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
from ...core.files import PARTIAL, disk_errors
from ...core.headers import StoredTensor, damaged, header_bytes
from ..codes.blocks import SIDE
from .coding import Errors, encode_part
from .plan import CheckpointPlan, Copied, Matrix, ShardPlan, placed

#: Values of a matrix, and bytes of a tensor that is copied, in one part; blocks may make the least part larger.
PART_VALUES, PART_BYTES = 1 << 21, 8 << 20
#: The largest error of a code in steps: codes are rounded to nearest.
HALF_STEP = 0.5
#: The types that matrices are read in: safetensors' name -> torch's.
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class OtherBytesError(Exception):
    """A finished file has other bytes than its parts would have now."""


@dataclass(frozen=True)
class Shard:
    """A file that is written or checked: descriptors of its source and of itself, and the place of each tensor."""

    plan: ShardPlan
    blocks: bool
    source: int
    target: int
    places: dict[str, StoredTensor]
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
        raw = np.empty(size, np.uint8)
        if _read(self.source, raw, start) != size:
            raise damaged(self.plan.source, "it has become shorter")
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
    for copied in plan.copies:
        for start in range(copied.stored.start, copied.stored.end, PART_BYTES):
            yield _copied_part(copied, start, min(start + PART_BYTES, copied.stored.end))


def _matrix_part(matrix: Matrix, top: int, bottom: int) -> Part:
    """The work on the rows from `top` to `bottom` of `matrix`: codes, proof, scales."""

    def work(shard: Shard) -> tuple[Errors, int]:
        kind = TYPES[matrix.dtype]
        raw = shard.get(
            matrix.start + top * matrix.columns * kind.itemsize, (bottom - top) * matrix.columns * kind.itemsize
        )
        values = torch.from_numpy(raw).view(kind).reshape(bottom - top, matrix.columns)
        coded = encode_part(matrix.name, values, shard.blocks)
        if not coded.errors.steps <= HALF_STEP:
            raise BackendError(
                matrix.name,
                f"has a code {coded.errors.steps:.3g} steps from its number in the rows {top:,} to {bottom - 1:,}, and "
                "half a step is the most",
                "check this machine's memory, and report it",
            )
        codes, scales = shard.places[matrix.codes], shard.places[matrix.scales]
        first = top // SIDE if shard.blocks else top
        shard.put(coded.codes, codes.start + top * matrix.columns)
        shard.put(coded.scales, scales.start + 4 * first * coded.scales.shape[1])
        return coded.errors, raw.size

    return work


def _copied_part(copied: Copied, start: int, end: int) -> Part:
    """The work on the bytes from `start` to `end` of a tensor that is copied."""

    def work(shard: Shard) -> tuple[Errors, int]:
        raw = shard.get(start, end - start)
        at = start - copied.stored.start
        if copied.cast:
            kind = TYPES[copied.stored.dtype]
            at = at // kind.itemsize * torch.bfloat16.itemsize
            narrow = torch.from_numpy(raw).view(kind).to(torch.bfloat16).view(torch.int16).numpy()
            shard.put(narrow, shard.places[copied.name].start + at)
        else:
            shard.put(raw, shard.places[copied.name].start + at)
        return Errors(), raw.size

    return work


class CheckpointWriter:
    """Writes the files of a plan into a directory, by a number of threads.

    `errors`: the largest ones of all parts; `checked`: the files of an earlier call that are whole.
    """

    def __init__(self, plan: CheckpointPlan, directory: Path, threads: int, advance: Callable[[int], None]):
        """Write into `directory`, which exists; `advance` is called with the bytes of the source that are done."""
        self.plan, self.directory, self.threads, self.advance = plan, directory, threads, advance
        self.errors, self.checked = Errors(), list[str]()

    def write(self) -> None:
        """Write or check every file; raises InputError for the disk's errors and for weights that are not finite."""
        with _single_threaded_torch(), ExitStack() as pools:
            pool = pools.enter_context(_pool(self.threads))
            flusher = pools.enter_context(_pool(1))
            flushing: Future[None] | None = None
            for shard in self.plan.shards:
                file = self.directory / shard.name
                if file.is_file():
                    if self._check(pool, shard, file):
                        self.checked.append(shard.name)
                        continue
                    file.unlink()
                partial = self.directory / f".{shard.name}{PARTIAL}"
                with disk_errors(file):
                    self._make(pool, shard, partial)
                if flushing is not None:
                    flushing.result()
                flushing = flusher.submit(_finish, partial, file)
            if flushing is not None:
                flushing.result()

    def _make(self, pool: ThreadPoolExecutor, plan: ShardPlan, partial: Path) -> None:
        head, places = placed(plan.written)
        with open(plan.source, "rb") as source, open(partial, "wb+") as target:
            target.write(head)
            target.flush()
            os.ftruncate(target.fileno(), max((place.end for place in places.values()), default=len(head)))
            self._run(pool, Shard(plan, self._blocks, source.fileno(), target.fileno(), places, written=True))

    def _check(self, pool: ThreadPoolExecutor, plan: ShardPlan, file: Path) -> bool:
        """Tell whether the finished `file` is what its parts make."""
        head, places = placed(plan.written)
        size = max((place.end for place in places.values()), default=len(head))
        try:
            if file.stat().st_size != size or header_bytes(file) != head[8:]:
                return False
            with open(plan.source, "rb") as source, open(file, "rb") as target:
                self._run(pool, Shard(plan, self._blocks, source.fileno(), target.fileno(), places, written=False))
        except (OtherBytesError, InputError):
            return False
        return True

    def _run(self, pool: ThreadPoolExecutor, shard: Shard) -> None:
        waiting = [pool.submit(part, shard) for part in parts_of(shard.plan, shard.blocks)]
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

    @property
    def _blocks(self) -> bool:
        return self.plan.form == "block"


def _finish(partial: Path, file: Path) -> None:
    """Write what the system still holds of a file to the disk, and give it its name."""
    with disk_errors(file):
        with open(partial, "rb+") as handle:
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
