"""Generation from a run directory: the errors on the counting model, the numbers on the demo."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fp8q.calibrate.model.source import load_model
from fp8q.core.errors import BackendError, InputError
from fp8q.serve.local import generation
from fp8q.serve.local.generation import answer_request, open_generator, open_run_session
from fp8q.serve.loop.generate import complete
from fp8q.serve.loop.request import GeneratedAnswer, Request
from fp8q.serve.loop.sessions import open_session
from fp8q.serve.loop.text import Vocabulary
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.runtimes import open_reference
from tests.noise import largest_noise

if TYPE_CHECKING:
    from fp8q.core.run import Run

PROMPTS = [
    "def read_file(path):\n    ",
    "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self",
    "for i in range(",
    '    """Return the number of items in the queue.\n\n    ',
]


def answers_of(run: Run, requests: Sequence[Request], max_batch: int = 8) -> list[GeneratedAnswer]:
    return complete(open_generator(run, open_run_session(run), max_batch), requests)


def test_a_run_answers(counting_run: Run) -> None:
    assert answers_of(counting_run, [Request("t3 t1 t4", max_tokens=3), Request("t0", max_tokens=1)]) == [
        GeneratedAnswer(" t1 t2 t6", (1, 2, 6), "length", 3),
        GeneratedAnswer(" t0", (0,), "length", 1),
    ]


def test_a_run_that_was_not_exported_is_refused(counting_run: Run) -> None:
    counting_run.onnx_fp32.unlink()
    with pytest.raises(InputError) as raised:
        answers_of(counting_run, [])
    assert (
        str(raised.value)
        == f"{counting_run.onnx_fp32}: is missing; `fp8q export {counting_run.root}` writes it, run that first"
    )


def test_a_model_without_a_tokenizer_is_an_input_error(counting_run: Run) -> None:
    (counting_run.model / "tokenizer.json").unlink()
    with pytest.raises(InputError) as raised:
        answers_of(counting_run, [])
    assert (
        str(raised.value) == f"{counting_run.model / 'tokenizer.json'}: there is no such file; copy it from the model"
    )


def test_a_missing_runtime_is_a_backend_error(counting_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError) as raised:
        answers_of(counting_run, [])
    assert str(raised.value) == (
        "ONNX Runtime is not installed (import of onnxruntime halted; None in sys.modules); install it with `pip "
        "install onnxruntime`"
    )


def test_a_request_that_cannot_be_served_is_an_input_error(counting_run: Run) -> None:
    generator = open_generator(counting_run, open_run_session(counting_run))
    with pytest.raises(InputError) as raised:
        answer_request(generator, Request(" "), lambda text: None)
    assert str(raised.value) == "the prompt has no tokens; write something to continue"


def test_the_demo_generates_in_a_batch_what_the_whole_sequence_gives_at_once(demo_run: Run) -> None:
    """Every token of a batch through the cache is the best one of the graph run over prompt and answer at once, without
    a cache.

    Both compute the same sums in another order, so a token may be the second best where two are all but equal.
    """
    session, vocabulary = open_session(demo_run.model), Vocabulary.read(demo_run.model)
    answers = answers_of(demo_run, [Request(prompt, max_tokens=48) for prompt in PROMPTS], max_batch=3)
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
    answers = answers_of(demo_run, asked)
    assert answers == answers_of(demo_run, asked)
    assert all(answer.text for answer in answers)


def test_the_demos_greedy_text_is_the_same_alone_and_among_others(demo_run: Run) -> None:
    """Those who come and go beside a request, and how long their prompts are, change none of its tokens."""
    asked = [Request(prompt, max_tokens=32) for prompt in PROMPTS]
    alone = [answers_of(demo_run, [request])[0] for request in asked]
    others = [Request(PROMPTS[1] * 4, max_tokens=3), Request("a", max_tokens=40), Request(PROMPTS[3] * 2, max_tokens=9)]
    among = answers_of(demo_run, [*others, *asked, *others], max_batch=4)
    assert among[len(others) : -len(others)] == alone


def test_fp8_and_its_source_go_on_with_the_best_tokens_and_part_where_they_differ(
    demo_run: Run, fp8q: Callable[..., Any]
) -> None:
    import torch

    words = ("--prompt", PROMPTS[0], "--max-tokens", 12, "--runtime", "reference", "--compare", "--json")
    found = json.loads(fp8q("generate", demo_run.root, *words).out)
    assert found.keys() == {"text", "tokens", "finish_reason", "bf16", "parts_at"}
    assert found["bf16"].keys() == {"text", "tokens", "finish_reason"}
    ours, theirs, at = found["tokens"], found["bf16"]["tokens"], found["parts_at"]
    assert ours[:at] == theirs[:at]
    assert (ours == theirs) if at is None else ours[at : at + 1] != theirs[at : at + 1]
    prompt = Vocabulary.read(demo_run.model).encode(PROMPTS[0])
    source, fast = source_of(demo_run), open_reference(demo_run, "fast", "cpu")
    exact = open_reference(demo_run, "exact", "cpu", dtype=torch.float32)
    floats = [load_model(source, dtype, "cpu") for dtype in (torch.bfloat16, torch.float32)]
    for models, caches, tokens in (
        (floats, [None, None], theirs),
        ([fast.model, exact.model], [fast.new_cache(), exact.new_cache()], ours),
    ):
        ids = torch.tensor([prompt + tokens])
        with torch.inference_mode():
            rounded, unrounded = (
                model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, len(prompt) - 1 : -1].float()
                for model, cache in zip(models, caches, strict=True)
            )
        chosen = rounded[torch.arange(len(tokens)), torch.tensor(tokens)]
        lost = (rounded.amax(-1) - chosen).max()
        assert lost < 2 * largest_noise(rounded, unrounded), "another order of sums, in BF16"


def test_an_engine_for_another_gpu_is_not_taken(demo_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "gpu_target", lambda: "sm90")
    with pytest.raises(InputError) as raised:
        generation.open_run_session(demo_run, "tensorrt-rtx")
    assert str(raised.value) == (
        f"{demo_run.engines}: holds no engine of tensorrt-rtx for sm90, this GPU (there are: sm89, sm120); run `fp8q "
        f"build-engine {demo_run.root} --runtime tensorrt-rtx --target sm90`"
    )
