"""`bench.json`: the times of answers with their protocol, the computed memory, and the tables of both.

Measured and computed values are separate. Times, memory and energy belong to the named runtime. Capacity is computed
from the bytes of weights and cache, and holds for any runtime that stores both like the run.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...core.columns import Column, Table, count, number_column, size, text_column
from ...core.files import Strict

#: Writes a measured quantity, with four digits.
DIGITS = "{:.4g}".format
#: The types that the cache may have.
Form = Literal["bf16", "fp8"]


class BenchProtocol(Strict):
    """The protocol of the measurement; `emulated` where the runtime multiplies no FP8 codes, and so says nothing of
    FP8's speed.
    """

    runtime: str
    version: str = Field(description="of the runtime")
    device: str
    emulated: bool
    tokens: int = Field(description="of each answer")
    rounds: int = Field(description="answers timed of each variant and size")
    positions: int = Field(description="of a sequence, for which capacity is computed")
    memory_bytes: int = Field(description="which capacity is computed for")
    method: str


class BenchRow(Strict):
    """One variant at one size; milliseconds, and quantiles of the time between two tokens."""

    variant: str
    batch: int
    prompt: int = Field(description="tokens")
    ttft_ms: float = Field(description="until every row had its first token; median of the answers")
    itl_p50_ms: float
    itl_p95_ms: float
    itl_p99_ms: float
    latency_ms: float = Field(description="of the whole answer; median")
    tokens_per_second: float = Field(description="of all rows, over the latency")
    memory_bytes: int = Field(description="that the variant took of the device or, on a CPU, of this process")
    improvement: float | None = Field(
        default=None,
        description="latency of the first variant over this one's; null where FP8 is emulated, and for one alone",
    )
    joules_per_token: float | None = None
    cost_per_million_tokens: float | None = None


class Capacity(Strict):
    """Arithmetic on one variant, BF16 and FP8 always among them: no runtime took part."""

    variant: str
    weight_bytes: int = Field(description="all weights, as they are stored")
    step_bytes: int = Field(description="that a decode step of one sequence at its last position reads")
    improvement: float = Field(description="the first variant's step_bytes over these: what decoding can gain at most")
    cache_bytes: dict[Form, int] = Field(description="of a position, in either form")
    largest_batch: dict[Form, int] = Field(description="sequences that fit beside the weights")


class Bench(Strict):
    """`bench.json`."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=1)] = 1
    protocol: BenchProtocol
    rows: list[BenchRow]
    capacity: list[Capacity]


def times(factor: float) -> str:
    """A factor: `1.58×`."""
    return f"{factor:.2f}×"


def bench_table(rows: Sequence[BenchRow]) -> Table[BenchRow]:
    """Tabulate the measurements."""
    columns = (
        text_column("model", "variant"),
        number_column("batch", count),
        number_column("prompt", count),
        Column[BenchRow]("first token, ms", lambda row: row.ttft_ms, DIGITS),
        Column[BenchRow]("between tokens p50, ms", lambda row: row.itl_p50_ms, DIGITS),
        Column[BenchRow]("p95", lambda row: row.itl_p95_ms, DIGITS),
        Column[BenchRow]("p99", lambda row: row.itl_p99_ms, DIGITS),
        Column[BenchRow]("latency, ms", lambda row: row.latency_ms, DIGITS),
        Column[BenchRow]("tokens/s", lambda row: row.tokens_per_second, DIGITS),
        number_column("memory", size, "memory_bytes"),
        number_column("improvement", times),
        Column[BenchRow]("J/token", lambda row: row.joules_per_token, DIGITS),
        Column[BenchRow]("per million tokens", lambda row: row.cost_per_million_tokens, DIGITS),
    )
    return Table("Measured", rows, columns, "Nothing was measured: run `fp8q bench RUN`.")


def capacity_table(bench: Bench) -> Table[Capacity]:
    """Tabulate the capacities, for the memory and the sequences that its title names."""

    def largest(form: Form) -> Column[Capacity]:
        return Column(f"largest batch, {form.upper()} cache", lambda row: row.largest_batch[form], count)

    columns: tuple[Column[Any], ...] = (
        text_column("model", "variant"),
        number_column("weights", size, "weight_bytes"),
        number_column("read by a decode step", size, "step_bytes"),
        number_column("decoding at most", times, "improvement"),
        largest("bf16"),
        largest("fp8"),
    )
    title = f"Arithmetic: {size(bench.protocol.memory_bytes)}, sequences of {bench.protocol.positions:,} positions"
    return Table(title, bench.capacity, columns, "Nothing was computed.")
