"""Settings of a task that lm-eval passes on as its file has them are checked before any question is asked."""

from types import SimpleNamespace
from typing import Any

import pytest

from fp8q.core.errors import InputError
from fp8q.validate.tasks.harness import samples_answers


def task(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(get_config=settings.get)


@pytest.mark.parametrize(("settings", "sampled"), [
    ({}, False),
    ({"num_fewshot": 0, "generation_kwargs": {"temperature": 0.0}}, False),
    ({"num_fewshot": 5, "generation_kwargs": {"do_sample": True}}, True),
    ({"generation_kwargs": {"temperature": 0.7}}, True),
    ({"generation_kwargs": {"temperature": None}}, False),
])  # fmt: skip
def test_a_task_says_whether_its_answers_are_drawn(settings: dict[str, Any], sampled: bool) -> None:
    assert samples_answers("word", task(**settings)) is sampled


@pytest.mark.parametrize(("settings", "fault"), [
    ({"num_fewshot": float("nan")}, "its num_fewshot is NaN, and no count"),
    ({"num_fewshot": 1.5}, "its num_fewshot is 1.5, and no count"),
    ({"num_fewshot": -1}, "its num_fewshot is -1, and no count"),
    ({"num_fewshot": True}, "its num_fewshot is true, and no count"),
    ({"num_fewshot": "long " * 100}, f'its num_fewshot is "{("long " * 12)[:59]}…, and no count'),
    ({"generation_kwargs": ["a"]}, 'its generation_kwargs are ["a"], and no names with values'),
    ({"generation_kwargs": {"temperature": "warm"}}, 'its temperature is "warm", and none'),
    ({"generation_kwargs": {"temperature": float("nan")}}, "its temperature is NaN, and none"),
    ({"generation_kwargs": {"temperature": float("inf")}}, "its temperature is Infinity, and none"),
    ({"generation_kwargs": {"temperature": -1}}, "its temperature is -1, and none"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError) as refused:
        samples_answers("word", task(**settings))
    assert str(refused.value) == f"--tasks word: {fault}; mend it in the task's file"
