"""Compare the answers of all models to all tasks, question by question: flips, McNemar's exact test, recovery.

Near the original, KL and perplexity no longer predict scores of benchmarks (arXiv 2606.19558), and a score alone hides
that answers changed: as many may have turned right as wrong. So questions are paired. A flip is a question that one
model answers right and the other wrong (arXiv 2407.09141). McNemar's test (Psychometrika 12, 1947) asks if flips to
wrong and to right are equally likely: of n = b + c flips, b is then binomial with one half, and the two-sided p is
twice the smaller tail, at most 1; it is exact, where the chi-squared form needs 25 flips. Recovery is the score of FP8
over that of BF16, and its interval resamples questions with both models' answers, so that what makes some questions
hard cancels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import InputError
from ..accuracy.bootstrap import Bootstrap
from ..accuracy.share_interval import share_interval
from .document import MetricAnswers, Paired, RuntimeName, Scored, TaskAnswers

#: The answers of each model to a task, one for each seed; one of a task that does not sample.
ModelAnswers = Mapping[RuntimeName, Sequence[TaskAnswers]]


@dataclass(frozen=True)
class MetricValues:
    """One metric of one model's answers to a task, or to all tasks of a group. `values` [seeds][questions]; None for a
    metric of all answers together.
    """

    score: float
    values: list[list[float]] | None


def check_same_questions(task: str, models: ModelAnswers) -> None:
    """Raise InputError where two models were asked other questions, so that their answers do not pair."""
    first, *others = [(runtime, seed_answers.questions) for runtime, seeds in models.items() for seed_answers in seeds]
    for runtime, questions in others:
        if questions != first[1]:
            raise InputError(
                task,
                f"{runtime} was asked other questions than {first[0]}, since the task chooses them anew each time",
                "take one whose questions are fixed",
            )


def all_results(answers: Mapping[str, ModelAnswers], groups: Mapping[str, Sequence[str]]) -> list[Scored]:
    """The results of all tasks: those of each group, then of its tasks, then of tasks by themselves.

    `answers`: task -> model -> seeds; `groups`: group -> its tasks.
    """
    results: list[Scored] = []
    within = {task: group for group, tasks in groups.items() for task in tasks}
    for group, tasks in groups.items():
        results += group_results(group, [answers[task] for task in tasks])
        results += [row for task in tasks for row in task_results(task, answers[task], within[task])]
    return results + [
        row for task, models in answers.items() if task not in within for row in task_results(task, models)
    ]


def task_results(task: str, models: ModelAnswers, group: str | None = None) -> Iterator[Scored]:
    """The results of one task, a row for each metric."""
    check_same_questions(task, models)
    (first, *more), sampled = models["bf16"], models["bf16"][0].seed is not None
    for number, metric in enumerate(first.metrics):
        judged = {
            runtime: _of_seeds([seed_answers.metrics[number] for seed_answers in seeds])
            for runtime, seeds in models.items()
        }
        yield Scored(
            task=task,
            group=group,
            metric=metric.name,
            higher_is_better=metric.higher_is_better,
            version=first.version,
            fewshot=first.fewshot,
            questions=len(first.questions),
            seeds=len(more) + 1 if sampled else None,
            chance=first.chance,
            at_chance=_at_chance(metric, first.chance) and not sampled,
            **_compared(judged, metric.higher_is_better),
        )


def group_results(group: str, tasks: Sequence[ModelAnswers]) -> Iterator[Scored]:
    """The results of all questions of a group's tasks together, a row for each metric that all of them have a value
    of for each question: the mean over questions, as lm-eval weighs tasks by their size.
    """
    firsts = [models["bf16"][0] for models in tasks]
    named = [{metric.name: metric for metric in answers.metrics if metric.values is not None} for answers in firsts]
    shots = {answers.fewshot for answers in firsts}
    seeds = {len(models["bf16"]) for models in tasks}
    for name in named[0] if len(seeds) == 1 else ():
        if not all(name in metrics for metrics in named):
            continue
        judged = {
            runtime: _joined([_of_seeds(_of_name(models[runtime], name)) for models in tasks]) for runtime in tasks[0]
        }
        higher = named[0][name].higher_is_better
        yield Scored(
            task=group,
            tasks=len(tasks),
            metric=name,
            higher_is_better=higher,
            fewshot=shots.pop() if len(shots) == 1 else None,
            questions=sum(len(answers.questions) for answers in firsts),
            seeds=len(tasks[0]["bf16"]) if firsts[0].seed is not None else None,
            **_compared(judged, higher),
        )


def _at_chance(metric: MetricAnswers, chance: float | None) -> bool:
    """Tell whether a score of single answers, right or wrong, is one that a guess has too."""
    if chance is None or metric.values is None or not metric.higher_is_better or not is_judged(metric.values):
        return False
    low, high = share_interval(round(sum(metric.values)), len(metric.values))
    return low <= chance <= high


def _of_name(seeds: Sequence[TaskAnswers], name: str) -> list[MetricAnswers]:
    return [next(metric for metric in seed_answers.metrics if metric.name == name) for seed_answers in seeds]


def _of_seeds(metrics: Sequence[MetricAnswers]) -> MetricValues:
    """One metric over all seeds."""
    values = [metric.values for metric in metrics if metric.values is not None]
    score = float(np.mean([metric.score for metric in metrics]))
    return MetricValues(score, values if len(values) == len(metrics) else None)


def _joined(parts: Sequence[MetricValues]) -> MetricValues:
    """Join a metric's values of several tasks, as of one task with all their questions."""
    values = [[value for task in seed for value in task] for seed in zip(*(part.values or [] for part in parts))]
    return MetricValues(float(np.mean(values)), values)


