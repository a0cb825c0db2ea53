"""`bench.json`: the times of answers with their protocol, the computed memory, and the tables of both.

Measured and computed values are separate. Times, memory and energy belong to the named runtime. Capacity is computed
from the bytes of weights and cache, and holds for any runtime that stores both like the run.

The memory that serving a model takes is arithmetic on the files of its run. Weights are counted as they are stored,
embeddings included; the bytes that a decode step reads are computed by `quantize.scales.serving_cost`. The cache's
shape is read from the graph's inputs, so any architecture will do. Activations, the runtime's own memory and
fragmentation are left out: the largest batch is an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from onnx import TensorProto
from pydantic import Field

from ...core.columns import Column, Table, count, number_column, size, text_column
from ...core.files import FirstSchema, Strict, read_document
from ...core.headers import read_header
from ...core.run import Run
from ...export.onnx_file.loading import load_graph
from ...options import Precision
from ...quantize.reading.run_checkpoint import checkpoint_of, tensor_files
from ...quantize.scales.decisions import Scales, load_scales
from ...quantize.scales.serving_cost import BF16_BYTES, Cost, cost_of, largest_batch
from ...serve.loop.sessions import NEW

#: Writes a measured quantity, with four digits.
DIGITS = "{:.4g}".format
#: The types that the cache may have.
CacheForm = Literal["bf16", "fp8"]


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
    cache_bytes: dict[CacheForm, int] = Field(description="of a position, in either form")
    largest_batch: dict[CacheForm, int] = Field(description="sequences that fit beside the weights")


class Bench(Strict):
    """`bench.json`."""

    schema_: FirstSchema = 1
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

    def largest(form: CacheForm) -> Column[Capacity]:
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


#: The ends of the names of scales, which a model in BF16 does not have.
SCALES = ("_scale", "_scale_inv")


@dataclass(frozen=True)
class Footprint:
    """A model's memory: `weight_bytes` of all that is stored, and the `values` that the cache keeps of a position."""

    weight_bytes: int
    cost: Cost
    values: int


def footprint(run: Run, precision: Precision, vocabulary: int, weights: Sequence[Path] = ()) -> Footprint:
    """Compute the memory of the model in `run` of a precision; `weights`: the files of a BF16 model that lies
    elsewhere.

    Raises InputError where a file of the run does not read.
    """
    directory = checkpoint_of(run, precision)
    files = weights or sorted(directory.glob("*.safetensors"))
    stored = [item for file in files for item in read_header(file).items()]
    if precision == "bf16":
        held = sum(BF16_BYTES * prod(tensor.shape) for name, tensor in stored if not name.endswith(SCALES))
    else:
        held = sum(tensor.end - tensor.start for _, tensor in stored)
    past = cache_of(run.onnx)
    cost = cost_of(gemm_shapes(run, vocabulary), {}, _scales(run, precision))
    cache = sum(values * (1 if codes and precision == "fp8" else BF16_BYTES) for values, codes in past)
    return Footprint(held, replace(cost, cache_bytes=cache), sum(values for values, _ in past))


def with_both(models: Sequence[tuple[str, Footprint]], run: Run, vocabulary: int) -> list[tuple[str, Footprint]]:
    """Put BF16 before the models in `models` and FP8 behind them, each where it is not among them: a model that is
    measured alone is compared by arithmetic, and this needs no BF16 files, since FP8's have the same shapes.
    """
    names = [name for name, _ in models]
    bf16_footprint = (
        footprint(run, "bf16", vocabulary, sorted(run.model.glob("*.safetensors"))) if "bf16" not in names else None
    )
    codes = footprint(run, "fp8", vocabulary) if "fp8" not in names else None
    return [*([("bf16", bf16_footprint)] if bf16_footprint else []), *models, *([("fp8", codes)] if codes else [])]


def _scales(run: Run, precision: Precision) -> Scales | None:
    if precision == "int8":
        return read_document(checkpoint_of(run, precision) / run.scales.name, Scales)
    if precision == "fp8":
        return load_scales(run)
    return None


def cache_of(graph: Path) -> list[tuple[int, bool]]:
    """Return, for each tensor of the cache that a graph takes, its values a position, and whether they are FP8 codes;
    each step gives [batch, heads, seq, size] of them.
    """
    cache = []
    for name, value in load_graph(graph).outputs.items():
        if name.startswith(NEW):
            tensor = value.type.tensor_type
            _, heads, _, size = (dimension.dim_value for dimension in tensor.shape.dim)
            cache.append((heads * size, tensor.elem_type == TensorProto.FLOAT8E4M3FN))
    return cache


def gemm_shapes(run: Run, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weight of every GEMM. A head whose weight is not stored is tied to the embeddings, of
    `vocabulary` rows.
    """
    scales = load_scales(run)
    where = tensor_files(run.model)
    stored = {
        name: tensor.shape
        for file in sorted({*where.values()})
        for name, tensor in read_header(run.model / file).items()
    }
    tied = next((shape for shape in stored.values() if len(shape) == 2 and shape[0] == vocabulary), ())
    shapes = {module: stored.get(f"{module}.weight", tied) for module in (*scales.weights, *scales.skipped)}
    return {module: shape for module, shape in shapes.items() if shape}


def capacities(models: Sequence[tuple[str, Footprint]], positions: int, memory: int) -> list[Capacity]:
    """Compute what fits into `memory` bytes, for each model (its name, its memory), in sequences of `positions`."""
    first = models[0][1].cost.step_bytes(positions)
    rows = []
    for name, model in models:
        cache: dict[CacheForm, int] = {"bf16": BF16_BYTES * model.values, "fp8": model.values}
        rows.append(
            Capacity(
                variant=name,
                weight_bytes=model.weight_bytes,
                step_bytes=model.cost.step_bytes(positions),
                improvement=first / model.cost.step_bytes(positions),
                cache_bytes=cache,
                largest_batch={
                    form: largest_batch(memory, model.weight_bytes, positions * taken) for form, taken in cache.items()
                },
            )
        )
    return rows
