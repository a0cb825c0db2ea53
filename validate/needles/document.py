"""`needles.json`: which needles each runtime found again, and how likely the answer was to it."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from ...core.columns import Column, Table, count, number_column
from ...core.files import FirstSchema, Strict, read_document
from ...core.run import Run

BASELINE = "bf16"


class Answered(Strict):
    """A runtime's answer to one needle."""

    right: bool = Field(description="the likeliest token is the answer's, at each of its tokens: what greedy writes")
    log_probability: float = Field(description="of the whole answer, nats")


class NeedleAnswers(Strict):
    """One needle: a prompt of `length` tokens, its answer included, with the sentence behind a share `depth` of it."""

    length: int
    depth: float
    trial: int
    key: str
    value: str
    answers: dict[str, Answered] = Field(description="by runtime")


class NeedleSummary(Strict):
    """The needles of one length and depth, or of several, that a runtime answered."""

    needles: int
    right: int
    log_probability: float = Field(description="mean, nats")
    change: float | None = Field(default=None, description="of the mean, from BF16's of the same needles")
    lost: int | None = Field(default=None, description="needles that BF16 found, and this one did not")
    gained: int | None = Field(default=None, description="needles that this one found, and BF16 did not")


class NeedleScores(Strict):
    """`needles.json`."""

    schema_: FirstSchema = 1
    text: str = Field(description="the filler")
    sentence: str
    needles: list[NeedleAnswers]

    @property
    def runtimes(self) -> list[str]:
        """The runtimes that answered, in the order of their turns."""
        return list(dict.fromkeys(name for needle in self.needles for name in needle.answers))

    def cell(self, runtime: str, length: int | None = None, depth: float | None = None) -> NeedleSummary | None:
        """Summarize the needles of a length and a depth (None: of all); None where `runtime` answered none."""
        pairs = [
            (needle.answers[runtime], needle.answers.get(BASELINE))
            for needle in self.needles
            if runtime in needle.answers and length in (None, needle.length) and depth in (None, needle.depth)
        ]
        if not pairs:
            return None
        compared = [] if runtime == BASELINE else [(answer, base) for answer, base in pairs if base is not None]
        changes = [answer.log_probability - base.log_probability for answer, base in compared]
        return NeedleSummary(
            needles=len(pairs),
            right=sum(answer.right for answer, _ in pairs),
            log_probability=sum(answer.log_probability for answer, _ in pairs) / len(pairs),
            change=sum(changes) / len(changes) if changes else None,
            lost=sum(base.right and not answer.right for answer, base in compared) if compared else None,
            gained=sum(answer.right and not base.right for answer, base in compared) if compared else None,
        )


class NeedleRow(Strict):
    """A row of the table: a runtime's needles of one length, by depth, and all of them."""

    runtime: str
    length: int
    by_depth: dict[float, NeedleSummary]
    all: NeedleSummary


def load_needles(run: Run) -> NeedleScores:
    """Read `needles.json`; raises InputError when it is missing or not the file that the stage wrote."""
    return read_document(run.require(run.needles, "needles"), NeedleScores)


def needle_rows(scores: NeedleScores) -> Iterator[NeedleRow]:
    """Yield a row for each length and runtime."""
    for length in dict.fromkeys(needle.length for needle in scores.needles):
        depths = dict.fromkeys(needle.depth for needle in scores.needles if needle.length == length)
        for runtime in scores.runtimes:
            if summary := scores.cell(runtime, length):
                cells = {depth: cell for depth in depths if (cell := scores.cell(runtime, length, depth))}
                yield NeedleRow(runtime=runtime, length=length, by_depth=cells, all=summary)


def hits_of(cell: NeedleSummary) -> str:
    """Write the needles that were found of those that were asked for: `3 of 4`."""
    return f"{cell.right:,} of {cell.needles:,}"


def nats_change(value: float) -> str:
    """Write a change of nats with its sign."""
    return f"{value:+.3g}".replace("-", "−")


def needle_table(scores: NeedleScores | None) -> Table[Any]:
    """Tabulate the needles that were found by length, runtime and depth, and the change of the answers' log-probability
    from BF16; empty where `scores` is None.
    """
    rows = list(needle_rows(scores)) if scores else []

    def column_of(depth: float) -> Column[Any]:
        return Column(f"at {depth:.0%}", lambda row: row.by_depth.get(depth), hits_of)

    columns = (
        number_column("tokens", count, "length"),
        Column[Any]("runtime", lambda row: row.runtime, numeric=False),
        *map(column_of, dict.fromkeys(depth for row in rows for depth in row.by_depth)),
        Column[Any]("log-probability", lambda row: row.all.log_probability, nats_change),
        Column[Any]("change from BF16", lambda row: row.all.change, nats_change),
        Column[Any](
            "lost + gained", lambda row: None if row.all.lost is None else f"{row.all.lost} + {row.all.gained}"
        ),
    )
    return Table("Needles by depth", rows, columns, "Not asked: `fp8q validate RUN --needles 1024,4096` does.")
