"""Answers of a server to lm-eval's questions: what is no answer is refused before lm-eval sees it."""

from __future__ import annotations

from typing import Any

import pytest

from fp8q.core.errors import BackendError, Fp8qError, InputError
from fp8q.validate.endpoint.client import Client
from fp8q.validate.tasks.models import completed
from tests.validate.endpoint.stand_in import StandIn, serving
from tests.validate.endpoint.test_asking import EVERY, NEW
from tests.validate.endpoint.test_hostile_answers import Change, changed_entry, hostile, set_to

SCORED = {"prompt": [[0, 5, 6, 7]], "max_tokens": 1, "logprobs": 5, "echo": True}


def test_a_good_answer_is_handed_on_unchanged() -> None:
    with serving(StandIn(NEW, EVERY)) as server:
        answer = completed(Client(server.url, 5), dict(SCORED), generate=False)
    (choice,) = answer["choices"]
    assert choice["logprobs"]["token_logprobs"][1] == NEW[0, 5]


CASES: dict[str, tuple[Change, str]] = {
    "nan": (changed_entry(float("nan")), "gives log-probabilities that no model can: nan is no log-probability"),
    "above 0": (changed_entry(0.5), "gives log-probabilities that no model can: 0.5 is above 0"),
    "the own nan": (
        set_to("choices", 0, "logprobs", "token_logprobs", 2, value=float("nan")),
        "gives log-probabilities that no model can: nan is no log-probability",
    ),
    "no choice": (set_to("choices", value=[]), "gives no answer to a question (0 choices for 1 prompts)"),
    "a choice null": (
        set_to("choices", 0, value=None), "gives no answer to a question (choices.0 must be an object)",
    ),
    "the own a text": (
        set_to("choices", 0, "logprobs", "token_logprobs", 2, value="0"),
        "gives no answer to a question (choices.0.logprobs.token_logprobs.2 must be a number)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_no_model_answers_is_refused(case: str) -> None:
    change, why = CASES[case]
    with serving(hostile("echo", change)) as server, pytest.raises(InputError) as refused:
        completed(Client(server.url, 5), dict(SCORED), generate=False)
    remedy = "see the server's log" + (", or ask another server" if "no model can" in why else "")
    assert str(refused.value) == f"{server.url}: {why}; {remedy}"


NEEDS = "likelihoods need `echo` with `logprobs`: vLLM and fp8q serve answer them"
STATUSES: dict[int, tuple[type[Fp8qError], str]] = {
    400: (InputError, f"URL: refused a question (HTTP 400: not now); {NEEDS}"),
    401: (InputError, "URL: wants a key (HTTP 401: not now); set OPENAI_API_KEY"),
    429: (BackendError, "URL: failed (HTTP 429: not now); see the server's log, and ask again"),
    500: (BackendError, "URL: failed (HTTP 500: not now); see the server's log, and ask again"),
}


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_ends_in_the_same_error_as_in_compare(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.validate.endpoint.client.BACKOFF_S", 0.01)
    error, words = STATUSES[status]
    fields: dict[str, Any] = dict(SCORED)
    with serving(StandIn(NEW, statuses=[status] * 5)) as server, pytest.raises(error) as refused:
        completed(Client(server.url, 5), fields, generate=False)
    assert str(refused.value) == words.replace("URL", server.url)