def _compared(judged: Mapping[RuntimeName, MetricValues], higher_is_better: bool) -> dict[str, Any]:
    """The fields of a result that follow from the models' values."""
    every = [value for metric in judged.values() for seed in metric.values or [] for value in seed]
    bf16 = judged["bf16"]
    fp32 = judged.get("fp32")
    return {
        "in_percent": bool(every) and all(0 <= value <= 1 for value in every),
        "bf16": bf16.score,
        "fp8": judged["fp8"].score,
        "fp32": fp32.score if fp32 else None,
        "paired": compare_pairs(bf16, judged["fp8"], higher_is_better),
        "noise": compare_pairs(fp32, bf16, higher_is_better) if fp32 else None,
    }


def compare_pairs(before: MetricValues, after: MetricValues, higher_is_better: bool) -> Paired:
    """Compare a metric of two models' answers to the same questions."""
    fields: dict[str, float | int] = {}
    if higher_is_better and before.score > 0:
        fields["recovery"] = after.score / before.score
        if before.values and after.values:
            interval = recovery_interval(mean_of_seeds(before.values), mean_of_seeds(after.values))
            fields |= dict(zip(("recovery_low", "recovery_high"), interval, strict=True)) if interval else {}
    if before.values and after.values and all(map(is_judged, (*before.values, *after.values))):
        seeds = [count_flips(*pair) for pair in zip(before.values, after.values, strict=True)]
        fields["right_to_wrong"] = sum(flips.right_to_wrong for flips in seeds)
        fields["wrong_to_right"] = sum(flips.wrong_to_right for flips in seeds)
        if len(seeds) == 1:
            low, high = share_interval(sum(seeds[0]), len(before.values[0]))
            fields |= {"mcnemar_p": mcnemar_p(seeds[0]), "flips_low": low, "flips_high": high}
    return Paired.model_validate(fields)


class Flips(NamedTuple):
    """Questions whose answers are right in one model and wrong in the other."""

    right_to_wrong: int
    wrong_to_right: int


def is_judged(values: Sequence[float]) -> bool:
    """Tell whether each of `values` is 1 or 0, right or wrong."""
    return all(value in (0.0, 1.0) for value in values)


def count_flips(before: Sequence[float], after: Sequence[float]) -> Flips:
    """Count the questions that are right (1) `before` and wrong (0) `after`, and the other way round."""
    pairs = list(zip(before, after, strict=True))
    return Flips(sum(a > b for a, b in pairs), sum(b > a for a, b in pairs))


def mcnemar_p(flips: Flips) -> float:
    """The two-sided p of McNemar's exact test; 1 without flips."""
    number = sum(flips)
    tail = ways = 1  # of no flips, and then of one more each: the binomial coefficients of `number`
    for count in range(min(flips)):
        ways = ways * (number - count) // (count + 1)
        tail += ways
    return min(1.0, float(2 * tail / 2**number))


def recovery_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """The ends of the 95 % interval of mean(`after`) / mean(`before`), over paired questions.

    None where a quantile is no number, since `before` has so few answers right that a draw may have none.
    """
    questions = Bootstrap(np.arange(len(before)))
    low, high = questions.ratio(np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64))
    if isfinite(low) and isfinite(high):
        return (low, high)
    return None


def mean_of_seeds(values: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each question over the seeds, `values` [seeds][questions]."""
    return [float(mean) for mean in np.mean(np.asarray(values, dtype=np.float64), axis=0)]
