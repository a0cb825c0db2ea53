"""`fp8q evaluate` before lm-eval is asked: what is refused, and the extra that is missing."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.errors import BackendError, InputError
from fp8q.core.run import Run
from fp8q.options import EvaluateOptions


@pytest.mark.parametrize(("options", "told"), [
    (
        EvaluateOptions(),
        "--tasks: names no task; give lm-eval's names, separated by commas, such as hellaswag,gsm8k",
    ),
    (
        EvaluateOptions(("a",), served="b"),
        "--served b: names a model on a server, and there is no --url; give it too",
    ),
    (
        EvaluateOptions(("a",), bf16_served="b", url="http://a"),
        "--bf16-served b: names a model on a server, and there is no --bf16-url; give it too",
    ),
    (
        EvaluateOptions(("a",), (Path("nowhere"),)),
        "--include-path nowhere: there is no such folder; give one that has task files (YAML)",
    ),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(demo_run: Run, options: EvaluateOptions, told: str) -> None:
    with pytest.raises(InputError) as refused:
        api.evaluate(demo_run.root, options)
    assert str(refused.value) == told


def test_a_task_is_named_once() -> None:
    with pytest.raises(InputError) as refused:
        EvaluateOptions(("a", "b", "a"))
    assert str(refused.value) == "--tasks a,b,a: has a twice; name each task once"


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is here")
def test_a_missing_extra_is_named(demo_run: Run) -> None:
    with pytest.raises(BackendError) as refused:
        api.evaluate(demo_run.root, EvaluateOptions(("hellaswag",)))
    assert str(refused.value) == (
        "lm_eval is not installed and this command needs it; install it with `pip install 'fp8q[evaluate]'`"
    )
    assert refused.value.exit_code == 4
