"""The tables of a run's rows (`rows`), as the report, `fp8q inspect` and the closing table show them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ...core.columns import (
    Column,
    Table,
    count,
    decibels,
    duration,
    increase,
    magnitude,
    nats,
    number_column,
    share,
    size,
    text_column,
)
from ...export.engine.info import first_few
from ...quantize.scales.decisions import run_time_form
from ..accuracy.decision import interval_text, too_short
from ..accuracy.document import Accuracy, Divergence
from ..accuracy.limits import BF16, FP32
from ..advice.findings import AgainstRow, DelayedRow, Outlier
from .accuracy_rows import AccuracyRow
from .rows import PRECISIONS, EngineRow, FactRow, ModuleRow, SizeRow, StageRow

if TYPE_CHECKING:
    from ...quantize.sensitivity.document import Loss


def lossless(value: float | None) -> float:
    """Return the decibels of a value that has a scale: infinity where nothing is lost."""
    return float("inf") if value is None else value


def _terms(row: ModuleRow) -> str | int | None:
    """The codes for one value of the input."""
    if row.tail is not None:
        return f"tail of {row.tail}"
    if row.dynamic:
        return run_time_form(row).words
    return "BF16" if row.terms == 0 else row.terms


MODULE_COLUMNS: tuple[Column[ModuleRow], ...] = (
    Column("module", lambda row: row.module + (" (cache)" if row.kind == "cache" else ""), numeric=False),
    number_column("amax", magnitude),
    number_column("clip", magnitude),
    number_column("scale", magnitude),
    number_column("saturation", share),
    number_column("underflow", share),
    Column("terms", _terms),
    Column("input dB", lambda row: None if row.dynamic else lossless(row.sqnr_db), decibels),
    Column("best dB", lambda row: None if row.dynamic else lossless(row.sqnr_best_db), decibels),
    Column("weight dB", lambda row: lossless(row.weight_sqnr_db) if row.kind == "product" else None, decibels),
    Column("rounded", lambda row: None if row.held_out_tokens is None else row.weight_rounding, numeric=False),
    number_column("over nearest", "{:.2f}".format, "over_nearest"),
    number_column("held-out tokens", count, "held_out_tokens"),
)


def module_table(rows: Sequence[ModuleRow]) -> Table[ModuleRow]:
    """Tabulate the GEMMs that run in FP8, and the tensors of an FP8 cache."""
    return Table(
        "Modules in FP8",
        [row for row in rows if row.reason is None],
        MODULE_COLUMNS,
        "None: every module stays in BF16.",
    )


def bf16_cache_table(rows: Sequence[ModuleRow]) -> Table[ModuleRow]:
    """Tabulate the tensors of the cache that stay in BF16, as they would be in FP8."""
    return replace(
        module_table(rows), title="Cache in BF16, as it would be in FP8", missing="None: keys and values are in FP8."
    )


BF16_MODULE_COLUMNS: tuple[Column[ModuleRow], ...] = (
    text_column("module"),
    text_column("stays in BF16 because", "reason"),
    number_column("value", magnitude),
    number_column("samples", count),
)


def bf16_module_table(rows: Sequence[ModuleRow]) -> Table[ModuleRow]:
    """Tabulate the GEMMs that stay in BF16, and why."""
    return Table(
        "Modules that stay in BF16",
        [row for row in rows if row.reason is not None],
        BF16_MODULE_COLUMNS,
        "None: every GEMM runs in FP8.",
    )


OUTLIER_COLUMNS: tuple[Column[Outlier], ...] = (
    text_column("tensor"),
    text_column("what"),
    number_column("value", magnitude),
    text_column("what to do", "remedy"),
)


def outlier_table(rows: Sequence[Outlier]) -> Table[Outlier]:
    """Tabulate the findings, the worst first."""
    return Table("What stands out", rows, OUTLIER_COLUMNS, "Nothing: every number is within its limit.")


LOSS_COLUMNS: tuple[Column[Any], ...] = (
    text_column("tensor", "module"),
    text_column("kind"),
    number_column("KL alone", nats, "kl_nats"),
    Column("in two terms", lambda row: row.kl_after.exact, nats),
    Column("by gptq", lambda row: row.kl_after.gptq, nats),
    number_column("SQNR", decibels, "sqnr_db"),
    Column("measured", lambda row: "yes" if row.measured else None, numeric=False),
)


def loss_table(rows: "Sequence[Loss]") -> "Table[Loss]":
    """Tabulate the loss of each tensor alone, the worst last, where a terminal leaves the eye."""
    return Table("What each tensor costs alone", rows, LOSS_COLUMNS, "Nothing is quantized.")


DELAYED_COLUMNS: tuple[Column[DelayedRow], ...] = (
    text_column("tensor"),
    number_column("batches with a history", count, "batches"),
    number_column("saturated", share),
    number_column("largest jump", magnitude, "largest_jump"),
)


def delayed_table(rows: Sequence[DelayedRow]) -> Table[DelayedRow]:
    """Tabulate the result of delayed scaling for each tensor."""
    return Table("Under delayed scaling", rows, DELAYED_COLUMNS, "Nothing was measured.")


AGAINST_COLUMNS: tuple[Column[AgainstRow], ...] = (
    text_column("tensor"),
    number_column("clip", magnitude),
    number_column("amax there", magnitude, "amax"),
    number_column("of the clip", share, "amax_over_clip"),
    number_column("saturation", share),
    number_column("when calibrating", share, "calibrated_saturation"),
)


def against_table(rows: Sequence[AgainstRow]) -> Table[AgainstRow]:
    """Other text at the scales chosen before."""
    return Table("Against other text", rows, AGAINST_COLUMNS, "No tensor has a scale.")


ACCURACY_COLUMNS: tuple[Column[AccuracyRow], ...] = (
    text_column("runtime"),
    Column("perplexity", lambda row: row.perplexity, "{:.4f}".format),
    number_column("increase", increase, "perplexity_increase"),
    Column(
        "95 % interval",
        lambda row: None if row.increase_low is None else (row.increase_low, row.increase_high),
        interval_text,
    ),
    number_column("KL mean, nats", nats, "kl_mean_nats"),
    number_column("KL p99, nats", nats, "kl_p99_nats"),
    number_column("top-1 agreement", share, "top1_agreement"),
    Column("top-5 agreement", lambda row: row.top5_agreement, share, wide=True),
    number_column("KL from FP32", nats, "kl_fp32_nats"),
    number_column("KL of the sums", nats, "kl_sums_nats"),
    number_column("sampled tokens", count, "tokens"),
    number_column("KL at least", nats, "kl_least_nats"),
)


def accuracy_table(rows: Sequence[AccuracyRow], wide: bool = True) -> Table[AccuracyRow]:
    """Tabulate every runtime's perplexity, and its difference from BF16; `wide`: with columns for which a terminal of
    80 columns has no room.
    """
    columns = tuple(column for column in ACCURACY_COLUMNS if wide or not column.wide)
    short: dict[str, list[str]] = {}
    for row in rows:
        for why in filter(None, (without_interval(row), row.stored)):
            short.setdefault(why, []).append(row.runtime)
    note = ". ".join(f"{', '.join(names)}: {why}" for why, names in short.items())
    return Table("Accuracy", rows, columns, "Not evaluated yet: run `fp8q validate RUN`.", note)


@dataclass(frozen=True)
class DivergenceRow:
    """The KL of a runtime in one direction, `bf16||this`: mean and percentiles over tokens, in nats."""

    runtime: str
    direction: str
    divergence: Divergence


def divergence_rows(accuracy: Accuracy) -> list[DivergenceRow]:
    """The divergences of every runtime, in both directions, where they were measured; FP32's from BF16 are BF16's from
    it.
    """
    return [
        DivergenceRow(name, f"KL({direction.replace('this', name)})", divergence)
        for name, runtime in accuracy.runtimes.items()
        if not (name == FP32 and BF16 in accuracy.runtimes)
        for direction, divergence in (runtime.divergences or {}).items()
    ]


DIVERGENCE_COLUMNS: tuple[Column[DivergenceRow], ...] = (
    text_column("nats", "direction"),
    *(Column(name, attrgetter(f"divergence.{name}"), nats) for name in ("mean", "p50", "p90", "p99", "max")),
)


def divergence_table(rows: Sequence[DivergenceRow]) -> Table[DivergenceRow]:
    """Tabulate divergences, in nats."""
    return Table(
        "Distance of the next token’s distribution",
        rows,
        DIVERGENCE_COLUMNS,
        "Not evaluated yet: run `fp8q validate RUN`.",
    )


def without_interval(row: AccuracyRow) -> str:
    """Give the reason for a missing interval of an increase; empty where there is an interval or no increase."""
    if row.windows is None or row.increase_low is not None:
        return ""
    return too_short(row.windows)


SIZE_COLUMNS: tuple[Column[SizeRow], ...] = (
    text_column("what"),
    text_column("file", "path"),
    number_column("size", size, "bytes"),
    Column("of BF16", lambda row: row.share_of_bf16, lambda value: f"{100 * value:.0f} %"),
    text_column("contents"),
)


def size_table(rows: Sequence[SizeRow]) -> Table[SizeRow]:
    """Tabulate the sizes of the weights on disk."""
    return Table("Sizes", rows, SIZE_COLUMNS, "No checkpoint yet: run `fp8q calibrate MODEL --data TEXT --out RUN`.")


def engine_name(row: EngineRow) -> str:
    """Name an engine's target, with its adapter or precision where it is not the FP8 model alone."""
    return f"{row.target} {f'with {row.adapter}' if row.adapter else PRECISIONS[row.precision]}".strip()


