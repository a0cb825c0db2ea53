"""How rows read: columns that take a quantity out of a row and write it, the same on the command line, in HTML and in
notebooks.

Numbers keep three or four significant digits, the precision with which they are known; shares are written in percent,
sizes in decimal units, and what does not apply is left empty rather than zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..export.engine.info import listed
from .curves import LEAST_WINDOWS
from .findings import AgainstRow, DelayedRow, Finding
from .tables import PRECISIONS, AccuracyRow, EngineRow, FactRow, ModuleRow, SizeRow, StageRow

if TYPE_CHECKING:
    from .sensitivity.document import Loss

Row = TypeVar("Row")


def share(fraction: float) -> str:
    """A fraction as percent: 0.9712 -> `97.12 %`, 0.00416 -> `0.42 %`, 3e-5 -> `0.003 %`, 0 -> `0`; above zero never
    written as zero.
    """
    percent = 100 * fraction
    if percent in {0, 100}:
        return f"{percent:.0f} %" if percent else "0"
    if percent >= 1:
        return f"{percent:.2f} %"
    return f"{percent:.2g} %" if percent >= 1e-4 else "<0.0001 %"


def increase(fraction: float) -> str:
    """A relative change with its sign: 0.0031 -> `+0.31 %`."""
    return f"{100 * fraction:+.2f} %".replace("-", "−")


def decibels(value: float) -> str:
    """A ratio in dB, one decimal; an error of zero is `exact`."""
    return "exact" if value == float("inf") else f"{value:.1f}".replace("-", "−")


def noise(value: float | None) -> str:
    """The same in a sentence, of what has a scale: None where nothing is lost."""
    return "exact" if value is None else f"{decibels(value)} dB"


def magnitude(value: float) -> str:
    """A non-negative number with four significant digits."""
    return f"{value:.4g}"


def nats(value: float) -> str:
    """A divergence in nats with three significant digits."""
    return f"{value:.3g}"


def count(value: int) -> str:
    """A whole number with separators."""
    return f"{value:,}"


def size(value: float) -> str:
    """Bytes in decimal units: 8_130_000 -> `8.13 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds as a person says them: `0.4 s`, `2 min 5 s`, `1 h 3 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Column(Generic[Row]):
    """`value` takes the quantity out of a row (None: does not apply here), `write` makes it text; numbers are aligned
    right.
    """

    title: str
    value: Callable[[Row], Any]
    write: Callable[[Any], str] = str
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """The text of one cell, and the value it stands for, by which a reader may sort."""

    text: str
    value: str | float | None
    numeric: bool


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows of one kind; `missing` says what to run where there are none, `note` what must be read with them."""

    title: str
    rows: Sequence[Row]
    all_columns: tuple[Column[Row], ...]
    missing: str
    note: str = ""

    @property
    def columns(self) -> tuple[Column[Row], ...]:
        """The columns in which at least one row has a value."""
        return tuple(column for column in self.all_columns if any(column.value(row) is not None for row in self.rows))

    def cells(self) -> list[list[Cell]]:
        """Each row's cells, in the order of `columns`."""
        columns = self.columns
        return [[_cell(column, row) for column in columns] for row in self.rows]

    def _repr_html_(self) -> str:
        """How a notebook shows the table."""
        if not self.rows:
            return f"<p><b>{escape(self.title)}.</b> {escape(self.missing)}</p>"
        head = "".join(
            f'<th style="text-align:{_align(column.numeric)}">{escape(column.title)}</th>' for column in self.columns
        )
        body = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:{_align(cell.numeric)}">{escape(cell.text)}</td>' for cell in row)
            + "</tr>\n"
            for row in self.cells()
        )
        caption = f"<caption>{escape(self.title)}</caption>"
        note = f"\n<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>{note}"


def _align(numeric: bool) -> str:
    return "right" if numeric else "left"


def _cell(column: Column[Row], row: Row) -> Cell:
    value = column.value(row)
    return Cell("" if value is None else column.write(value), value, column.numeric)


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


def finding_table(rows: Sequence[Finding]) -> Table[Finding]:
    """What stands out, the worst first."""
    columns = (
        Column[Finding]("tensor", lambda row: row.tensor, numeric=False),
        Column[Finding]("what", lambda row: row.what, numeric=False),
        Column[Finding]("value", lambda row: row.value, magnitude),
        Column[Finding]("what to do", lambda row: row.remedy, numeric=False),
    )
    return Table("What stands out", rows, columns, "Nothing: every number is within its limit.")


def loss_table(rows: "Sequence[Loss]") -> "Table[Loss]":
    """What each tensor costs alone, the worst last, where a terminal leaves the eye."""
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
    """How each tensor would fare under delayed scaling."""
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
    """Every runtime's perplexity, and what it differs in from BF16; `wide`: with what a terminal of 80 columns has no
    room for.
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
    """Why there is no interval beside an increase; empty where there is one, or nothing to give one of."""
    if row.windows is None or row.increase_low is not None:
        return ""
    return f"too short for an interval: {row.windows:,} window{'' if row.windows == 1 else 's'}; give {LEAST_WINDOWS}"


def interval(bounds: tuple[float, float]) -> str:
    """The ends of an interval of relative changes: `−0.02 to +0.31 %`."""
    return f"{increase(bounds[0]).removesuffix(' %')} to {increase(bounds[1])}"


def size_table(rows: Sequence[SizeRow]) -> Table[SizeRow]:
    """What the weights take on disk."""
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
    """Every engine, with what was promised and what was found in it."""
    columns = (
        Column[EngineRow]("target", engine_name, numeric=False),
        Column[EngineRow]("runtime", lambda row: f"{row.runtime} {row.version}", numeric=False),
        Column[EngineRow]("promised products", lambda row: row.promised_products, count),
        Column[EngineRow]("in FP8", lambda row: row.fp8_products, count),
        Column[EngineRow]("ran wider", lambda row: listed(row.wide) or None, numeric=False),
        Column[EngineRow]("ran", lambda row: row.ran, numeric=False),
        Column[EngineRow]("evidence", lambda row: row.evidence, numeric=False),
        Column[EngineRow]("size", lambda row: row.bytes, size),
        Column[EngineRow]("built in", lambda row: row.build_seconds, duration),
    )
    return Table("Engines", rows, columns, "No engine yet: run `fp8q build-engine RUN`.")


def stage_table(rows: Sequence[StageRow]) -> Table[StageRow]:
    """What each stage took."""
    columns = (
        Column[StageRow]("stage", lambda row: row.stage, numeric=False),
        Column[StageRow]("wall time", lambda row: row.seconds, duration),
        Column[StageRow]("peak memory", lambda row: row.peak_memory_bytes, size),
    )
    return Table("Stages", rows, columns, "No stage has finished yet.")


def note_table(rows: Sequence[StageRow]) -> Table[tuple[str, str]]:
    """What the stages had to say."""
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
    """Where the numbers come from."""
    columns = (
        Column[FactRow]("what", lambda row: row.what, numeric=False),
        Column[FactRow]("value", lambda row: row.value, numeric=False),
    )
    return Table("What was measured", rows, columns, "Nothing was measured yet.")
