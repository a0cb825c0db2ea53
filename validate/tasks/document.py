"""`evaluation.json` and `answers/<task>-<runtime>.json`: the scores of BF16 and FP8 in lm-eval's tasks with the
comparison of their paired answers, and the answers of one model to all questions of one task, as lm-eval judged them.

A file of answers has all that the comparison of two models needs, so that a model that has answered is not asked again.
Its key is a hash of everything that the answers depend on: the questions, the model's files, the harness's version.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue

from ...core.columns import Column, Table, count, text_column
from ...core.files import FirstSchema, Strict, read_document
from ...core.run import Run
from ...quantize.checkpoint.card_additions import markdown_text

#: A smaller p is not written in full.
SMALLEST_P = 1e-4
#: Fewer questions than these get a remark: no flip of 200 allows 1.8 %, of 40 8.8 %.
FEW_QUESTIONS = 200
#: The models that are asked: FP8 as the run has it, its source in BF16, and in FP32.
RuntimeName = Literal["bf16", "fp8", "fp32"]


class MetricAnswers(Strict):
    """One metric of one model's answers, by one of the task's filters of answers.

    `score`: as lm-eval aggregates it. `values`: of each question, in the order of `TaskAnswers.questions`; None where
    the metric is one of all answers together, such as BLEU.
    """

    metric: str
    filter: str
    higher_is_better: bool
    score: float
    values: list[float] | None = None

    @property
    def name(self) -> str:
        """The metric with its filter, where it has one: `exact_match, strict-match`."""
        if self.filter == "none":
            return self.metric
        return f"{self.metric}, {self.filter}"


class TaskAnswers(Strict):
    """A file of `answers/`. `seed`: of a task that samples."""

    schema_: FirstSchema = 1
    key: str = Field(description="SHA-256 of all that the answers depend on")
    task: str
    runtime: RuntimeName
    seed: int | None = None
    version: str = Field(description="the task's, as its file says")
    fewshot: int
    questions: list[str] = Field(description="SHA-256 of each prompt, the first 16 digits")
    answers: list[JsonValue] = Field(
        description="the text that was generated, by the task's first filter; of likelihoods the likeliest choice"
    )
    metrics: list[MetricAnswers]
    chance: float | None = Field(
        default=None, description="share of questions that a guess gets right, where they have choices"
    )


def answers_file(folder: Path, task: str, runtime: RuntimeName, seed: int | None) -> Path:
    """The file of these answers in `folder`; a task's name may have characters that no file's name has."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task)
    return folder / (f"{name}-{runtime}.json" if seed is None else f"{name}-{runtime}-{seed}.json")


class Paired(Strict):
    """The answers of one model compared with another's to the same questions. Without flips the metric does not judge
    single answers right or wrong; without a recovery lower is better, or the other model scores nothing.
    """

    recovery: float | None = Field(default=None, description="score over the other model's, a fraction")
    recovery_low: float | None = Field(default=None, description="of the 95 % interval, over questions")
    recovery_high: float | None = None
    right_to_wrong: int | None = Field(default=None, description="questions; of all seeds together")
    wrong_to_right: int | None = None
    flips_low: float | None = Field(
        default=None, description="of the exact 95 % interval of the share of questions that flip; not of several seeds"
    )
    flips_high: float | None = None
    mcnemar_p: float | None = Field(
        default=None,
        description="that flips either way are equally likely; exact, two-sided; not of several seeds, whose answers "
        "to one question are not independent",
    )

    @property
    def flips(self) -> int | None:
        """Flips in both directions."""
        if self.right_to_wrong is None or self.wrong_to_right is None:
            return None
        return self.right_to_wrong + self.wrong_to_right


class Scored(Strict):
    """One metric of one task, or of all questions of a group's tasks together."""

    task: str
    group: str | None = Field(default=None, description="the group that it was asked as a part of")
    tasks: int = Field(default=1, description="tasks of the group")
    metric: str = Field(description="with its filter of answers, where it has one")
    higher_is_better: bool
    version: str | None = Field(default=None, description="of the task; of a group none")
    fewshot: int | None = Field(default=None, description="solved examples before each question")
    questions: int
    chance: float | None = Field(default=None, description="share that a guess gets right, where there are choices")
    at_chance: bool = Field(default=False, description="the exact 95 % interval of BF16's score has that of a guess")
    seeds: int | None = Field(default=None, description="runs of a task that samples; scores are their means")
    in_percent: bool = Field(description="each answer has a value from 0 to 1")
    bf16: float
    fp8: float
    fp32: float | None = None
    paired: Paired = Field(description="FP8 with BF16")
    noise: Paired | None = Field(default=None, description="BF16 with FP32: how much changes without any FP8")


