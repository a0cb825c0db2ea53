"""The tables of a run's rows (`rows`), as the report, `fp8q inspect` and the closing table show them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...core.columns import Column, Table, count, decibels, duration, increase, magnitude, nats, share, size
from ...export.engine.info import first_few
from ..advice.findings import AgainstRow, DelayedRow, Outlier
from .curves import LEAST_WINDOWS
from .rows import PRECISIONS, AccuracyRow, EngineRow, FactRow, ModuleRow, SizeRow, StageRow

if TYPE_CHECKING:
    from ..sensitivity.document import Loss


def lossless(value: float | None) -> float:
    """The decibels of what has a scale: none where nothing is lost."""
    return float("inf") if value is None else value


def module_table(rows: Sequence[ModuleRow]) -> Table[ModuleRow]:
    """The products that run in FP8, and the tensors of an FP8 cache."""
    columns = (
        Column[ModuleRow](
            "module", lambda row: row.module + (" (cache)" if row.kind == "cache" else ""), numeric=False
        ),
        Column[ModuleRow]("amax", lambda row: row.amax, magnitude),
        Column[ModuleRow]("clip", lambda row: row.clip, magnitude),
        Column[ModuleRow]("scale", lambda row: row.scale, magnitude),
        Column[ModuleRow]("saturation", lambda row: row.saturation, share),
        Column[ModuleRow]("underflow", lambda row: row.underflow, share),
        Column[ModuleRow]("terms", lambda row: row.terms, count),
        Column[ModuleRow]("input dB", lambda row: lossless(row.sqnr_db), decibels),
        Column[ModuleRow]("best dB", lambda row: lossless(row.sqnr_best_db), decibels),
        Column[ModuleRow](
            "weight dB", lambda row: lossless(row.weight_sqnr_db) if row.kind == "product" else None, decibels
        ),
    )
    return Table(
        "Modules in FP8", [row for row in rows if row.reason is None], columns, "None: every module stays in BF16."
    )


def wide_cache_table(rows: Sequence[ModuleRow]) -> Table[ModuleRow]:
    """The tensors of the cache that stay in BF16, and what FP8 would do to them."""
    return replace(
        module_table(rows), title="Cache in BF16, as it would be in FP8", missing="None: keys and values are in FP8."
    )


def kept_table(rows: Sequence[ModuleRow]) -> Table[ModuleRow]:
    """The products that stay in BF16, and why."""
    columns = (
        Column[ModuleRow]("module", lambda row: row.module, numeric=False),
        Column[ModuleRow]("stays in BF16 because", lambda row: row.reason, numeric=False),
        Column[ModuleRow]("value", lambda row: row.value, magnitude),
        Column[ModuleRow]("samples", lambda row: row.samples, count),
    )
    return Table(
        "Modules that stay in BF16",
        [row for row in rows if row.reason is not None],
        columns,
        "None: every matrix product runs in FP8.",
    )


def outlier_table(rows: Sequence[Outlier]) -> Table[Outlier]:
    """Tabulate the findings, the worst first."""
    columns = (
        Column[Outlier]("tensor", lambda row: row.tensor, numeric=False),
        Column[Outlier]("what", lambda row: row.what, numeric=False),
        Column[Outlier]("value", lambda row: row.value, magnitude),
        Column[Outlier]("what to do", lambda row: row.remedy, numeric=False),
    )
    return Table("What stands out", rows, columns, "Nothing: every number is within its limit.")


def loss_table(rows: "Sequence[Loss]") -> "Table[Loss]":
    """Tabulate the loss of each tensor alone, the worst last, where a terminal leaves the eye."""
    columns = (
        Column[Any]("tensor", lambda row: row.module, numeric=False),
        Column[Any]("kind", lambda row: row.kind, numeric=False),
        Column[Any]("KL alone", lambda row: row.kl_nats, nats),
        Column[Any]("in two terms", lambda row: row.kl_after.two_terms, nats),
        Column[Any]("by gptq", lambda row: row.kl_after.gptq, nats),
        Column[Any]("SQNR", lambda row: row.sqnr_db, decibels),
        Column[Any]("measured", lambda row: "yes" if row.measured else None, numeric=False),
    )
    return Table("What each tensor costs alone", rows, columns, "Nothing is quantized.")


def delayed_table(rows: Sequence[DelayedRow]) -> Table[DelayedRow]:
    """Tabulate the result of delayed scaling for each tensor."""
    columns = (
        Column[DelayedRow]("tensor", lambda row: row.tensor, numeric=False),
        Column[DelayedRow]("batches with a history", lambda row: row.batches, count),
        Column[DelayedRow]("saturated", lambda row: row.saturated, share),
        Column[DelayedRow]("largest jump", lambda row: row.largest_jump, magnitude),
    )
    return Table("Under delayed scaling", rows, columns, "Nothing was measured.")


def against_table(rows: Sequence[AgainstRow]) -> Table[AgainstRow]:
    """Other text at the scales chosen before."""
    columns = (
        Column[AgainstRow]("tensor", lambda row: row.tensor, numeric=False),
        Column[AgainstRow]("clip", lambda row: row.clip, magnitude),
        Column[AgainstRow]("amax there", lambda row: row.amax, magnitude),
        Column[AgainstRow]("of the clip", lambda row: row.amax_over_clip, share),
        Column[AgainstRow]("saturation", lambda row: row.saturation, share),
        Column[AgainstRow]("when calibrating", lambda row: row.calibrated_saturation, share),
    )
    return Table("Against other text", rows, columns, "No tensor has a scale.")


def accuracy_table(rows: Sequence[AccuracyRow], wide: bool = True) -> Table[AccuracyRow]:
    """Every runtime's perplexity, and its difference from BF16; `wide`: with columns for which a terminal of 80 columns
    has no room.
    """
    columns = (
        Column[AccuracyRow]("runtime", lambda row: row.runtime, numeric=False),
        Column[AccuracyRow]("perplexity", lambda row: row.perplexity, "{:.4f}".format),
        Column[AccuracyRow]("increase", lambda row: row.perplexity_increase, increase),
        Column[AccuracyRow](
            "95 % interval",
            lambda row: None if row.increase_low is None else (row.increase_low, row.increase_high),
            interval,
        ),
        Column[AccuracyRow]("KL mean, nats", lambda row: row.kl_mean_nats, nats),
        Column[AccuracyRow]("KL p99, nats", lambda row: row.kl_p99_nats, nats),
        Column[AccuracyRow]("top-1 agreement", lambda row: row.top1_agreement, share),
        Column[AccuracyRow]("top-5 agreement", lambda row: row.top5_agreement if wide else None, share),
        Column[AccuracyRow]("KL from FP32", lambda row: row.kl_fp32_nats, nats),
        Column[AccuracyRow]("KL of the sums", lambda row: row.kl_sums_nats, nats),
        Column[AccuracyRow]("sampled tokens", lambda row: row.tokens, count),
    )
    short = dict[str, list[str]]()
    for row in rows:
        if why := too_short(row):
            short.setdefault(why, []).append(row.runtime)
    note = ". ".join(f"{', '.join(names)}: {why}" for why, names in short.items())
    return Table("Accuracy", rows, columns, "Not evaluated yet: run `fp8q validate RUN`.", note)


def too_short(row: AccuracyRow) -> str:
    """The reason for a missing interval beside an increase; empty where there is an interval or no increase."""
    if row.windows is None or row.increase_low is not None:
        return ""
    return f"too short for an interval: {row.windows:,} window{'' if row.windows == 1 else 's'}; give {LEAST_WINDOWS}"


def interval(bounds: tuple[float, float]) -> str:
    """The ends of an interval of relative changes: `−0.02 to +0.31 %`."""
    return f"{increase(bounds[0]).removesuffix(' %')} to {increase(bounds[1])}"


def size_table(rows: Sequence[SizeRow]) -> Table[SizeRow]:
    """Tabulate the sizes of the weights on disk."""
    columns = (
        Column[SizeRow]("what", lambda row: row.what, numeric=False),
        Column[SizeRow]("file", lambda row: row.path, numeric=False),
        Column[SizeRow]("size", lambda row: row.bytes, size),
        Column[SizeRow]("of BF16", lambda row: row.share_of_bf16, lambda value: f"{100 * value:.0f} %"),
    )
    return Table("Sizes", rows, columns, "No checkpoint yet: run `fp8q calibrate MODEL --data TEXT --out RUN`.")


def engine_name(row: EngineRow) -> str:
    """An engine's target, and what it is of where that is not the FP8 model alone."""
    return f"{row.target} {f'with {row.adapter}' if row.adapter else PRECISIONS[row.precision]}".strip()