ENGINE_COLUMNS: tuple[Column[EngineRow], ...] = (
    Column("target", engine_name, numeric=False),
    Column("runtime", lambda row: f"{row.runtime} {row.version}", numeric=False),
    number_column("expected GEMMs", count, "promised_products"),
    number_column("in FP8", count, "fp8_products"),
    Column("ran wider", lambda row: first_few(row.wide) or None, numeric=False),
    text_column("ran"),
    text_column("evidence"),
    number_column("size", size, "bytes"),
    number_column("built in", duration, "build_seconds"),
)


def engine_table(rows: Sequence[EngineRow], no_graph: str | None = None) -> Table[EngineRow]:
    """Tabulate every engine, with the expected GEMMs and those that run in FP8. `no_graph`: why the run has no ONNX
    graph to build one of.
    """
    missing = "No engine yet: run `fp8q build-engine RUN`."
    if no_graph:
        missing = f"None: the run has no ONNX graph, since {no_graph}."
    note = "Expected GEMMs are those that scales.json puts in FP8." if rows else ""
    return Table("Engines", rows, ENGINE_COLUMNS, missing, note)


STAGE_COLUMNS: tuple[Column[StageRow], ...] = (
    text_column("stage"),
    number_column("wall time", duration, "seconds"),
    number_column("peak memory", size, "peak_memory_bytes"),
)


def stage_table(rows: Sequence[StageRow]) -> Table[StageRow]:
    """Tabulate the time and memory of each stage."""
    return Table("Stages", rows, STAGE_COLUMNS, "No stage has finished yet.")


NOTE_COLUMNS: tuple[Column[tuple[str, str]], ...] = (
    Column("stage", lambda row: row[0], numeric=False),
    Column("note", lambda row: row[1], numeric=False),
)


def note_table(rows: Sequence[StageRow]) -> Table[tuple[str, str]]:
    """Tabulate the notes of the stages."""
    return Table(
        "Notes",
        [(row.stage, note) for row in rows for note in row.notes],
        NOTE_COLUMNS,
        "None: no default was lowered and nothing was left out.",
    )


FACT_COLUMNS: tuple[Column[FactRow], ...] = (
    text_column("what"),
    text_column("value"),
)


def fact_table(rows: Sequence[FactRow]) -> Table[FactRow]:
    """Tabulate the origin of the numbers."""
    return Table("What was measured", rows, FACT_COLUMNS, "Nothing was measured yet.")
