"""From what lm-eval returns to the results: on records of a real run (`tests/elsewhere/lm_eval_records.py`), of the
demo in BF16 and with scales that saturate, so that answers flip.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.core.errors import InputError
from fp8q.validate.accuracy.share_interval import share_interval
from fp8q.validate.tasks.document import (
    MetricAnswers,
    RuntimeName,
    TaskAnswers,
    TaskScores,
    answers_file,
    evaluation_table,
    markdown_table,
    weak_results,
)
from fp8q.validate.tasks.harness import guessed, read_answers
from fp8q.validate.tasks.results import (
    Flips,
    all_results,
    count_flips,
    is_judged,
    mcnemar_p,
    mean_of_seeds,
    recovery_interval,
    task_results,
)

RECORDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("records.json").read_text(encoding="utf-8"))
MODELS: tuple[RuntimeName, ...] = ("bf16", "fp8")


def recorded(task: str) -> dict[RuntimeName, list[TaskAnswers]]:
    return {name: [read_answers(task, RECORDS[task][name], name, None)] for name in MODELS}


def answers(values: list[float], runtime: RuntimeName, seed: int | None = None, **more: Any) -> TaskAnswers:
    """Answers to as many questions, with one metric."""
    metric = MetricAnswers(
        metric="acc", filter="none", higher_is_better=True, score=sum(values) / len(values), values=values
    )
    fields: dict[str, Any] = {
        "task": "a", "version": "1", "fewshot": 0, "questions": [f"{number}" for number in range(len(values))],
        "answers": values, "metrics": [metric],
    }  # fmt: skip
    return TaskAnswers(key="k", runtime=runtime, seed=seed, **(fields | more))


@pytest.mark.parametrize(("task", "metric", "expected"), [
    ("next_line", "acc", Flips(1, 0)), ("next_line", "acc_norm", Flips(6, 0)), ("word", "exact_match", Flips(0, 0)),
])  # fmt: skip
def test_scores_and_flips_are_those_of_lm_evals_samples(task: str, metric: str, expected: Flips) -> None:
    row = next(each for each in task_results(task, recorded(task)) if each.metric == metric)
    samples = {name: RECORDS[task][name]["samples"][task] for name in MODELS}
    right = {
        name: [each[metric] for each in sorted(rows, key=lambda one: one["doc_id"])] for name, rows in samples.items()
    }
    pairs = list(zip(right["bf16"], right["fp8"], strict=True))
    flips = Flips(pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0)))
    assert flips == expected
    assert (row.paired.right_to_wrong, row.paired.wrong_to_right) == flips
    assert row.paired.mcnemar_p == mcnemar_p(flips)
    assert (row.bf16, row.fp8) == tuple(RECORDS[task][name]["results"][task][f"{metric},none"] for name in MODELS)
    assert row.paired.recovery == pytest.approx(sum(right["fp8"]) / sum(right["bf16"]))
    assert (row.questions, row.fewshot, row.version, row.in_percent, row.seeds) == (len(pairs), 0, "1", True, None)


def test_an_answer_is_the_text_or_the_likeliest_choice() -> None:
    lines, words = recorded("next_line")["bf16"][0], recorded("word")["bf16"][0]
    rows = sorted(RECORDS["next_line"]["bf16"]["samples"]["next_line"], key=lambda one: one["doc_id"])
    likeliest = [max(range(4), key=lambda choice: each["filtered_resps"][choice][0]) for each in rows]
    assert lines.answers == likeliest
    assert all(isinstance(each, str) for each in words.answers)
    assert [len(each) for each in lines.questions] == [16] * len(rows)


def test_other_questions_of_one_model_are_no_pairs() -> None:
    models = recorded("word")
    models["fp8"] = [models["fp8"][0].model_copy(update={"questions": models["fp8"][0].questions[::-1]})]
    with pytest.raises(InputError) as refused:
        list(task_results("word", models))
    assert str(refused.value) == (
        "word: fp8 was asked other questions than bf16, since the task chooses them anew each time; take one whose "
        "questions are fixed"
    )


def test_seeds_are_averaged_and_have_no_p() -> None:
    bf16 = [answers([1.0, 0.0], "bf16", 1), answers([1.0, 1.0], "bf16", 2)]
    fp8 = [answers([0.0, 0.0], "fp8", 1), answers([1.0, 1.0], "fp8", 2)]
    (row,) = task_results("a", {"bf16": bf16, "fp8": fp8})
    assert (row.bf16, row.fp8, row.seeds) == (0.75, 0.5, 2)
    assert (row.paired.right_to_wrong, row.paired.wrong_to_right, row.paired.mcnemar_p) == (1, 0, None)


def test_bf16s_own_flips_from_fp32_are_the_noise() -> None:
    models: dict[RuntimeName, list[TaskAnswers]] = {
        "bf16": [answers([1.0, 0.0, 1.0], "bf16")], "fp8": [answers([1.0, 0.0, 1.0], "fp8")],
        "fp32": [answers([0.0, 0.0, 1.0], "fp32")],
    }  # fmt: skip
    (row,) = task_results("a", models)
    assert row.noise is not None
    assert (row.noise.right_to_wrong, row.noise.wrong_to_right) == (0, 1)
    assert row.paired.flips == 0
    assert row.fp32 == pytest.approx(1 / 3)


def test_a_group_is_all_questions_of_its_tasks_together() -> None:
    """2 of 2 and 1 of 4 are 3 of 6, and not the mean of 1 and 0.25."""
    of = {
        "a": {"bf16": [answers([1.0, 1.0], "bf16")], "fp8": [answers([1.0, 0.0], "fp8")]},
        "b": {"bf16": [answers([1.0, 0.0, 0.0, 0.0], "bf16")], "fp8": [answers([1.0, 0.0, 0.0, 0.0], "fp8")]},
    }
    whole, *parts = all_results(of, {"both": ["a", "b"]})  # type: ignore[arg-type]
    assert (whole.task, whole.tasks, whole.questions, whole.bf16) == ("both", 2, 6, 0.5)
    assert (whole.paired.right_to_wrong, whole.paired.wrong_to_right) == (1, 0)
    assert [(each.task, each.group) for each in parts] == [("a", "both"), ("b", "both")]


def test_a_metric_of_all_answers_together_has_a_score_alone() -> None:
    metric = MetricAnswers(metric="bleu", filter="none", higher_is_better=True, score=20.0)
    models: dict[RuntimeName, list[TaskAnswers]] = {name: [answers([1.0], name, metrics=[metric])] for name in MODELS}
    (row,) = task_results("a", models)
    assert row.paired.model_dump(exclude_none=True) == {"recovery": 1.0}
    assert not row.in_percent


def test_where_lower_is_better_there_is_no_recovery() -> None:
    metric = MetricAnswers(metric="word_perplexity", filter="none", higher_is_better=False, score=20.0)
    models: dict[RuntimeName, list[TaskAnswers]] = {name: [answers([1.0], name, metrics=[metric])] for name in MODELS}
    (row,) = task_results("a", models)
    assert row.paired.model_dump(exclude_none=True) == {}


def scores() -> TaskScores:
    results = all_results({task: recorded(task) for task in RECORDS}, {})
    return TaskScores(harness="0.4.13", limit=40, chat=False, models={"bf16": "here, CPU"}, results=results)


def test_the_cards_table_has_the_form_of_published_models() -> None:
    lines = markdown_table(scores()).splitlines()
    assert lines[0] == "| task | metric | BF16 | FP8 | recovery (95 %) |"
    assert lines[1] == "| --- | --- | --- | --- | --- |"
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| next_line (0-shot)", "acc"], ["| next_line (0-shot)", "acc_norm"], ["| word (0-shot)", "exact_match"],
    ]  # fmt: skip
    row = scores().results[0]
    assert lines[2].split(" | ")[2:4] == [f"{100 * row.bf16:.2f}", f"{100 * row.fp8:.2f}"]


def test_the_table_adds_flips_and_p_and_says_how_it_was_measured() -> None:
    table = evaluation_table(scores())
    assert table.title == "Tasks, lm-eval 0.4.13, the first 40 questions of each task alone"
    assert [column.title for column in table.columns] == [
        "task", "metric", "BF16", "FP8", "recovery (95 %)", "questions", "flips to wrong + right", "share (95 %)",
        "p",
    ]  # fmt: skip
    assert evaluation_table(None).missing == "Not measured: `fp8q evaluate RUN --tasks TASKS` does."


def test_a_tasks_name_is_a_files(tmp_path: Path) -> None:
    assert answers_file(tmp_path, "a/b:c", "fp8", 2) == tmp_path / "a_b_c-fp8-2.json"


def test_flips_are_counted_by_direction() -> None:
    assert count_flips([1, 1, 0, 0, 1], [0, 1, 1, 0, 0]) == Flips(right_to_wrong=2, wrong_to_right=1)


@pytest.mark.parametrize(("flips", "p"), [
    (Flips(0, 0), 1.0),
    (Flips(1, 1), 1.0),  # twice a tail of 3/4
    (Flips(3, 0), 0.25),  # 2 / 2**3
    (Flips(1, 5), 0.21875),  # 2 × (1 + 6) / 2**6
    (Flips(10, 0), 0.001953125),  # 2 / 2**10
])  # fmt: skip
def test_p_is_twice_the_smaller_tail_of_a_fair_coin(flips: Flips, p: float) -> None:
    assert mcnemar_p(flips) == p
    assert mcnemar_p(Flips(flips.wrong_to_right, flips.right_to_wrong)) == p


@given(st.integers(0, 400), st.integers(0, 400))
def test_p_is_scipys_of_a_binomial_test(right_to_wrong: int, wrong_to_right: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    flips = Flips(right_to_wrong, wrong_to_right)
    expected = stats.binomtest(right_to_wrong, sum(flips)).pvalue if sum(flips) else 1.0
    assert mcnemar_p(flips) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("found", "number", "interval"), [
    (0, 40, (0.0, 1 - 0.025 ** (1 / 40))),  # no flip of 40 allows 8.8 %
    (40, 40, (0.025 ** (1 / 40), 1.0)),
    (1, 1, (0.025, 1.0)),
    (5, 10, (0.18708603, 0.81291397)),
])  # fmt: skip
def test_the_interval_of_a_share_is_exact(found: int, number: int, interval: tuple[float, float]) -> None:
    assert share_interval(found, number) == pytest.approx(interval, abs=1e-7)


@given(st.integers(0, 300), st.integers(1, 300))
def test_the_interval_is_scipys(found: int, number: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    found = min(found, number)
    expected = stats.binomtest(found, number).proportion_ci(0.95, "exact")
    assert share_interval(found, number) == pytest.approx((expected.low, expected.high), abs=1e-7)


def test_few_questions_and_scores_of_a_guess_have_a_remark() -> None:
    values = [1.0, 0.0] * 20
    models: dict[RuntimeName, list[TaskAnswers]] = {name: [answers(values, name, chance=0.5)] for name in MODELS}
    rows = list(task_results("a", models))
    assert weak_results(rows) == [
        "a: 40 questions, of which 0 flips allow 0 to 8.8 %; from 200 on the interval is of use (--limit).",
        (
            "a, acc: BF16's score is that of a guess (50 %), so that flips and recovery say nothing of FP8; take a "
            "task that the model can do."
        ),
    ]
    many: dict[RuntimeName, list[TaskAnswers]] = {name: [answers([1.0] * 300, name, chance=0.5)] for name in MODELS}
    assert weak_results(list(task_results("a", many))) == []


def test_a_guess_is_right_by_the_number_of_choices() -> None:
    assert guessed([[(-1.0, True), (-2.0, False)], [(-1.0, True)] * 4]) == 0.375
    assert guessed([["a text"]]) is None


def test_thousands_of_flips_have_a_p() -> None:
    assert 0 < mcnemar_p(Flips(5_000, 4_800)) < 0.05


def test_equal_answers_recover_all_of_the_score_in_every_draw() -> None:
    answers = [1.0, 0.0, 1.0, 1.0] * 20
    assert recovery_interval(answers, answers) == (1.0, 1.0)


def test_the_interval_of_recovery_is_that_of_paired_questions() -> None:
    """Of 400 questions half are right, and of these 8 turn wrong: 0.96, with s² ≈ p q / n over 200 right ones."""
    before = [1.0] * 200 + [0.0] * 200
    after = [0.0] * 8 + [1.0] * 192 + [0.0] * 200
    interval = recovery_interval(before, after)
    assert interval is not None
    assert interval == pytest.approx((0.96 - 1.96 * 0.0139, 0.96 + 1.96 * 0.0139), abs=0.005)


def test_pairing_narrows_the_interval() -> None:
    """The same scores with the flips on other questions: unpaired they would look alike."""
    before = [1.0, 0.0] * 100
    same, moved = before, before[1:] + before[:1]
    narrow, wide = recovery_interval(before, same), recovery_interval(before, moved)
    assert narrow is not None
    assert wide is not None
    assert narrow == (1.0, 1.0)
    assert wide[1] - wide[0] > 0.4


def test_a_score_of_one_right_answer_has_no_interval() -> None:
    """More than a draw in forty has none of it."""
    assert recovery_interval([1.0] + [0.0] * 9, [1.0] + [0.0] * 9) is None


def test_an_answer_is_judged_where_it_is_right_or_wrong() -> None:
    assert (is_judged([0.0, 1.0]), is_judged([0.0, 0.5])) == (True, False)


def test_seeds_are_averaged_question_by_question() -> None:
    assert mean_of_seeds([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]) == pytest.approx([2 / 3, 1 / 3])
