"""The gain of FP8, for the one who decides: memory, the speed that bytes and operations allow, and times where
`fp8q bench` measured them.

A decode step is bound by the bytes that it reads, a prompt by its operations (`quantize.scales.serving_cost`), so their
ratios bound what FP8 can gain on a GPU that multiplies its codes. They are arithmetic, and said to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.columns import Column, Table, size, text_column
from ...core.files import read_document
from ...core.run import Run
from ...quantize.reading.run_checkpoint import vocabulary_size
from ...quantize.scales.decisions import load_scales
from ...quantize.scales.serving_cost import BF16_BYTES, cost_of
from ..accuracy.document import load_accuracy
from ..bench.document import DIGITS, Bench, cache_of, gemm_shapes, times
from .rows import size_rows, wrote

#: The two models of a run that its times compare.
BF16 = "bf16"
FP8 = "fp8"


@dataclass(frozen=True)
class Gain:
    """A quantity in BF16 and in FP8, the factor between them, and how it is known."""

    what: str
    bf16: str
    fp8: str
    gain: str
    known: str


def gains(run: Run) -> list[Gain]:
    """List what FP8 gains; nothing without a checkpoint."""
    sizes = {row.what: row.bytes for row in size_rows(run)}
    if "FP8 checkpoint" not in sizes:
        return []
    before = sizes["weights in BF16"]
    after = sizes["FP8 checkpoint"]
    rows = [Gain("weights", size(before), size(after), f"{100 * after / before:.0f} % of BF16", "files")]
    return [*rows, *_arithmetic(run), *_measured(run)]


def _arithmetic(run: Run) -> list[Gain]:
    """Bounds of the speed: bytes of a decode step and operations of a prompt; nothing of a checkpoint in part."""
    if not (run.model / "config.json").is_file():
        return []
    scales = load_scales(run)
    shapes = gemm_shapes(run, vocabulary_size(run))
    in_bf16 = cost_of(shapes, {})
    codes = cost_of(shapes, {}, scales)
    positions = 0
    if run.onnx.is_file():
        cache = cache_of(run.onnx)
        in_bf16 = replace(in_bf16, cache_bytes=sum(BF16_BYTES * values for values, _ in cache))
        codes = replace(codes, cache_bytes=sum(values * (1 if narrow else BF16_BYTES) for values, narrow in cache))
        positions = load_accuracy(run).protocol.context if wrote(run, run.accuracy, "validate") else 0
    read = [cost.step_bytes(positions) for cost in (in_bf16, codes)]
    done = [cost.prefill_operations for cost in (in_bf16, codes)]
    if not all((*read, *done)):
        return []
    at = f" at position {positions:,}" if positions else ""
    return [
        Gain(
            f"read by a decode step{at}",
            size(read[0]),
            size(read[1]),
            f"decoding at most {times(read[0] / read[1])}",
            "arithmetic",
        ),
        Gain(
            "operations of a prompt, a token",
            operations_text(done[0]),
            operations_text(done[1]),
            f"prompts at most {times(done[0] / done[1])}",
            "arithmetic",
        ),
    ]


def operations_text(number: int) -> str:
    """Format a number of operations: 6_950_000 -> `6.95 M`."""
    return size(number).removesuffix("B").strip()


def _measured(run: Run) -> list[Gain]:
    """Times of BF16 and FP8 at the largest batch and prompt that both were measured at; of FP8 alone where it was."""
    if not wrote(run, run.bench, "bench"):
        return []
    bench = read_document(run.bench, Bench)
    pairs = {(row.batch, row.prompt): row for row in bench.rows if row.variant == BF16}
    every = [row for row in bench.rows if row.variant == FP8]
    both = [row for row in every if (row.batch, row.prompt) in pairs]
    if not every:
        return []
    ours = max(both or every, key=lambda row: (row.batch, row.prompt))
    theirs = pairs.get((ours.batch, ours.prompt))
    its = bench.protocol
    known = f"fp8q bench, {its.runtime} on {its.device}, batch {ours.batch:,}, prompts of {ours.prompt:,}"
    if its.emulated:
        known += "; FP8 is emulated there, which says nothing of its speed on a GPU"
    rows = []
    for what, field, unit in (
        ("tokens a second", "tokens_per_second", "as many"),
        ("between two tokens, ms", "itl_p50_ms", "the time"),
    ):
        after = getattr(ours, field)
        before = getattr(theirs, field) if theirs else None
        gain = f"{times(after / before)} {unit}" if before and not its.emulated else ""
        rows.append(Gain(what, DIGITS(before) if before else "", DIGITS(after), gain, known))
    return rows


def gain_table(rows: Sequence[Gain]) -> Table[Gain]:
    """Tabulate what FP8 gains."""
    columns = (
        text_column("what"),
        Column[Gain]("BF16", lambda row: row.bf16),
        Column[Gain]("FP8", lambda row: row.fp8),
        text_column("gain"),
        text_column("known by", "known"),
    )
    return Table(
        "What FP8 gains", rows, columns, "No checkpoint yet: run `fp8q calibrate MODEL --data TEXT --out RUN`."
    )