def engine_table(rows: Sequence[EngineRow]) -> Table[EngineRow]:
    """Every engine, with the promised products and those that run in FP8."""
    columns = (
        Column[EngineRow]("target", engine_name, numeric=False),
        Column[EngineRow]("runtime", lambda row: f"{row.runtime} {row.version}", numeric=False),
        Column[EngineRow]("promised products", lambda row: row.promised_products, count),
        Column[EngineRow]("in FP8", lambda row: row.fp8_products, count),
        Column[EngineRow]("ran wider", lambda row: first_few(row.wide) or None, numeric=False),
        Column[EngineRow]("ran", lambda row: row.ran, numeric=False),
        Column[EngineRow]("evidence", lambda row: row.evidence, numeric=False),
        Column[EngineRow]("size", lambda row: row.bytes, size),
        Column[EngineRow]("built in", lambda row: row.build_seconds, duration),
    )
    return Table("Engines", rows, columns, "No engine yet: run `fp8q build-engine RUN`.")


def stage_table(rows: Sequence[StageRow]) -> Table[StageRow]:
    """Tabulate the time and memory of each stage."""
    columns = (
        Column[StageRow]("stage", lambda row: row.stage, numeric=False),
        Column[StageRow]("wall time", lambda row: row.seconds, duration),
        Column[StageRow]("peak memory", lambda row: row.peak_memory_bytes, size),
    )
    return Table("Stages", rows, columns, "No stage has finished yet.")


def note_table(rows: Sequence[StageRow]) -> Table[tuple[str, str]]:
    """Tabulate the notes of the stages."""
    columns = (
        Column[tuple[str, str]]("stage", lambda row: row[0], numeric=False),
        Column[tuple[str, str]]("note", lambda row: row[1], numeric=False),
    )
    return Table(
        "Notes",
        [(row.stage, note) for row in rows for note in row.notes],
        columns,
        "None: no default was lowered and nothing was left out.",
    )


def fact_table(rows: Sequence[FactRow]) -> Table[FactRow]:
    """Tabulate the origin of the numbers."""
    columns = (
        Column[FactRow]("what", lambda row: row.what, numeric=False),
        Column[FactRow]("value", lambda row: row.value, numeric=False),
    )
    return Table("What was measured", rows, columns, "Nothing was measured yet.")
