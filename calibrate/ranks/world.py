"""Several processes that measure one model together, or train it: each takes some of the batches.

What they measure is added. Histograms are sums of integers, amax and channels are maxima, so the result equals that of
one process on the same batches bit for bit, however they are split, as long as each batch is computed alike: on the
same hardware, by the same versions, with the same number of threads, which is checked at the start. torchrun starts the
processes (or any launcher that sets its variables), and torch.distributed connects them: gloo on CPUs, and NCCL too on
GPUs. They exchange JSON and tensors: nothing is pickled.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from ... import __version__
from ...core.errors import BackendError, Fp8qError, InputError
from ...core.record import library_versions
from ...core.undo import at_end
from ..measure.histogram import Histogram
from ..measure.statistics import Statistics, TensorStatistics, replace_record
from ..model.bf16_gemms import bf16_arithmetic
from .heartbeat import Heartbeat, RankError, Stopped, line_of, rank_name
from .torchrun import ProcessRank, process_rank

#: The time that ranks wait for each other to start, and for a collective: a rank may read a checkpoint for hours, and
#: the heartbeat finds ranks that died.
MEETING = timedelta(minutes=2)
COLLECTIVE = timedelta(days=30)
#: The time that they wait for a collective of a library's training loop, in which Python handles no signal: rank 0 may
#: be writing a checkpoint meanwhile, and a machine that is cut off ends the others no later.
IN_A_LIBRARY = timedelta(minutes=30)
#: The most bytes of a message that a rank sends to others.
MESSAGE_BYTES = 1 << 28


class World:
    """All ranks of one measurement, as seen from one of them; with one rank every method is the identity."""

    def __init__(self, process: ProcessRank = ProcessRank(), device: str = "cpu", group: Any = None):
        """Describe the ranks of the process `group`; this one is `process`, and computes on `device`."""
        self.process = process
        self.device = device
        self.group = group
        self.rank = process.rank
        self.size = process.ranks
        self.heartbeat: Heartbeat | None = None
        self.members: list[dict[str, Any]] = [_self_description(process, device)]

    def machine(self) -> dict[str, Any]:
        """Describe the machines for the record: device, threads of each rank, ranks, hosts."""
        alike = self.members[0]["alike"]
        return {
            "device": alike["device"],
            "threads": alike["threads"],
            "ranks": self.size,
            "hosts": sorted({member["host"] for member in self.members}),
            **bf16_arithmetic(self.device),
        }

    def described(self) -> str:
        """Describe the ranks in one line."""
        machine = self.machine()
        hosts = len(machine["hosts"])
        threads = machine["threads"]
        on = f"{hosts} machines" if hosts > 1 else machine["hosts"][0]
        return (
            f"measuring on {self.size} ranks of {on} ({machine['device']}), {threads} "
            f"thread{'s' if threads > 1 else ''} each (OMP_NUM_THREADS)"
        )

    def share(self, batches: Sequence[int], in_turn: bool = False) -> list[int]:
        """The batches that this rank measures: every `size`-th; or, where ranks add to the same sums `in_turn`,
        neighbours, of which the last rank has the first and rank 0 the last.
        """
        if not in_turn:
            return list(batches[self.rank :: self.size])
        turn = self.size - 1 - self.rank
        first, end = (len(batches) * place // self.size for place in (turn, turn + 1))
        return list(batches[first:end])

    def paired(self, pairs: Sequence[tuple[int, int]]) -> list[Any]:
        """Make a process group of each of `pairs` of ranks, in their order; a collective."""
        return [self._dist.new_group([*pair], timeout=COLLECTIVE, backend="gloo") for pair in pairs]

    def broadcast(self, values: torch.Tensor, source: int, group: Any) -> None:
        """Send `values`, contiguous and on the CPU, from the rank `source` to the others of `group`, into theirs."""
        for part in values.view(-1).split(MESSAGE_BYTES // values.itemsize):
            self._settle(self._dist.broadcast(part, source, group=group, async_op=True))

    def gathered(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Collect the `document` of every rank, in the order of ranks; a collective."""
        if self.size == 1:
            return [dict(document)]
        payload = _bytes(document)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._settle(self._dist.all_gather(sizes, torch.tensor([len(payload)]), group=self.group, async_op=True))
        padded = torch.full((max(map(int, sizes)),), ord(" "), dtype=torch.uint8)  # JSON may end in blanks
        padded[: len(payload)] = payload
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._settle(self._dist.all_gather(parts, padded, group=self.group, async_op=True))
        return [json.loads(part.numpy().tobytes()) for part in parts]

    def sent(self, tokens: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
        """Send rank 0's `tokens` int64 [windows, seq_len] to every rank; a collective."""
        if self.size == 1:
            assert tokens is not None, "a rank alone has the tokens"
            return tokens
        shape = torch.tensor(tokens.shape if tokens is not None else (0, 0))
        self._settle(self._dist.broadcast(shape, 0, group=self.group, async_op=True))
        values = (
            torch.from_numpy(tokens) if tokens is not None else torch.empty(tuple(shape.tolist()), dtype=torch.int64)
        )
        self._settle(self._dist.broadcast(values, 0, group=self.group, async_op=True))
        result: npt.NDArray[np.int64] = values.numpy()
        return result

    def added(self, statistics: Statistics) -> Statistics:
        """Add the statistics of all ranks, on every rank (a collective). `statistics`: those of this rank."""
        if self.size == 1:
            return statistics
        summaries = self.gathered(
            {
                "tokens": statistics.record.tokens,
                "tensors": {name: len(t.amax_channels) for name, t in statistics.tensors.items()},
            }
        )
        for member, summary in zip(self.members, summaries):
            if summary["tensors"] != summaries[0]["tensors"]:
                differing = min({*summary["tensors"].items()} ^ {*summaries[0]["tensors"].items()})[0]
                raise Fp8qError(
                    member["name"],
                    f"did not measure the tensors of rank 0 ({differing} differs)",
                    "calibrate in one process",
                )
        tensors = {name: self._added_tensor(statistics.tensors[name]) for name in sorted(statistics.tensors)}
        record = replace_record(statistics.record, tokens=sum(summary["tokens"] for summary in summaries))
        return Statistics(record, tensors, statistics.weights)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Run a library's collectives in this block; raises RankError where one of them breaks because a rank died."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error).lower() for word in ("gloo", "nccl")):
                raise
            raise self._lost(error) from None

    def _added_tensor(self, tensor: TensorStatistics) -> TensorStatistics:
        """Add the statistics of one tensor over all ranks.

        Counts are summed. Of amax and channels the maximum of the bit patterns is taken: these have the order of the
        magnitudes, with NaN as the largest.
        """
        counts = torch.from_numpy(tensor.histogram.dense())
        bits = np.concatenate([tensor.amax_batches, tensor.amax_channels]).view(np.int32)
        batches = len(tensor.amax_batches)
        unmeasured = np.isnan(tensor.amax_batches)
        bits[:batches][unmeasured] = -1
        total = self._reduced(counts, "SUM")
        largest = self._reduced(torch.from_numpy(bits), "MAX").view(np.float32)
        amax_batches = np.where(largest[:batches].view(np.int32) < 0, np.float32(np.nan), largest[:batches])
        return TensorStatistics(Histogram.from_dense(total), amax_batches, largest[batches:].copy())

    def _reduced(self, values: torch.Tensor, operation: str) -> Any:
        values = values.to(self.device)
        self._settle(
            self._dist.all_reduce(values, getattr(self._dist.ReduceOp, operation), group=self.group, async_op=True)
        )
        return values.cpu().numpy()

    @property
    def _dist(self) -> Any:
        return torch.distributed

    def _settle(self, work: Any) -> None:
        """Wait for a collective in Python, where signals are handled.

        Raises RankError when it broke because a rank died.
        """
        try:
            while not work.is_completed():
                time.sleep(0.001)
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> BackendError:
        """Return the error for a broken connection; raises RankError where a rank is known to have failed."""
        if self.heartbeat is not None:
            self.heartbeat.explain()
        return BackendError(
            self.members[0]["name"],
            f"the ranks lost each other: {' '.join(str(error).split())[:300]}",
            "run the same command again",
        )


class FileChannel:
    """The connection of two ranks of `world`, whose process `group` it is: either sends files, and the other writes
    them. Ranks need not share a disk.
    """

    def __init__(self, world: World, group: Any, other: int):
        """Connect this rank with the `other`."""
        self.world = world
        self.group = group
        self.other = other

    def send(self, files: Sequence[Path]) -> None:
        """Send `files`, none of them empty, which `receive` of the other rank writes under their names."""
        header = json.dumps({file.name: file.stat().st_size for file in files}).encode()
        self._send(torch.tensor([len(header)]))
        self._send(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for file in files:
            self._send(torch.from_numpy(np.memmap(file, np.uint8, "c")))

    def receive(self, folder: Path) -> None:
        """Write the files that the other rank sends into `folder`, which exists."""
        size = self._received(torch.empty(1, dtype=torch.int64))
        header = self._received(torch.empty(int(size), dtype=torch.uint8))
        sizes: dict[str, Any] = json.loads(header.numpy().tobytes())
        for name, bytes_of_file in sizes.items():
            file = np.memmap(folder / name, np.uint8, "w+", shape=(int(bytes_of_file),))
            self._received(torch.from_numpy(file))
            file.flush()

    def _send(self, values: torch.Tensor) -> None:
        self.world.broadcast(values, self.world.rank, self.group)

    def _received(self, values: torch.Tensor) -> torch.Tensor:
        self.world.broadcast(values, self.other, self.group)
        return values


@contextmanager
def joined_ranks() -> Iterator[World]:
    """Meet the other ranks that were started with this one, and watch over them until the block ends on all of them.

    Raises InputError when they are not alike, BackendError when they do not meet, RankError when another rank fails.
    """
    here = process_rank()
    if here.ranks == 1:
        yield World(here, _device(here))
        return
    device = _device(here)
    dist: Any = torch.distributed
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=MEETING)
        world = World(here, device, dist.new_group(backend=backend, timeout=COLLECTIVE))
        beats = dist.new_group(backend="gloo", timeout=MEETING)
        world.members = world.gathered(world.members[0])
        dist.distributed_c10d._set_pg_timeout(IN_A_LIBRARY)
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        raise BackendError(
            rank_name(here.rank, socket.gethostname()),
            f"did not meet the other {here.ranks - 1} ranks at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {' '.join(str(error).split())[:300]}",
            "see that all were started, and that this address can be reached",
        ) from None
    heartbeat = world.heartbeat = Heartbeat(here.rank, [member["name"] for member in world.members], beats)
    try:
        if here.rank == 0:
            _check_alike(world.members)
        with at_end(lambda: _give_up(heartbeat, KeyboardInterrupt())):
            yield world
        heartbeat.end(None)
    except Stopped as stop:
        _give_up(heartbeat, stop.error)
        raise stop.error from None
    except BaseException as error:
        _give_up(heartbeat, error)
        raise
    dist.destroy_process_group()


def _device(here: ProcessRank) -> str:
    """Choose the GPU of this rank and make it the current one; the CPU where there is no GPU.

    Raises InputError when the machine has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return "cpu"
    if here.local_rank >= torch.cuda.device_count():
        raise InputError(
            f"--nproc-per-node {here.local_ranks}",
            f"this machine ({socket.gethostname()}) has {torch.cuda.device_count()} GPUs",
            "start at most as many ranks on it",
        )
    if here.ranks > 1:
        torch.cuda.set_device(here.local_rank)
    return "cuda"


def _self_description(here: ProcessRank, device: str) -> dict[str, Any]:
    host = socket.gethostname()
    kind = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    units = "FP32" if bf16_arithmetic(device) else "BF16"
    alike = {
        "fp8q": __version__, **library_versions(), "threads": torch.get_num_threads(), "device": kind,
        "arithmetic of BF16 GEMMs": units,
    }  # fmt: skip
    return {"name": rank_name(here.rank, host), "host": host, "alike": alike}


def _check_alike(members: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError for the first rank that would not compute as rank 0 does."""
    first = members[0]["alike"]
    for member in members[1:]:
        for what in sorted(first.keys() | member["alike"].keys()):
            mine = first.get(what)
            theirs = member["alike"].get(what)
            if mine != theirs:
                remedy = (
                    "set OMP_NUM_THREADS to the same number for all" if what == "threads" else "the ranks must be alike"
                )
                raise InputError(
                    member["name"],
                    f"its {what} is {theirs}, and rank 0's is {mine}: their sums would round differently",
                    remedy,
                )


def _bytes(document: Mapping[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(dict(document)).encode()), dtype=torch.uint8)


def _give_up(heartbeat: Heartbeat, error: BaseException) -> None:
    """Report the failure of this rank to the other ranks and to torchrun, in a line without a traceback."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not isinstance(error, RankError):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(Fp8qError("", line_of(error)))
    heartbeat.end(error)
