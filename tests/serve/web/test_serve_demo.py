"""`fp8q serve` on the demo, a process of its own: OpenAI's client, what comes of too much, and what is no HTTP."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from fp8q.serve.local.chat_template import ChatTemplate
from fp8q.serve.local.generation import open_generator, open_run_session
from fp8q.serve.loop.generate import GeneratedAnswer, Generator, complete
from fp8q.serve.loop.request import Request
from tests.serve.web.schema_attack import attack
from tests.serve.web.started_server import SECONDS, Process, started

if TYPE_CHECKING:
    from fp8q.core.run import Run

PROMPT = "def read_file(path):\n    "
TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo, and a template for chats."""
    copied = type(demo_run)(tmp_path_factory.mktemp("serve") / "run")
    shutil.copytree(demo_run.root, copied.root)
    (copied.root.parent / "chat.jinja").write_text(TEMPLATE)
    return copied


def template(run: Run) -> ChatTemplate:
    """The template that the server was given."""
    return ChatTemplate(run.model, run.root.parent / "chat.jinja")


@pytest.fixture(scope="module")
def served(run: Run) -> Iterator[Process]:
    """A server for all tests here; that it ends as it should is looked at in the end."""
    with started(run.root, "--name", "demo", "--template", str(run.root.parent / "chat.jinja")) as found:
        yield found
        found.process.send_signal(signal.SIGINT)
        out, err = found.process.communicate(timeout=SECONDS)
        assert (found.process.returncode, out) == (0, "")
        assert err.startswith("fp8q: interrupted; those who are being answered have 30 seconds")
        assert len(err.splitlines()) == 1, err


@pytest.fixture
def client(served: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found:
        yield found


@pytest.fixture(scope="module")
def generator(run: Run) -> Generator:
    """The same loop in this process."""
    return open_generator(run, open_run_session(run))


def alone(generator: Generator, request: Request) -> GeneratedAnswer:
    (found,) = complete(generator, [request])
    return found


@pytest.mark.quick
def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError, match="there is no model other; there is demo"):
        client.completions.create(model="other", prompt=PROMPT)


@pytest.mark.quick
@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}])
def test_an_answer_is_the_text_that_generate_gives(
    generator: Generator, client: openai.OpenAI, drawn: dict[str, Any]
) -> None:
    expected = alone(generator, Request(PROMPT, max_tokens=24, **drawn))
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, **drawn}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        expected.input_tokens, len(expected.tokens),
    )  # fmt: skip
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 1
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert (chunks[-1].choices[0].finish_reason, last.usage) == (expected.finish_reason, whole.usage)


def test_penalties_and_stop_words_are_those_of_generate(generator: Generator, client: openai.OpenAI) -> None:
    drawn: dict[str, Any] = {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 0.5}
    free = alone(generator, Request(PROMPT, max_tokens=24, **drawn))
    word = free.text[10:14]
    for stop in (word, ["never said", word]):
        found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, stop=stop, **drawn)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (free.text[: free.text.index(word)], "stop")


@pytest.mark.quick
def test_a_chat_is_answered_by_the_models_template(run: Run, generator: Generator, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say <é>"}]
    prompt = template(run).render(messages)
    expected = alone(generator, Request(prompt, max_tokens=8))
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    said = whole.choices[0].message
    assert (said.role, said.content, whole.choices[0].finish_reason) == ("assistant", expected.text, "length")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    # an answer can be sent back as it came
    again = client.chat.completions.create(**{**asked, "messages": [*messages, said, messages[0]]})
    assert again.usage is not None
    assert whole.usage is not None
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens


def test_log_probabilities_are_the_models_own_in_both_forms(
    run: Run, generator: Generator, client: openai.OpenAI
) -> None:
    request = Request(template(run).render([{"role": "user", "content": "x"}]), max_tokens=6, logprobs=3)
    pieces, text = list(generator.run([request])), generator.vocabulary.token_text
    found = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=6, temperature=0, logprobs=True,
        top_logprobs=3,
    ).choices[0]  # fmt: skip
    assert found.logprobs is not None
    assert found.logprobs.content is not None
    assert [(each.token, each.logprob) for each in found.logprobs.content] == [
        (text(p.token), p.logprob) for p in pieces
    ]
    assert [[(best.token, best.logprob) for best in each.top_logprobs] for each in found.logprobs.content] == [
        [(text(token), logprob) for token, logprob in piece.best] for piece in pieces
    ]
    assert b"".join(bytes(each.bytes or []) for each in found.logprobs.content).decode() == found.message.content
    chunks = client.completions.create(
        model="demo", prompt=request.prompt, max_tokens=6, temperature=0, logprobs=3, stream=True
    )
    listed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [each for one in listed if one for each in one.token_logprobs or ()] == [piece.logprob for piece in pieces]


