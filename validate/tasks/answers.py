"""`answers/<task>-<runtime>.json`: the answers of one model to all questions of one task, as lm-eval judged them.

A file has all that the comparison of two models needs, so that a model that has answered is not asked again. Its key is
a hash of everything that the answers depend on: the questions themselves, the model's files, the harness's version.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from ...core.files import Strict

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
        return self.metric if self.filter == "none" else f"{self.metric}, {self.filter}"


class TaskAnswers(Strict):
    """A file of `answers/`. `seed`: of a task that samples."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=1)] = 1
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


def answers_file(folder: Path, task: str, runtime: RuntimeName, seed: int | None) -> Path:
    """The file of these answers in `folder`; a task's name may have characters that no file's name has."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task)
    return folder / (f"{name}-{runtime}.json" if seed is None else f"{name}-{runtime}-{seed}.json")
