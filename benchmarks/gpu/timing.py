"""What the parts share: sizes of a measurement and of its dry run, time, energy, and what a part says.

On a GPU, work is captured into a CUDA graph, so that nothing of Python or of launching is measured, replayed, and timed
by CUDA events; energy is NVML's counter around the replays. Weights are read from memory, not from the L2 cache: who
measures gives as many copies of the work, each with weights of its own, as exceed it (`copies`). A dry run does the
same work once on the CPU, by its clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from fp8q.serve.bench.meter import Meter, open_meter

T = TypeVar("T")
#: A part ends within eight minutes: it begins nothing new after these.
SECONDS = 7 * 60
#: Bytes that are surely more than an L2 cache holds.
BEYOND_CACHE = 200 * 10**6
ROUNDS = 20
Work = Callable[[], object]


@dataclass
class Setting:
    """How a part runs: on a GPU, or `dry` on the CPU with tiny sizes; `run` is a run of the demo that is there."""

    dry: bool
    run: Path | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        """Where tensors lie."""
        return "cpu" if self.dry else "cuda"

    def pick(self, full: T, tiny: T) -> T:
        """The size of the measurement, or of the dry run."""
        return tiny if self.dry else full

    @property
    def over(self) -> bool:
        """Whether the part's time is."""
        return time.monotonic() - self.begun > SECONDS

    def compiled(self, function: Callable[..., T], dynamic: bool | None = None) -> Callable[..., T]:
        """`function` by torch.compile; in a dry run traced, and then run as it is."""
        made: Callable[..., T] = torch.compile(function, backend=self.pick("inductor", "eager"), dynamic=dynamic)
        return made


@dataclass
class Part:
    """What a part found: tables of rows, what was asked for beside what was found, and what was left out."""

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    strict: InitVar[bool] = False

    def __post_init__(self, strict: bool) -> None:
        """In a dry run a contender that fails is a mistake."""
        self._forgiven = () if strict else (Exception,)

    def row(self, table: str, **figures: Any) -> None:
        """Add a row."""
        self.tables.setdefault(table, []).append(figures)

    def target(self, what: str, found: float | None, limit: float, least: bool = False) -> None:
        """Note a figure that has a limit: at most that, or `least`; None where it was not found."""
        met = None if found is None else bool(found >= limit if least else found <= limit)
        bound = "at least" if least else "at most"
        self.targets.append({"target": what, "found": found, "asked": bound, "limit": limit, "met": met})

    def late(self, name: str, setting: Setting) -> bool:
        """Whether there is no time left for `name`, which is then named under `skipped`."""
        late = setting.over
        if late:
            self.skipped[name] = "the part's time is over"
        return late

    def tried(self, name: str, work: Callable[[], T]) -> T | None:
        """What `work` gives; where it fails, None, and why under `skipped`: one contender must not end the others."""
        try:
            return work()
        except self._forgiven as error:  # whatever a library of the GPU's raises
            lines = str(error).strip().splitlines() or [""]
            self.skipped[name] = f"{type(error).__name__}: {lines[0][:300]}"
            return None


def synchronize(setting: Setting) -> None:
    """Wait for the GPU."""
    if not setting.dry:
        torch.cuda.synchronize()


def captured(work: Work) -> Work:
    """`work` as a CUDA graph, after the three calls that compile, choose and allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copies(weight_bytes: int, setting: Setting) -> int:
    """How many weights of that size exceed the cache together."""
    return setting.pick(max(1, -(-BEYOND_CACHE // weight_bytes)), 2)


def seconds(works: Sequence[Work], setting: Setting, graph: bool = True) -> float:
    """Median over rounds of the seconds of one of `works`, which are run one after the other; on a GPU as one CUDA
    graph, or called one by one without.
    """

    def every() -> None:
        for work in works:
            work()

    if setting.dry:
        begun = time.process_time()
        every()
        return (time.process_time() - begun) / len(works)
    again = captured(every) if graph else every
    again()
    times = []
    for _ in range(ROUNDS):
        begun_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun_at.record()
        again()
        ended_at.record()
        ended_at.synchronize()
        times.append(begun_at.elapsed_time(ended_at) / 1e3)
    return float(median(times)) / len(works)


def joules(work: Work, setting: Setting, least_seconds: float = 1.0) -> float | None:
    """Energy of one `work`, which is repeated for a second, as NVML's counter moves in steps; None without one."""
    meter: Meter = open_meter(not setting.dry)
    synchronize(setting)
    before, begun, count = meter.joules(), time.monotonic(), 0
    while not count or time.monotonic() - begun < setting.pick(least_seconds, 0):
        work()
        synchronize(setting)
        count += 1
    after = meter.joules()
    return None if before is None or after is None else (after - before) / count


def digits(value: object) -> str:
    """A figure as a table has it: four digits; what is missing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}"


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table of text, in the order of the first one's columns."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    cells = [heads, *([digits(row.get(name)) for name in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells)
