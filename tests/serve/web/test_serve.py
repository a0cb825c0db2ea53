"""`fp8q serve` on the counting model: what it answers, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from fp8q.core.files import sha256_file
from fp8q.serve.web.gate import names_of
from fp8q.stages.generate import open_model
from tests.serve.counting_model import make_counting_run
from tests.serve.web.started_server import SECONDS, Held, Thread, in_thread

if TYPE_CHECKING:
    from fp8q.core.run import Run

Fp8q = Callable[..., Any]
NAME = 'model="counting"'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thread]:
    """One server for all that leave it as it was."""
    with in_thread(make_counting_run(tmp_path_factory.mktemp("serve") / "run", 40).root, name="counting") as found:
        yield found


@pytest.fixture
def own(counting_run: Run) -> Iterator[Thread]:
    """A server of a test's own."""
    with in_thread(counting_run.root, name="counting") as found:
        yield found


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *found, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def test_an_answer_is_openais_whole_and_in_chunks(server: Thread) -> None:
    asked: dict[str, Any] = {"prompt": "t3 t1 t4", "max_tokens": 3, "temperature": 0}
    found = server.post(**asked).json()
    assert found.pop("id").startswith("cmpl-")
    assert found.pop("created") > 1_700_000_000
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    choice = {"index": 0, "text": " t1 t2 t6", "logprobs": None, "finish_reason": "length"}
    assert found == {"object": "text_completion", "model": "counting", "choices": [choice], "usage": usage}
    *chunks, last = events(server.post(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " t1 t2 t6"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert (last["choices"], last["usage"]) == ([], usage)


def test_prompts_are_texts_or_tokens_one_or_several(server: Thread) -> None:
    for prompt in ("t3 t1 t4", [3, 1, 4], ["t3 t1 t4"], [[3, 1, 4]]):
        found = server.post(prompt=prompt, max_tokens=3, temperature=0).json()["choices"]
        assert [choice["text"] for choice in found] == [" t1 t2 t6"]
    found = server.post(prompt=["t3 t1 t4", "t0", "t2"], max_tokens=2, temperature=0).json()
    assert [choice["text"] for choice in found["choices"]] == [" t1 t2", " t0 t0", " t2 t6"]
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    streamed: dict[int, str] = {}
    for event in events(server.post(prompt=[[3, 1, 4], [0]], max_tokens=2, temperature=0, stream=True)):
        for choice in event["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert streamed == {0: " t1 t2", 1: " t0 t0"}


def test_stop_is_one_word_or_several_and_the_end_of_text_a_token(server: Thread) -> None:
    for stop in ("t6", ["t9", "t6"]):
        (choice,) = server.post(prompt="t3 t1 t4", max_tokens=9, temperature=0, stop=stop).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (" t1 t2 ", "stop")
    found = server.post(prompt="t1 t4 t2", temperature=0).json()
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("", "stop")
    assert found["usage"]["completion_tokens"] == 1


def test_log_probabilities_stand_beside_the_tokens(server: Thread) -> None:
    (choice,) = server.post(prompt="t3 t1 t4", max_tokens=2, temperature=0, logprobs=2).json()["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == ["t1", "t2"]
    assert found["text_offset"] == [0, 3]
    # the logits of the counting model are -(distance)^2: the next ones lie 1 below
    first = found["top_logprobs"][0]
    assert found["token_logprobs"][0] == first["t1"]
    assert sorted(round(each - first["t1"], 5) for each in first.values()) == [-1.0, 0.0]
    assert server.post(prompt="t3", logprobs=0, temperature=0, max_tokens=1).json()["choices"][0]["logprobs"][
        "top_logprobs"
    ] == [{}]


def test_log_probabilities_of_a_prompt_stand_by_the_ids_of_its_tokens(server: Thread) -> None:
    """Those of t1 behind t3 and of t2 behind t3 t1, with the two likeliest in their places; the answer is the same."""
    found = server.post(prompt="t3 t1 t2", max_tokens=1, temperature=0, prompt_logprobs=2, logprobs=1).json()
    (choice,) = found["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for begun, token, listed in (("t3", 1, others[0]), ("t3 t1", 2, others[1])):
        best = server.post(prompt=begun, max_tokens=1, temperature=0, logprobs=20).json()["choices"][0]["logprobs"]
        expected = best["top_logprobs"][0]
        assert listed[str(token)]["logprob"] == pytest.approx(expected[f"t{token}"], abs=1e-4)
        assert listed[str(token)]["decoded_token"] == f"t{token}"
        assert {each["decoded_token"] for each in listed.values()} >= {*list(expected)[:2]}
        assert len(listed) in (2, 3)
    assert (choice["text"], len(choice["logprobs"]["tokens"])) == (
        server.post(prompt="t3 t1 t2", max_tokens=1, temperature=0).json()["choices"][0]["text"], 1,
    )  # fmt: skip
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert server.post(prompt="t3", max_tokens=1, prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"] == [None]


def test_an_echoed_prompt_begins_text_and_lists(server: Thread) -> None:
    """With what prompt_logprobs has of its tokens, and no log-probability of the first, which nothing predicts."""
    prompt = "t3 t1 t2"
    listed = server.post(prompt=prompt, max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1).json()["choices"][0]
    found = server.post(prompt=prompt, max_tokens=1, temperature=0, logprobs=1, echo=True).json()
    (choice,) = found["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt + listed["text"]
    assert logprobs["tokens"] == ["t3", "t1", "t2", *listed["logprobs"]["tokens"]]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [
        listed["prompt_logprobs"][1]["1"]["logprob"], listed["prompt_logprobs"][2]["2"]["logprob"],
        *listed["logprobs"]["token_logprobs"],
    ]  # fmt: skip
    assert logprobs["text_offset"] == [0, 2, 5, 8]
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    by_ids = server.post(prompt=[3, 1, 2], max_tokens=1, temperature=0, logprobs=1, echo=True).json()["choices"][0]
    assert by_ids["logprobs"] == logprobs
    plain = server.post(prompt=["t3", "t1"], max_tokens=1, temperature=0, echo=True).json()["choices"]
    assert [each["text"][:2] for each in plain] == ["t3", "t1"]
    assert [each["logprobs"] for each in plain] == [None, None]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stream": True}, "comes with a whole answer; leave out stream"),
        ({"prompt_logprobs": 1}, "lists what prompt_logprobs does, in another form; leave one of them out"),
    ],
)
def test_what_cannot_be_echoed_is_refused(server: Thread, fields: dict[str, Any], told: str) -> None:
    refused = server.post(**{"prompt": "t1", **fields}, echo=True)
    error = refused.json()["error"]
    assert (refused.status_code, error["message"], error["param"]) == (400, f"echo: {told}", "echo")


def test_those_of_several_prompts_are_those_of_each(server: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a whole answer, and as many as are kept."""
    prompts: list[list[int]] = [[3, 1, 4], [1, 5], [9]]
    for more in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0, **more}
        together = server.post(prompt=prompts, **asked).json()["choices"]
        alone = [server.post(prompt=each, **asked).json()["choices"][0] for each in prompts]
        assert together == [{**each, "index": index} for index, each in enumerate(alone)]
    streamed = server.post(prompt="t1", prompt_logprobs=1, stream=True)
    told = "prompt_logprobs: come with a whole answer; leave out stream"
    assert (streamed.status_code, streamed.json()["error"]["message"]) == (400, told)
    monkeypatch.setattr("fp8q.serve.web.app.MOST_LISTED", 12)
    assert server.post(prompt=prompts, prompt_logprobs=1).status_code == 200
    refused = server.post(prompt=[*prompts, [1]], prompt_logprobs=1)
    assert error_of(refused) == (
        "prompt_logprobs: are kept until all answers are whole, at most 12 of several prompts, and these may have 14; "
        "send fewer prompts in a request"
    )


def test_log_probabilities_of_a_prompt_are_not_those_of_a_model_in_tails(
    counting_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose prompt is computed in one form before its last tokens, and in another there; its source has none."""
    config = counting_run.model / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    written = sha256_file(config)
    config.write_text(json.dumps(fields | {"fp8q": {"two_terms": ["up"], "tails": {"up": 16}}}), encoding="utf-8")
    record = counting_run.record_file.read_text(encoding="utf-8")
    counting_run.record_file.write_text(record.replace(written, sha256_file(config)), encoding="utf-8")
    monkeypatch.setattr("fp8q.stages.serve.open_model", lambda run, runtime, rows: open_model(run, "auto", rows))
    with in_thread(counting_run.root, name="counting", bf16=True) as server:
        refused = server.post(prompt="t3 t1", prompt_logprobs=1)
        assert server.post(prompt="t3 t1", logprobs=1, max_tokens=1).status_code == 200
        assert server.post(model="counting-bf16", prompt="t3 t1", prompt_logprobs=1, max_tokens=1).status_code == 200
    assert error_of(refused) == (
        "prompt_logprobs: are of tokens taken in one by one, and this model reads the end of a prompt in another form "
        "than the rest of it; ask for the logprobs of one token behind beginnings of the prompt"
    )


#: Fields (beside a good prompt, where they have none), which of them is at fault, and what is said.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "the prompt has no tokens; write something to continue"),
    ({"prompt": 5}, "prompt", "prompt: must be a text, token ids, or a list of either"),
    ({"prompt": ["a", 5]}, "prompt", "prompt: must be a text, token ids, or a list of either"),
    ({"prompt": [True]}, "prompt", "prompt: must be a text, token ids, or a list of either"),
    ({"prompt": []}, "prompt", "prompt: holds 0 prompts; give from 1 to 128"),
    ({"prompt": ["a"] * 129}, "prompt", "prompt: holds 129 prompts; give from 1 to 128"),
    ({"prompt": [99]}, "prompt", "the prompt has the token 99, and the model's go from 0 to 15"),
    (
        {"prompt": [1] * 40},
        "prompt",
        "the prompt has 40 tokens and the model 40 positions for prompt and answer; shorten it to 39 tokens or fewer",
    ),
    ({"n": 2}, "n", "n must be at most 1"),
    ({"n": True}, "n", "n must be a whole number"),
    ({"best_of": 2}, "best_of", "best_of must be at most 1"),
    ({"echo": 5}, "echo", "echo must be true or false"),
    ({"suffix": "b"}, "suffix", "suffix must be ''"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens must be a whole number"),
    ({"temperature": -1}, "temperature", "temperature must be at least 0"),
    ({"temperature": 9}, "temperature", "temperature must be at most 2"),
    (
        {"max_tokens": 41},
        "max_tokens",
        "max_tokens must be at most 40, the positions that the model has for prompt and answer",
    ),
    ({"seed": 2**64}, "seed", "seed must be at most 18446744073709551615"),
    ({"logprobs": 21}, "logprobs", "logprobs must be at most 20"),
    (
        {"logit_bias": {"5": 1}},
        "logit_bias",
        "logit_bias must have at most 0 items",
    ),
    ({"stop": 5}, "stop", "stop must be text or must be a list"),
    (
        {"guided": 1},
        "guided",
        "guided: is no field that this server knows; leave it out (docs/serve.md lists those it takes)",
    ),
]


def test_what_cannot_be_is_refused_with_the_field_at_fault(server: Thread) -> None:
    for fields, param, message in REFUSED:
        for stream in (False, True):
            found = server.post(**{"prompt": "t1", **fields, "stream": stream})
            error = {"message": message, "type": "invalid_request_error", "param": param}
            assert found.status_code == 400
            assert {name: value for name, value in found.json()["error"].items() if name != "code"} == error
    assert server.post().json()["error"]["message"] == "prompt is missing"
    found = server.post(prompt="t1", model="b")
    assert (found.status_code, found.json()["error"]) == (
        404,
        {
            "message": "there is no model b; there is counting", "type": "invalid_request_error", "param": "model",
            "code": "model_not_found",
        },
    )  # fmt: skip


def test_what_changes_nothing_may_be_said(server: Thread) -> None:
    found = server.post(
        prompt="t3 t1 t4", max_tokens=3, temperature=0, n=1, user="somebody", metadata={"a": 1}, store=True, top_k=-1,
        logit_bias={}, echo=False, stop=None, suffix=None,
    )  # fmt: skip
    assert found.json()["choices"][0]["text"] == " t1 t2 t6"


#: Bodies that are refused, with why.
UNREADABLE = [
    (b"[", "the body is no JSON that is read here (EOF while parsing a list at line 1 column 1); mend it"),
    (b'{"prompt": NaN}', "the body is no JSON that is read here (expected value at line 1 column 12); mend it"),
    (b'"a"', "the body must be an object"),
    (b"", "the body is missing"),
    (
        b'{"prompt": "\xff"}',
        "the body is no JSON that is read here (invalid unicode code point at line 1 column 13); mend it",
    ),
]


def test_a_body_that_does_not_read_is_refused(server: Thread) -> None:
    for body, message in UNREADABLE:
        found = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert (found.status_code, found.json()["error"]["message"]) == (400, message)
    found = server.client.post("/v1/completions", content=b'{"prompt": "t1"}', headers={"Content-Type": "text/plain"})
    assert (found.status_code, found.json()["error"]["message"]) == (
        415, "the body must be JSON; send it with the header Content-Type: application/json",
    )  # fmt: skip


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_is_refused_from_one_byte_too_many_on(server: Thread, chunked: bool) -> None:
    """With its length in the head, or without."""

    def posted(length: int) -> httpx.Response:
        body = b'{"prompt": "t1", "max_tokens": 1}'.ljust(length)
        content = (body[at : at + 100_000] for at in range(0, length, 100_000)) if chunked else body
        return server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})

    told = re.fullmatch(r"the body has more than ([\d,]+) bytes; send less", error_of(posted(10_000_000)))
    assert told is not None
    most = int(told[1].replace(",", ""))
    assert [posted(most + more).status_code for more in (0, 1)] == [200, 413]


def error_of(response: httpx.Response) -> str:
    message: str = response.json()["error"]["message"]
    return message


def test_models_are_listed_and_other_paths_are_none(server: Thread) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert {name: model[name] for name in ("id", "precision", "runtime", "max_model_len")} == {
        "id": "counting", "precision": "fp8", "runtime": "onnxruntime", "max_model_len": 40,
    }  # fmt: skip
    assert server.client.get("/v1/models/counting").json() == model
    for path, status in (("/v1/models/a/b", 404), ("/docs", 404), ("/redoc", 404), ("/v1/completions", 405)):
        found = server.client.get(path)
        assert (found.status_code, set(found.json()["error"])) == (status, {"message", "type", "param", "code"})


def test_a_model_without_a_template_says_so_to_those_who_chat(own: Thread, counting_run: Run) -> None:
    found = own.post("/v1/chat/completions", messages=[{"role": "user", "content": "t1"}])
    assert found.status_code == 400
    assert found.json()["error"]["message"] == (
        f"{counting_run.model}: its tokenizer has no chat template; give the one that the model was trained with as "
        "--template FILE, or generate without a chat"
    )


def test_who_comes_to_a_full_house_is_told_to_come_back(counting_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.serve.loop.service.Service.__init__.__defaults__", (1,))
    with in_thread(counting_run.root, name="counting", max_batch=2) as server:
        held = Held(server)
        found = server.post(prompt=["t1", "t2", "t3", "t4"], max_tokens=2)
        assert (found.status_code, found.headers["retry-after"]) == (429, "1")
        assert found.json()["error"] == {
            "message": "3 requests are here already; try again later", "type": "rate_limit_error", "param": None,
            "code": "busy",
        }  # fmt: skip
        assert server.count(f'fp8q_requests_total{{{NAME},outcome="busy"}}') == 4
        held.release()
        end = time.monotonic() + SECONDS
        while (found := server.post(prompt="t3 t1 t4", max_tokens=1, temperature=0)).status_code == 429:
            assert time.monotonic() < end, "those who were turned away are still counted"
        assert found.json()["choices"][0]["text"] == " t1"


def test_a_client_that_hangs_up_frees_its_row_at_once(own: Thread) -> None:
    held = Held(own)
    body = b'{"prompt": "t0", "stream": true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(own.address) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while held.service.load != (0, 1):
            pass
    while own.count(f'fp8q_requests_total{{{NAME},outcome="cancelled"}}') == 0:
        pass
    held.release()
    held.settle()
    assert held.service.load == (0, 0)
    assert own.count(f"fp8q_generated_tokens_total{{{NAME}}}") == 0


def test_what_was_asked_is_counted(own: Thread) -> None:
    own.post(prompt="t3 t1 t4", max_tokens=3, temperature=0)
    own.post(prompt="")
    assert own.count(f'fp8q_requests_total{{{NAME},outcome="length"}}') == 1
    assert own.count(f'fp8q_requests_total{{{NAME},outcome="refused"}}') == 1
    assert own.count(f"fp8q_prompt_tokens_total{{{NAME}}}") == 3
    assert own.count(f"fp8q_generated_tokens_total{{{NAME}}}") == 3
    assert own.count(f"fp8q_time_to_first_token_seconds_count{{{NAME}}}") == 1
    assert own.count(f"fp8q_inter_token_seconds_count{{{NAME}}}") == 2
    assert own.count(f"fp8q_requests_running{{{NAME}}}") == own.count(f"fp8q_requests_waiting{{{NAME}}}") == 0


def test_a_loop_that_has_ended_is_told_and_nobody_waits_for_it(own: Thread) -> None:
    for path in ("/health", "/health/ready", "/health/live"):
        assert (own.client.get(path).status_code, own.client.get(path).json()) == (200, {"status": "ok"})
    held, found = Held(own), list[httpx.Response]()
    waiting = threading.Thread(target=lambda: found.append(own.post(prompt="t1", max_tokens=9)))
    waiting.start()
    while held.service.load == (0, 0):
        pass

    def end() -> None:
        raise SystemExit

    held.service.run_between_steps(end)
    held.release()
    waiting.join(SECONDS)
    assert (found[0].status_code, found[0].json()["error"]["message"]) == (
        500, "the loop that generates has ended (SystemExit); start the server again",
    )  # fmt: skip
    for path in ("/health", "/health/ready", "/health/live"):
        assert (own.client.get(path).status_code, own.client.get(path).json()) == (503, {"status": "dead"})
    refused = own.post(prompt="t1")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        503, "the loop that generates has ended (SystemExit); start the server again",
    )  # fmt: skip


def test_a_browser_that_was_sent_here_under_another_name_is_refused(server: Thread) -> None:
    for host, status in (("evil.example", 403), ("evil.example:80", 403), ("localhost:80", 200), ("[::1]:80", 200)):
        assert server.client.get("/health", headers={"Host": host}).status_code == status
    assert names_of("0.0.0.0", "0.0.0.0") is names_of("example.org", "10.0.0.1") is None
    # the address is what counts, under whatever name it was asked for
    assert names_of("Box.example", "127.0.0.1") == frozenset({
        "localhost", "127.0.0.1", "[::1]", "box.example", "[box.example]", "[127.0.0.1]",
    })  # fmt: skip


def test_the_page_may_load_nothing_and_run_its_own_script_alone(server: Thread) -> None:
    page = server.client.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for kind in (" src=", 'href="http', "url(", "innerHTML", "onclick="):
        assert kind not in page.text