def test_thirty_two_at_once_are_answered_as_each_alone(generator: Generator, served: Process) -> None:
    source = PROMPT * 8
    requests = [Request(source[number : number + 20], max_tokens=12) for number in range(32)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=SECONDS) as client:
            found = [
                client.completions.create(model="demo", prompt=each.prompt, max_tokens=12, temperature=0)
                for each in requests
            ]
            return [each.choices[0].text for each in await asyncio.gather(*found)]

    assert asyncio.run(ask()) == [alone(generator, request).text for request in requests]


def metric(served: Process, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_stream_that_is_closed_frees_its_row(served: Process, client: openai.OpenAI) -> None:
    before = metric(served, "fp8q_requests_total")
    cancelled = 'fp8q_requests_total{model="demo",outcome="cancelled"}'
    begun = metric(served, cancelled)
    streams = [
        client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(8)
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    while metric(served, "fp8q_requests_total") < before + 8 or metric(served, "fp8q_requests_running"):
        time.sleep(0.01)
    assert metric(served, cancelled) > begun


#: What is sent, and how it is refused.
TOO_MUCH = {
    "a prompt of 1 MB": (b'{"prompt": "%s"}' % (b"a " * 500_000), 400),
    "a body of 10 MB": (b'{"prompt": "%s"}' % (b"a" * 10_000_000), 413),
    "nested a thousand deep": (b'{"prompt": %s}' % (b"[" * 1000 + b"]" * 1000), 400),
    "nested half a million deep": (b"[" * 500_000, 400),
    "200,000 stop words": (b'{"prompt": "a", "stop": [%s"a"]}' % (b'"a",' * 200_000), 400),
    "half a million tokens": (b'{"prompt": [%s1]}' % (b"1," * 500_000), 400),
    "half a million names": (b'{"prompt": "a", %s}' % b",".join(b'"a%d":1' % number for number in range(80_000)), 400),
    "a number of a million digits": (b'{"prompt": "a", "seed": %s}' % (b"9" * 1_000_000), 400),
}


def test_too_much_is_refused_at_once_and_others_go_on_unharmed(generator: Generator, served: Process) -> None:
    expected = alone(generator, Request(PROMPT, max_tokens=400, ignore_end=True))
    texts, over = list[str](), threading.Event()

    def ask() -> None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=SECONDS) as client:
            while not over.is_set():
                found = client.completions.create(
                    model="demo", prompt=PROMPT, max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
                )
                texts.append(found.choices[0].text)

    other = threading.Thread(target=ask)
    other.start()
    try:
        for name, (body, status) in TOO_MUCH.items():
            found = httpx.post(
                f"{served.url}/v1/completions",
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=SECONDS,
            )
            assert (name, found.status_code) == (name, status)
            assert len(found.content) < 1200
    finally:
        over.set()
        other.join(SECONDS)
    assert set(texts) == {expected.text}


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
#: What is written to the socket, and the status that it is answered with.
RAW: list[tuple[bytes, bytes]] = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n", b"400"),
    (b"GET / HTTPS\r\n\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
    (POST + b"Content-Length: -5\r\n\r\n", b"400"),
    (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"400"),
    (b"GET /%ff%fe%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    (POST + b"Content-Length: 99999999999\r\n\r\n{", b"413"),
]


def test_what_is_no_http_is_refused_and_the_server_goes_on(served: Process) -> None:
    address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
    with ExitStack() as half:
        for _ in range(20):
            one = half.enter_context(socket.create_connection(address))
            one.sendall(POST + b"Content-Len")
        for sent, status in RAW:
            with socket.create_connection(address, timeout=SECONDS) as client:
                client.sendall(sent)
                assert (sent[:60], client.recv(1000).split(b" ")[1]) == (sent[:60], status)
        assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}


def test_the_description_holds_for_whatever_schemathesis_thinks_of(served: Process) -> None:
    """Some of the cases of `make described`."""
    found = attack(served, examples=8, seed=11)
    assert found.faults == []
    assert found.cases > 20
    assert found.neighbours
