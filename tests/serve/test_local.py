"""Generation from a run directory: the errors on the counting model, the numbers on the demo."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fp8q.errors import BackendError, InputError
from fp8q.serve.generate import Completion, Request
from fp8q.serve.local import generate, open_generator
from fp8q.serve.sessions import open_session
from fp8q.serve.text import Vocabulary

if TYPE_CHECKING:
    from fp8q.run import Run

PROMPTS = [
    "def read_file(path):\n    ",
    "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self",
    "for i in range(",
    '    """Return the number of items in the queue.\n\n    ',
]


def test_a_run_answers(counting_run: Run) -> None:
    assert generate(counting_run, [Request("t3 t1 t4", max_tokens=3), Request("t0", max_tokens=1)]) == [
        Completion(" t1 t2 t6", (1, 2, 6), "length", 3),
        Completion(" t0", (0,), "length", 1),
    ]


def test_a_run_that_was_not_exported_is_refused(counting_run: Run) -> None:
    counting_run.onnx_fp32.unlink()
    with pytest.raises(InputError) as raised:
        open_generator(counting_run)
    assert (
        str(raised.value)
        == f"{counting_run.onnx_fp32}: is missing; `fp8q export {counting_run.root}` writes it, run that first"
    )


def test_a_model_without_a_tokenizer_is_an_input_error(counting_run: Run) -> None:
    (counting_run.model / "tokenizer.json").unlink()
    with pytest.raises(InputError) as raised:
        open_generator(counting_run)
    assert (
        str(raised.value) == f"{counting_run.model / 'tokenizer.json'}: there is no such file; copy it from the model"
    )


def test_a_missing_runtime_is_a_backend_error(counting_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError) as raised:
        open_generator(counting_run)
    assert str(raised.value) == (
        "ONNX Runtime is not installed (import of onnxruntime halted; None in sys.modules); install it with `pip "
        "install onnxruntime`"
    )


def test_a_request_that_cannot_be_served_is_an_input_error(counting_run: Run) -> None:
    with pytest.raises(InputError) as raised:
        generate(counting_run, [Request(" ")])
    assert str(raised.value) == "the prompt has no tokens; write something to continue"


def test_the_demo_generates_in_a_batch_what_the_whole_sequence_gives_at_once(demo_run: Run) -> None:
    """Every token of a batch through the cache is the best one of the graph run over prompt and answer at once, without
    a cache.

    Both compute the same sums in another order, so a token may be the second best where two are all but equal.
    """
    session, vocabulary = open_session(demo_run.model), Vocabulary.read(demo_run.model)
    answers = generate(demo_run, [Request(prompt, max_tokens=48) for prompt in PROMPTS], max_batch=3)
    lost: list[float] = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = np.array([vocabulary.encode(prompt) + list(answer.tokens)])
        logits, _ = session.forward(ids, np.ones_like(ids), np.arange(ids.size)[None])
        before = logits[0, answer.input_tokens - 1 : -1]
        lost += (before.max(-1) - before[np.arange(len(answer.tokens)), answer.tokens]).tolist()
    assert len(lost) >= 48
    assert max(lost) < 0.1
    assert lost.count(0.0) / len(lost) > 0.97


def test_the_demo_draws_the_same_text_from_the_same_seed(demo_run: Run) -> None:
    asked = [
        Request(prompt, max_tokens=8, temperature=0.8, top_p=0.95, seed=seed) for seed, prompt in enumerate(PROMPTS)
    ]
    answers = generate(demo_run, asked)
    assert answers == generate(demo_run, asked)
    assert all(answer.text for answer in answers)
