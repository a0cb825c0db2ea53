"""Servers that answer with what is no answer: other types, numbers that cannot be, too much, too slowly, no HTTP.

Each is a real server on this machine, and ends in one line of an error that fp8q foresees.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q.core.errors import BackendError, Fp8qError, InputError
from fp8q.validate.endpoint.client import MOST_REFUSED, Client, RefusedError
from fp8q.validate.endpoint.schema import BASE_BYTES, ENTRY_BYTES, most_bytes

from .stand_in import TOKENS, StandIn, serving
from .test_asking import EVERY, KEPT, NEW, asked_of

Change = Callable[[dict[str, Any]], Any]


class Hostile(StandIn):
    """A server whose answers in one form are `change`d before they are sent."""

    change: Change = staticmethod(lambda answer: answer)

    def _completion(self, fields: dict[str, Any]) -> tuple[int, Any]:
        status, answer = super()._completion(fields)
        return status, answer if status != 200 else json.dumps(self.change(answer))


def hostile(form: str, change: Change) -> Hostile:
    """A server that has but this form, and falls back to no other."""
    server = Hostile(NEW, (form,), as_ids=True)
    server.change = change
    return server


def first(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][-1]
    return found


def changed_entry(value: Any) -> Change:
    """Give the likeliest token at position 3 that log-probability, in each form's own place."""

    def change(answer: dict[str, Any]) -> Any:
        choice = first(answer)
        if table := choice.get("prompt_logprobs"):
            table[3][next(iter(table[3]))] = {"logprob": value}
        else:
            top = choice["logprobs"]["top_logprobs"][3 if len(choice["logprobs"]["tokens"]) > 1 else 0]
            top[next(iter(top))] = value
        return answer

    return change


def set_to(*path: str | int, value: Any) -> Change:
    """Put `value` at a path of the answer."""

    def change(answer: dict[str, Any]) -> Any:
        place: Any = answer
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return answer

    return change


IMPOSSIBLE = {
    "nan": (float("nan"), "nan is no log-probability"),
    "inf": (float("inf"), "inf is no log-probability"),
    "1e308": (1e308, "1e+308 is above 0"),
    "above 0": (0.5, "0.5 is above 0"),
    "a large sum": (0.0, "is the sum of probabilities, which is 1 at most"),
}


@pytest.mark.parametrize("form", EVERY[:3])
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_log_probabilities_that_no_model_has_are_refused(form: str, case: str, tmp_path: Path) -> None:
    value, why = IMPOSSIBLE[case]
    field = "prompt_logprobs" if form == "prompt_logprobs" else "logprobs.top_logprobs"
    with serving(hostile(form, changed_entry(value))) as server, pytest.raises(InputError) as refused:
        asked_of(server, tmp_path)
    before, _, after = str(refused.value).partition(f": gives {field} that no model can: ")
    assert before == server.url
    said, end = after.split("; ")
    assert said.endswith(why)
    assert end == "see the server's log, or ask another server"


def test_a_list_without_any_likely_token_is_refused(tmp_path: Path) -> None:
    def change(answer: dict[str, Any]) -> Any:
        table = first(answer)["prompt_logprobs"]
        table[3] = {token: {"logprob": -50.0} for token in table[3]}
        return answer

    with serving(hostile("prompt_logprobs", change)) as server, pytest.raises(InputError) as refused:
        asked_of(server, tmp_path)
    assert str(refused.value) == (
        f"{server.url}: gives prompt_logprobs that no model can: -50 is the likeliest of {KEPT.vocabulary:,} tokens, "
        "of which one has -21.5 or more; see the server's log, or ask another server"
    )


@pytest.mark.parametrize("value", [-float("inf"), -1e308, -1e5])
def test_a_masked_token_has_the_least_log_probability(value: float, tmp_path: Path) -> None:
    """vLLM writes -9999 for -inf; a token that another runtime finds likely then counts much, and no infinity."""

    def change(answer: dict[str, Any]) -> Any:
        table = first(answer)["prompt_logprobs"]
        table[3][[*table[3]][1]] = {"logprob": value}
        return answer

    with serving(hostile("prompt_logprobs", change)) as server:
        found = asked_of(server, tmp_path).answers
    assert np.nanmin(found.logprobs) == -9999
    assert np.isfinite(found.nll).all()


