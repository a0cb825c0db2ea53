"""What the parts share: sizes of a measurement and of its dry run, time, energy, and what a part says.

On a GPU, work is captured into a CUDA graph, so that nothing of Python or of launching is measured, replayed, and timed
by CUDA events; energy is NVML's counter around replays of the same graph. Weights are read from memory, not from the L2
cache: who measures gives as many copies of the work, each with weights of its own, as exceed it (`copies`). A dry run
does the same work once on the CPU, by its clock.

A part is made of steps (`Part.step`). A step begins only if its time, estimated by the last step of its kind, fits into
what is left of the part's time; otherwise it is left out, by name.
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
#: Seconds of a part.
LIMIT_S = 8 * 60
#: Bytes that are surely more than an L2 cache holds.
BEYOND_CACHE = 200 * 10**6
ROUNDS = 20
Work = Callable[[], object]


@dataclass
class Setting:
    """How a part runs: on a GPU, or `dry` on the CPU with tiny sizes; `run` is a run that is there, `vllm` the
    interpreter that has vLLM. `tiny`: the sizes of a dry run on whatever runs it (None: as `dry`). `earlier`: tables of
    an earlier call, for a part that goes on; `keep` is called with the part when there is something to keep; `limit_s`:
    the seconds of the part.
    """

    dry: bool
    run: Path | None = None
    begun: float = field(default_factory=time.monotonic)
    tiny: bool | None = None
    vllm: Path | None = None
    earlier: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    keep: Callable[["Part"], None] = lambda part: None
    limit_s: float = LIMIT_S

    @property
    def device(self) -> str:
        """Where tensors lie."""
        return "cpu" if self.dry else "cuda"

    def pick(self, full: T, tiny: T) -> T:
        """The size of the measurement, or of the dry run."""
        return tiny if (self.dry if self.tiny is None else self.tiny) else full

    @property
    def left_s(self) -> float:
        """Seconds that are left of the part's time."""
        return self.begun + self.limit_s - time.monotonic()

    def compiled(self, function: Callable[..., T], dynamic: bool | None = None) -> Callable[..., T]:
        """`function` by torch.compile; in a dry run traced, and then run as it is."""
        made: Callable[..., T] = torch.compile(function, backend=self.pick("inductor", "eager"), dynamic=dynamic)
        return made


@dataclass(frozen=True)
class Kind:
    """A kind of steps, of which each takes about as long as the one before, by their `size`; `first_s`: a guess for the
    first of them.
    """

    name: str
    first_s: float
    size: float = 1.0


@dataclass
class Part:
    """What a part found: tables of rows, what was asked for beside what was found, what was skipped and why, its steps
    with their seconds, and those that its time did not suffice for.
    """

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    strict: InitVar[bool] = False

    def __post_init__(self, strict: bool) -> None:
        """In a dry run a contender that fails is a mistake."""
        self._forgiven = () if strict else (Exception,)
        self._rates: dict[str, float] = {}

    def row(self, table: str, **figures: Any) -> None:
        """Add a row."""
        self.tables.setdefault(table, []).append(figures)

    def target(self, what: str, found: float | None, limit: float, least: bool = False) -> None:
        """Note a figure that has a limit: at most that, or `least`; None where it was not found."""
        met = None if found is None else bool(found >= limit if least else found <= limit)
        bound = "at least" if least else "at most"
        self.targets.append({"target": what, "found": found, "asked": bound, "limit": limit, "met": met})

    def step(self, setting: Setting, name: str, work: Callable[[], T], kind: Kind) -> T | None:
        """What `work` gives, if its time fits: that of the last step of its kind by `size`, or else `first_s`.

        None where it does not, and `name` is then listed under `left_out`. What `work` raises passes.
        """
        known = self._rates.get(kind.name)
        expected = kind.first_s if known is None else known * kind.size
        about = {"step": name, "estimated_s": round(expected, 1), "by": kind.name if known else "a guess"}
        if expected > setting.left_s:
            self.left_out.append(about | {"left_s": round(setting.left_s, 1)})
            return None
        begun = time.monotonic()
        try:
            return work()
        finally:
            took = time.monotonic() - begun
            self._rates[kind.name] = took / kind.size
            self.steps.append(about | {"seconds": round(took, 1)})
            setting.keep(self)

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


def seconds(works: Sequence[Work], setting: Setting, graph: bool = True, rounds: int = ROUNDS) -> float:
    """Median over `rounds` of the seconds of one of `works`, which are run one after the other; on a GPU as one CUDA
    graph, or called one by one without.
    """

    def every() -> None:
        for work in works:
            work()

    took = once(every, setting) if setting.dry else timed(captured(every) if graph else every, rounds)
    return took / len(works)


def once(work: Work, setting: Setting) -> float:
    """Seconds of the processor for `work`, in a dry run."""
    assert setting.dry, "a GPU works on while its host goes on"
    begun = time.process_time()
    work()
    return time.process_time() - begun


def timed(again: Work, rounds: int = ROUNDS) -> float:
    """Median seconds of `again` on the GPU, by CUDA events, after one call that is not timed."""
    again()
    times = []
    for _ in range(rounds):
        begun_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun_at.record()
        again()
        ended_at.record()
        ended_at.synchronize()
        times.append(begun_at.elapsed_time(ended_at) / 1e3)
    return float(median(times))


def cost(work: Work, setting: Setting) -> tuple[float, float | None]:
    """Seconds and joules of `work`, both of one and the same CUDA graph; joules None where nothing counts them."""
    if setting.dry:
        return once(work, setting), joules(work, setting)
    graph = captured(work)
    return timed(graph), joules(graph, setting)


def joules(again: Work, setting: Setting, least_s: float = 2.0) -> float | None:
    """Energy of one `again`, which is repeated for two seconds, as NVML's counter moves in steps of some 0.1 s; None
    without one. The GPU is waited for at the ends alone, and every 16 calls, so that it has no pauses.
    """
    meter: Meter = open_meter(not setting.dry)
    if meter.joules() is None:
        return None
    again()
    synchronize(setting)
    before, begun, count, together = meter.joules(), time.monotonic(), 0, setting.pick(16, 1)
    while not count or time.monotonic() - begun < setting.pick(least_s, 0):
        for _ in range(together):
            again()
        synchronize(setting)
        count += together
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
