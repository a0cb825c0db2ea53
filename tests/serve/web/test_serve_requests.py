"""Requests as clients send them: counts in every chunk, packed bodies, tool calls of earlier answers, and what is wrong
by its full name.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.serve.counting_model import make_counting_run, words_tokenizer
from tests.serve.web.started_server import Thread, in_thread

#: As templates of agents do: an answer may be calls alone, whose arguments are objects; and the results have ids.
TEMPLATE = (
    "{% for m in messages %}{% if m.content is undefined %}t9{% else %}{{ m.content }}{% endif %} "
    "{% for call in m.tool_calls %}{{ call.function.name }} {{ call.function.arguments.number }} {{ call.id }} "
    "{% endfor %}{{ m.tool_call_id }} {% endfor %}"
)
CALL = {"id": "t4", "type": "function", "function": {"name": "t3", "arguments": '{"number": "t2"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "t1"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "t5", "tool_call_id": "t4"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thread]:
    folder = tmp_path_factory.mktemp("requests")
    (folder / "chat.jinja").write_text(TEMPLATE)
    run = make_counting_run(folder / "run", 40)
    with in_thread(run.root, name="counting", template=folder / "chat.jinja") as found:
        yield found


def chunks(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return [json.loads(each.removeprefix("data: ")) for each in response.text.split("\n\n")[:-2]]


def test_every_chunk_counts_where_that_is_asked_for(server: Thread) -> None:
    """As guidellm asks of vLLM; the last chunk is that of all answers."""
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"prompt": "t3 t1 t4", "max_tokens": 3, "temperature": 0, "stream": True}
    *each, last = chunks(server.post(**asked, stream_options=options))
    told = sum(chunk["choices"][0]["text"].count(" t") for chunk in each)
    counted = [chunk["usage"]["completion_tokens"] for chunk in each]
    assert (told, counted[-1], counted) == (3, 3, sorted(counted))
    assert {chunk["usage"]["prompt_tokens"] for chunk in each} == {3}
    assert (last["choices"], last["usage"]) == ([], each[-1]["usage"])
    assert all(
        "usage" not in chunk for chunk in chunks(server.post(**asked, stream_options={"continuous_usage_stats": True}))
    )
    plain = chunks(server.post(**asked, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * len(plain[:-1])


#: Fields of a chat, the name of the one at fault, and what is said of it.
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"stream_options": {"foo": 1}}, "stream_options.foo", ""),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", " must be true or false"),
    ({"messages": [{"role": "user", "content": "t1", "str": 1}]}, "messages[0].str", ""),
    ({"messages": [{"role": "user", "content": "t1", "a-b": 1}]}, "messages[0].a-b", ""),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", " must be text or must be a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        " must be 'text'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "t1", "x": 1}]}]},
        "messages[0].content[0].x",
        "",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]", " must have a text as content, or tool_calls"),
    ({"messages": [{"role": "user"}]}, "messages[0]", " must have a text as content, or tool_calls"),
    (
        {"messages": [{**HISTORY[1], "tool_calls": [{**CALL, "function": {"name": "t1", "arguments": "[1"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        " must be an object in JSON",
    ),
    ({"messages": [{**HISTORY[1], "tool_calls": [{**CALL, "b": 1}]}]}, "messages[0].tool_calls[0].b", ""),
    ({"response_format": {"type": "json_object"}}, "response_format.type", " must be 'text'"),
    ({"tools": [{}]}, "tools", " must have at most 0 items"),
    ({"stop": ["a", 5]}, "stop[1]", " must be text"),
    ({"foo": 1}, "foo", ""),
]
#: Without the time, which would be in the names of tests: two workers would each have their own.
PACKED = gzip.compress(b"{}", mtime=0)
UNKNOWN = ": is no field that this server knows; leave it out (docs/serve.md lists those it takes)"


@pytest.mark.parametrize(("fields", "name", "said"), WRONG)
def test_what_is_wrong_is_named_in_full(server: Thread, fields: dict[str, Any], name: str, said: str) -> None:
    found = server.post("/v1/chat/completions", **{"messages": HISTORY, **fields})
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["message"]) == (400, name, name + (said or UNKNOWN))


def test_calls_of_tools_are_sent_back_as_agents_do(server: Thread) -> None:
    """transformers renders the same, with the arguments as the object that they are."""
    oracle = PreTrainedTokenizerFast(tokenizer_object=words_tokenizer())
    function = {"name": "t3", "arguments": {"number": "t2"}}
    history = [
        {"role": "user", "content": "t1"},
        {**HISTORY[1], "tool_calls": [{**CALL, "function": function}]},
        HISTORY[2],
    ]
    ids = oracle.apply_chat_template(history, chat_template=TEMPLATE, return_dict=False)
    expected = server.post(prompt=ids, max_tokens=4, temperature=0).json()
    found = server.post("/v1/chat/completions", messages=HISTORY, max_tokens=4, temperature=0).json()
    assert found["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert found["usage"] == expected["usage"]


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/v1/models/counting", "/metrics", "/v1/completions", "/none"]
)
def test_head_is_the_head_of_get(server: Thread, path: str) -> None:
    head, whole = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert (head.status_code == 200) == (path not in ("/v1/completions", "/none"))


def packed(server: Thread, content: bytes, encoding: str) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return server.client.post("/v1/completions", content=content, headers=headers)


def test_a_body_may_be_packed_by_gzip(server: Thread) -> None:
    body = b'{"prompt": "t3 t1 t4", "max_tokens": 3, "temperature": 0}'
    for content, encoding in ((gzip.compress(body), "gzip"), (gzip.compress(body), "X-GZIP"), (body, "identity")):
        assert packed(server, content, encoding).json()["choices"][0]["text"] == " t1 t2 t6"


def test_a_packed_body_is_bounded_by_what_it_holds(server: Thread) -> None:
    """A gigabyte of spaces is a megabyte packed."""
    most = server.server.serving.largest_body
    body = b'{"prompt": "t1", "max_tokens": 1}'
    assert packed(server, gzip.compress(body.ljust(most)), "gzip").status_code == 200
    packer = zlib.compressobj(wbits=31)
    first, again = (packer.compress(b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = first + again * 999  # behind such a flush the same bytes are packed alike
    for content in (gzip.compress(body.ljust(most + 1)), bomb[: most // 2]):
        found = packed(server, content, "gzip")
        assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("content", "encoding", "status", "message"),
    [
        (b"{}", "br", 415, "Content-Encoding: br is not read here; send the body as it is, or by gzip"),
        (b"{}", "gzip, gzip", 415, "Content-Encoding: gzip, gzip is not read here; send the body as it is, or by gzip"),
        (
            b"{}", "gzip", 400,
            (
                "the body is no gzip (Error -3 while decompressing data: incorrect header check); send it as it is, or "
                "pack it again"
            ),
        ),
        (PACKED[:-9], "gzip", 400, "the body is not one whole gzip; send it as it is, or pack it again"),
        (PACKED * 2, "gzip", 400, "the body is not one whole gzip; send it as it is, or pack it again"),
    ],
)  # fmt: skip
def test_what_does_not_unpack_is_refused(
    server: Thread, content: bytes, encoding: str, status: int, message: str
) -> None:
    found = packed(server, content, encoding)
    assert (found.status_code, found.json()["error"]["message"]) == (status, message)


def test_a_prompt_that_is_too_long_has_openais_code_in_every_form(server: Thread) -> None:
    """As ids, as tokens of a text, as its characters, as a chat of either, and rendered; in a stream as well."""
    words, text = "t1 " * 41, "x" * 700
    said = (
        [{"role": "user", "content": words}],
        [{"role": "user", "content": text}],
        [{"role": "user", "content": "t1"}] * 41,
    )
    asked = [("prompt", each) for each in ([1] * 40, [[1], [1] * 40], words, text)] + [
        ("messages", each) for each in said
    ]
    for name, given in asked:
        path = "/v1/completions" if name == "prompt" else "/v1/chat/completions"
        for stream in (False, True):
            found = server.post(path, **{name: given, "stream": stream})
            error = found.json()["error"]
            assert (found.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", name)


def test_special_tokens_are_set_where_that_is_asked_for(tmp_path: Path) -> None:
    """By default in front of a prompt and not of a chat, as vLLM's field of this name has it."""
    from tokenizers import processors

    tokenizer = words_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="t7 $A", special_tokens=[("t7", 7)])
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    run = make_counting_run(tmp_path / "run", 40, tokenizer)
    with in_thread(run.root, name="counting", template=tmp_path / "chat.jinja") as own:
        for name, given, path in (
            ("prompt", "t1", "/v1/completions"),
            ("messages", [{"role": "user", "content": "t1"}], "/v1/chat/completions"),
        ):
            counted = [
                own.post(path, **{name: given, "max_tokens": 1, **more}).json()["usage"]["prompt_tokens"]
                for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
            ]
            assert counted == ([2, 2, 1] if name == "prompt" else [1, 2, 1])