def test_rounding_of_bf16_is_no_fault(tmp_path: Path) -> None:
    """Log-probabilities in BF16 add up to a little more than 1, and one of 0.004 is counted as 0."""

    def change(answer: dict[str, Any]) -> Any:
        first(answer)["prompt_logprobs"][3] = {
            token: {"logprob": -9.0} for token in first(answer)["prompt_logprobs"][3]
        }
        token = next(iter(first(answer)["prompt_logprobs"][3]))
        first(answer)["prompt_logprobs"][3][token] = {"logprob": 0.004}
        return answer

    with serving(hostile("prompt_logprobs", change)) as server:
        found = asked_of(server, tmp_path).answers
    assert found.logprobs[1, 0] == 0
    assert (np.nan_to_num(found.logprobs) <= 0).all()


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    kept = replace(KEPT, vocabulary=TOKENS)

    def change(answer: dict[str, Any]) -> Any:
        first(answer)["prompt_logprobs"][3]["2000000000"] = {"logprob": -30.0}
        return answer

    with serving(hostile("prompt_logprobs", change)) as server, pytest.raises(InputError) as refused:
        asked_of(server, tmp_path, kept)
    assert str(refused.value) == (
        f"{server.url}: gives a log-probability of token 2000000000 (prompt_logprobs), and the run's model has "
        f"{TOKENS} tokens; it is another model, or has another tokenizer"
    )


DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
#: A form, a change of its answer, and how the form is said not to be answered.
MALFORMED: dict[str, tuple[str, Change, str]] = {
    "a list": ("prompt_logprobs", lambda answer: [answer], "the answer must be an object"),
    "null": ("prompt_logprobs", lambda answer: None, "the answer must be an object"),
    "no choices": ("text", lambda answer: {}, "choices is missing"),
    "choices null": ("text", set_to("choices", value=None), "choices must be a list"),
    "a choice null": ("text", set_to("choices", 0, value=None), "choices.0 must be an object"),
    "no choice": ("prompt_logprobs", set_to("choices", value=[]), "0 choices for 1 prompts"),
    "index a text": ("text", set_to("choices", 0, "index", value="1"), "choices.0.index must be a whole number"),
    "index true": ("text", set_to("choices", 0, "index", value=True), "choices.0.index must be a whole number"),
    "index huge": ("text", set_to("choices", 0, "index", value=10**30), "choices.0.index must be at most 2147483647"),
    "index negative": ("text", set_to("choices", 0, "index", value=-1), "choices.0.index must be at least 0"),
    "index twice": (
        "text", set_to("choices", 0, "index", value=1), "choices with the indices [1, 6, 5, 4, 3, 2, 1, 0]",
    ),
    "text a number": ("text", set_to("choices", 0, "text", value=5), "choices.0.text must be text"),
    "text null": ("text", set_to("choices", 0, "text", value=None), "no text"),
    "usage a list": ("text", set_to("usage", value=[1]), "usage must be an object"),
    "a count of 10^400": (
        "text", set_to("usage", "prompt_tokens", value=10**400), "usage.prompt_tokens must be at most 2147483647",
    ),
    "a count negative": ("text", set_to("usage", "prompt_tokens", value=-1), "usage.prompt_tokens must be at least 0"),
    "a count of 1.5": (
        "text", set_to("usage", "prompt_tokens", value=1.5), "usage.prompt_tokens must be a whole number",
    ),
    "table an object": (
        "prompt_logprobs", set_to("choices", 0, "prompt_logprobs", value={}),
        "choices.0.prompt_logprobs must be a list",
    ),
    "an entry a number": (
        "prompt_logprobs", set_to("choices", 0, "prompt_logprobs", 3, value=7),
        "choices.0.prompt_logprobs.3 must be an object",
    ),
    "a value null": (
        "prompt_logprobs", changed_entry(None), "choices.0.prompt_logprobs.3.{token}.logprob must be a number",
    ),
    "a value a text": (
        "prompt_logprobs", changed_entry("-1"), "choices.0.prompt_logprobs.3.{token}.logprob must be a number",
    ),
    "a value true": (
        "prompt_logprobs", changed_entry(True), "choices.0.prompt_logprobs.3.{token}.logprob must be a number",
    ),
    "a value deep": (
        "prompt_logprobs", changed_entry(DEEP), "choices.0.prompt_logprobs.3.{token}.logprob must be a number",
    ),
    "an id negative": (
        "prompt_logprobs", set_to("choices", 0, "prompt_logprobs", 3, "-5", value={"logprob": -9}),
        "choices.0.prompt_logprobs.3.-5.[key] is refused: string should match pattern '^(0|[1-9][0-9]{0,9})$'",
    ),
    "an id with an underscore": (
        "prompt_logprobs", set_to("choices", 0, "prompt_logprobs", 3, "1_0", value={"logprob": -9}),
        "choices.0.prompt_logprobs.3.1_0.[key] is refused: string should match pattern '^(0|[1-9][0-9]{0,9})$'",
    ),
    "logprobs a list": ("logprobs", set_to("choices", 0, "logprobs", value=[]), "choices.0.logprobs must be an object"),
    "top a list": (
        "logprobs", set_to("choices", 0, "logprobs", "top_logprobs", value=[[]]),
        "choices.0.logprobs.top_logprobs.0 must be an object",
    ),
    "top null": (
        "logprobs", set_to("choices", 0, "logprobs", "top_logprobs", value=[None]),
        "a position without logprobs.top_logprobs",
    ),
    "tops empty": (
        "logprobs", set_to("choices", 0, "logprobs", "top_logprobs", value=[]), "no logprobs.top_logprobs",
    ),
    "a top's value null": (
        "logprobs", set_to("choices", 0, "logprobs", "top_logprobs", 0, "t1", value=None),
        "choices.0.logprobs.top_logprobs.0.t1 must be a number",
    ),
    "tokens of lists": (
        "echo", set_to("choices", 0, "logprobs", "tokens", 3, value=[]), "choices.0.logprobs.tokens.3.str must be text",
    ),
    "own null": (
        "echo", set_to("choices", 0, "logprobs", "token_logprobs", 3, value=None),
        "no logprobs.token_logprobs of token 4",
    ),
    "own a text": (
        "echo", set_to("choices", 0, "logprobs", "token_logprobs", 3, value="NaN"),
        "choices.0.logprobs.token_logprobs.3 must be a number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_an_answer_of_other_types_is_none_in_this_form(case: str, tmp_path: Path) -> None:
    form, change, why = MALFORMED[case]
    with serving(hostile(form, change)) as server, pytest.raises(InputError) as refused:
        asked_of(server, tmp_path)
    said, end = str(refused.value).rsplit("); ", 1)
    assert said.startswith(f"{server.url}: answers no completion of m (")
    assert end == "compare needs /v1/completions, since a chat's template would stand before the text"
    said = re.sub(r"(prompt_logprobs\.3)\.[0-9]+\.logprob", r"\1.{token}.logprob", said)
    assert f"{form}: {why}" in said.partition(" (")[2].split("; "), said


MODELS: dict[str, tuple[str, str]] = {
    "a number": ("5", "the answer must be an object"),
    "no data": ("{}", "data is missing"),
    "data null": ('{"data": null}', "data must be a list"),
    "an entry null": ('{"data": [null]}', "data.0 must be an object"),
    "a name that is a number": ('{"data": [{"id": 5}]}', "data.0.id must be text"),
    "a context of 0": ('{"data": [{"id": "m", "max_model_len": 0}]}', "data.0.max_model_len must be at least 1"),
    "a context that is true": (
        '{"data": [{"id": "m", "max_model_len": true}]}', "data.0.max_model_len must be a whole number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_list_of_models_is_read_by_its_schema(case: str, tmp_path: Path) -> None:
    body, why = MODELS[case]
    with answering(http(body.encode())) as url, pytest.raises(InputError) as refused:
        asked_of(StandIn(NEW, url=url), tmp_path)
    assert str(refused.value) == f"{url}: lists no models ({why}); is it the address of a model's server?"


def test_many_names_of_models_are_cut(tmp_path: Path) -> None:
    body = json.dumps({"data": [{"id": f"model-{number}"} for number in range(5000)]}).encode()
    with answering(http(body)) as url, pytest.raises(InputError) as refused:
        asked_of(StandIn(NEW, url=url), tmp_path)
    assert str(refused.value).startswith(f"{url}: serves model-0, model-1, ")
    assert len(str(refused.value)) < 400


Parts = Callable[[], Iterator[bytes]]


def http(body: bytes, head: str = "", status: str = "200 OK", length: bool = True) -> Parts:
    """A complete answer, at once."""
    lines = [f"HTTP/1.1 {status}", *([f"Content-Length: {len(body)}"] if length else []), *head.splitlines()]
    return lambda: iter(["\r\n".join([*lines, "", ""]).encode() + body])


def drip(begun: bytes, byte: bytes = b" ", every_s: float = 0.1) -> Parts:
    """The beginning of an answer, and then a byte now and then without end."""

    def parts() -> Iterator[bytes]:
        yield begun
        while True:
            time.sleep(every_s)
            yield byte

    return parts


def flood(begun: bytes, part: bytes) -> Parts:
    """The beginning of an answer, and then the same part without end, as fast as it is read."""

    def parts() -> Iterator[bytes]:
        yield begun
        while True:
            yield part

    return parts


@contextmanager
def answering(parts: Parts) -> Iterator[str]:
    """A server that answers whatever it is asked with these bytes, in parts, until the block ends: its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ended = threading.Event()

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                for part in parts():
                    if ended.is_set():
                        return
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)


LATE = "URL: did not answer within 0.7 seconds; give it longer with --timeout, or ask less with --windows"
BROKE = "URL: the connection broke off ({}); see the server's log"
NO_JSON = "URL/v1/models: answers with no JSON ({}); is it the address of a model's server?"
MUCH = (
    f"URL/v1/models: answers with more than {BASE_BYTES:,} bytes, the most that such an answer has; is it the right "
    "server?"
)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
RAW: dict[str, tuple[Parts, type[Fp8qError], str]] = {
    "a silent server": (drip(b"", b""), BackendError, LATE),
    "a slow head": (drip(OK, b"X: 1\r\n"), BackendError, LATE),
    "a slow line of the head": (drip(OK + b"X-Long: ", b"a"), BackendError, LATE),
    "continue without end": (flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), BackendError, LATE),
    "a slow body": (drip(OK + b"Content-Length: 9999\r\n\r\n{"), BackendError, LATE),
    "a slow body without a length": (drip(OK + b"\r\n{"), BackendError, LATE),
    "a slow body in chunks": (drip(CHUNKED, b"1\r\n \r\n"), BackendError, LATE),
    "a slow refusal": (drip(b"HTTP/1.1 400 No\r\n\r\n"), BackendError, LATE),
    "a slow server that is busy": (drip(b"HTTP/1.1 503 No\r\n\r\n"), BackendError, LATE),
    "a huge body": (flood(OK + b"\r\n[", b"0," * 50_000), InputError, MUCH),
    "a huge body in chunks": (flood(CHUNKED, b"10000\r\n" + b"0," * (1 << 15) + b"\r\n"), InputError, MUCH),
    "a huge length": (flood(OK + b"Content-Length: 9223372036854775807\r\n\r\n[", b"0," * 50_000), InputError, MUCH),
    "a bomb": (http(gzip.compress(b"0" * (50 << 20)), "Content-Encoding: gzip"), InputError, MUCH),
    "a body cut short": (http(b"{", "Content-Length: 5", length=False), BackendError, BROKE.format("ProtocolError")),
    "no HTTP": (http(b"", status="\0"), BackendError, BROKE.format("ProtocolError")),
    "chunks that are none": (
        lambda: iter([CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"]), BackendError, BROKE.format("ProtocolError"),
    ),
    "gzip that is none": (http(b"{}", "Content-Encoding: gzip"), BackendError, BROKE.format("DecodeError")),
    "bytes that are no text": (
        http(b'{"\xff": 1}'), InputError,
        NO_JSON.format("'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    ),
    "a number of 5,000 digits": (
        http(b"1" * 5000), InputError,
        NO_JSON.format("Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; use "
                       "sys.set_int_max_str_digits() to increase the limit"),
    ),
    "brackets without end": (
        http(b"[" * 200_000), InputError,
        NO_JSON.format("maximum recursion depth exceeded while decoding a JSON array from a unicode string"),
    ),
    "a redirect": (
        http(b"", "Location: http://127.0.0.1:1/", "302 Found"), InputError,
        "URL: refused (HTTP 302); is it the address of a model's server?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RAW)
def test_what_is_no_answer_ends_in_time_and_in_one_line(case: str, tmp_path: Path) -> None:
    parts, error, words = RAW[case]
    begun = time.monotonic()
    with answering(parts) as url, pytest.raises(error) as refused:
        asked_of(StandIn(NEW, url=url), tmp_path, timeout_s=0.7)
    assert str(refused.value) == words.replace("URL", url)
    assert time.monotonic() - begun < 5


def test_a_busy_server_is_asked_again_however_much_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.validate.endpoint.client.BACKOFF_S", 0.01)
    with answering(flood(b"HTTP/1.1 429 No\r\n\r\n", b"no " * 30_000)) as url:
        client = Client(url, 20)
        with pytest.raises(RefusedError) as refused:
            client.get("/v1/models")
    assert (refused.value.status, client.requests) == (429, 5)


def test_a_refusal_without_end_is_quoted_in_part() -> None:
    with answering(flood(b"HTTP/1.1 418 No\r\n\r\n", b"no " * 30_000)) as url, pytest.raises(RefusedError) as refused:
        Client(url, 5).get("/v1/models")
    assert str(refused.value) == f"HTTP 418: {('no ' * 100)[:200]}…"
    assert MOST_REFUSED < 1 << 20


def test_an_answer_may_be_as_long_as_what_was_asked_for() -> None:
    """Of 100 tokens and a generated one, 20 likeliest each, beside the token's own log-probability and its text."""
    fields = {"prompt": [*range(100)], "prompt_logprobs": 20, "max_tokens": 1}
    assert most_bytes(fields) == BASE_BYTES + 101 * 22 * ENTRY_BYTES
    assert most_bytes({"prompt": ["é", "ab"], "logprobs": 5, "max_tokens": 1}) == BASE_BYTES + 6 * 7 * ENTRY_BYTES
    with answering(flood(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536)) as url, pytest.raises(InputError) as refused:
        Client(url, 30).post("/v1/completions", fields)
    assert f"answers with more than {BASE_BYTES + 101 * 22 * ENTRY_BYTES:,} bytes" in str(refused.value)