class TaskScores(Strict):
    """`evaluation.json`."""

    schema_: FirstSchema = 1
    harness: str = Field(description="lm-eval's version")
    limit: int | None = Field(default=None, description="the first so many questions of each task alone")
    chat: bool = Field(description="asked by the chat template")
    models: dict[RuntimeName, str] = Field(description="where each answered")
    results: list[Scored]

    @property
    def shown(self) -> list[Scored]:
        """The results of the requested tasks and groups, without those of a group's tasks."""
        return [result for result in self.results if result.group is None]

    @property
    def protocol(self) -> str:
        """Tell the harness's version, the limit and the form of prompts, on one line."""
        limited = f", the first {self.limit:,} questions of each task alone" if self.limit else ""
        return f"lm-eval {self.harness}{limited}{', by the chat template' if self.chat else ''}"


def load_evaluation(run: Run) -> TaskScores:
    """Read `evaluation.json`; raises InputError when it is missing or not the file that `fp8q evaluate` wrote."""
    return read_document(run.require(run.evaluated, "evaluate"), TaskScores)


def score(value: float, in_percent: bool) -> str:
    """Write a score: in percent where it is a share, such as accuracy."""
    if in_percent:
        return f"{100 * value:.2f}"
    return f"{value:.4g}"


def recovery(paired: Paired) -> str | None:
    """Write a recovery in percent, with its interval where that is known."""
    if paired.recovery is None:
        return None
    percent = f"{100 * paired.recovery:.1f} %"
    if paired.recovery_low is None or paired.recovery_high is None:
        return percent
    return f"{percent} ({100 * paired.recovery_low:.1f} to {100 * paired.recovery_high:.1f})"


def flips(paired: Paired | None) -> str | None:
    """Write flips by direction, to wrong and to right: `12 + 9`."""
    if paired is None or paired.right_to_wrong is None:
        return None
    return f"{paired.right_to_wrong:,} + {paired.wrong_to_right:,}"


def flip_share(paired: Paired) -> str | None:
    """Write the exact interval of the share of questions that flip: `0 to 7.2 %`."""
    if paired.flips_low is None or paired.flips_high is None:
        return None
    return f"{100 * paired.flips_low:.2g} to {100 * paired.flips_high:.2g} %"


def weak_results(results: Sequence[Scored]) -> list[str]:
    """Say of which results little can be concluded: of few questions, and of scores that a guess has too."""
    lines = [
        f"{row.task}: {row.questions} questions, of which {row.paired.flips} flips allow "
        f"{flip_share(row.paired)}; from {FEW_QUESTIONS} on the interval is of use (--limit)."
        for row in {row.task: row for row in results if row.paired.flips_low is not None}.values()
        if row.questions < FEW_QUESTIONS
    ]
    return lines + [
        f"{row.task}, {row.metric}: BF16's score is that of a guess ({100 * row.chance:.3g} %), so that flips and "
        "recovery say nothing of FP8; take a task that the model can do."
        for row in results
        if row.at_chance and row.chance is not None
    ]


def p_value(value: float) -> str:
    """Write a p with two significant digits."""
    if value >= SMALLEST_P:
        return f"{value:.2g}"
    return f"<{SMALLEST_P:g}"


#: The columns that published FP8 models have.
PUBLISHED: tuple[Column[Any], ...] = (
    # the number of solved examples stands behind the task's name
    Column("task", lambda row: row.task if row.fewshot is None else f"{row.task} ({row.fewshot}-shot)", numeric=False),
    text_column("metric"),
    Column("BF16", lambda row: score(row.bf16, row.in_percent)),
    Column("FP8", lambda row: score(row.fp8, row.in_percent)),
    Column("recovery (95 %)", lambda row: recovery(row.paired)),
)
COLUMNS: tuple[Column[Any], ...] = (
    *PUBLISHED,
    Column("questions", lambda row: row.questions, count),
    Column("seeds", lambda row: row.seeds, count),
    Column("flips to wrong + right", lambda row: flips(row.paired)),
    Column("share (95 %)", lambda row: flip_share(row.paired)),
    Column("p", lambda row: row.paired.mcnemar_p, p_value),
    Column("BF16's own, from FP32", lambda row: flips(row.noise)),
)


def evaluation_table(scores: TaskScores | None) -> Table[Scored]:
    """Tabulate the scores with their recovery, and the flips with those of BF16 from FP32; empty where `scores` is
    None.
    """
    title = f"Tasks, {scores.protocol}" if scores else "Tasks"
    return Table(
        title, scores.shown if scores else [], COLUMNS, "Not measured: `fp8q evaluate RUN --tasks TASKS` does.",
        note=" ".join(weak_results(scores.shown)) if scores else "",
    )  # fmt: skip


def markdown_table(scores: TaskScores) -> str:
    """The table of a model card: task, metric, BF16, FP8, recovery."""
    table = Table("", scores.shown, PUBLISHED, "")
    rows = [[column.title for column in table.columns], ["---"] * len(table.columns)]
    rows += [[markdown_text(cell.text) for cell in row] for row in table.cells()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
