"""The HTTP port: what is asked for comes back, and a request that cannot be served is told why, and harms no other."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from clients import Http
    from tritonserver import Server

#: The longest prompt that the counting model takes: it has 200 positions.
LONGEST = " ".join(["t0"] * 199)


def test_one_answer_in_all_and_one_for_every_piece(http: Http, counting_model: str) -> None:
    asked = {"text_input": "t3 t1 t4", "max_tokens": 3}
    assert http.generate(counting_model, **asked) == (200, {"text_output": " t1 t2 t6"})
    assert list(http.stream(counting_model, **asked)) == [{"text_output": " t1 t2 t6"}]
    pieces = [{"text_output": " t1"}, {"text_output": " t2"}, {"text_output": " t6"}]
    assert list(http.stream(counting_model, **asked, stream=True)) == pieces


def test_a_stop_word_ends_a_stream_and_the_counts_add_up(http: Http, counting_model: str) -> None:
    wanted = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_finish_reason": True}
    asked = {"text_input": "t3 t1 t4", "max_tokens": 9, "stop_words": ["t9", "t6"], **wanted}
    assert list(http.stream(counting_model, **asked, stream=True)) == [
        {"text_output": " t1", "num_input_tokens": 3, "num_output_tokens": 1, "finish_reason": ""},
        {"text_output": " t2", "num_input_tokens": 3, "num_output_tokens": 1, "finish_reason": ""},
        {"text_output": " ", "num_input_tokens": 3, "num_output_tokens": 1, "finish_reason": "stop"},
    ]
    whole = {"text_output": " t1 t2 ", "num_input_tokens": 3, "num_output_tokens": 3, "finish_reason": "stop"}
    assert http.generate(counting_model, **asked) == (200, whole)


def test_a_seed_draws_the_same_text_again(http: Http, counting_model: str) -> None:
    asked = {"text_input": "t3 t1 t4", "max_tokens": 30, "temperature": 30.0, "top_p": 0.99}
    first, again, other = (http.text(counting_model, **asked, seed=seed) for seed in (2**64 - 1, 2**64 - 1, 1))
    assert first == again != other


def test_an_unknown_field_is_left_out_and_the_longest_prompt_taken(http: Http, counting_model: str) -> None:
    assert http.text(counting_model, text_input="t3 t1 t4", max_tokens=1, n="2") == " t1"
    assert http.text(counting_model, text_input=LONGEST, max_tokens=9) == " t0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": ""}, "the prompt has no tokens; write something to continue"),
        ({}, "text_input holds 0 prompts; send one a request"),
        (
            {"text_input": LONGEST + " t0"},
            (
                "the prompt has 200 tokens and the model 200 positions for prompt and answer; shorten it to 199 "
                "tokens or fewer"
            ),
        ),
        (
            {"text_input": "t0 " * 400_000},
            (
                "the prompt has 1,200,000 characters, more than 3,200, and the model 200 positions for prompt and "
                "answer; shorten it"
            ),
        ),
        ({"text_input": "t0", "max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"text_input": "t0", "temperature": 1e39}, "temperature is inf; it must be 0 or more, and finite"),
        ({"text_input": "t0", "stop_words": ["t1", ""]}, "stop_words is ['t1', '']; it must be without an empty one"),
        ({"text_input": "t0", "stop_words": ["x"] * 20_000}, "stop_words holds 20,000 texts; send at most 16"),
        (
            {"text_input": "t0", "stop_words": ["x" * 1_000_000]},
            "stop_words are 1, the longest of 1,000,000 characters; there may be at most 16, of at most 256 characters",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(
    http: Http, counting_model: str, fields: dict[str, Any], message: str
) -> None:
    fields = {"max_tokens": 2} | fields
    assert http.generate(counting_model, **fields) == (400, {"error": message})
    assert list(http.stream(counting_model, **fields)) == [{"error": message}]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            b'{"text_input": "\xff t1"}',
            400,
            (
                "text_input is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); "
                "encode it so"
            ),
        ),
        (
            b'{"text_input": "t1", "max_tokens": "2"}',
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        (b'{"text_input": 7}', 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (
            b'{"text_input": ["t1", "t2"]}',
            400,
            "[request id: <id_unknown>] inference request batch-size must be <= 1 for 'counting'",
        ),
        (b"[]", 500, "attempt to get members for non-object"),
    ],
)
def test_what_is_no_request_is_told_so(http: Http, counting_model: str, body: bytes, status: int, message: str) -> None:
    assert http.post(counting_model, body) == (status, json.dumps({"error": message}, separators=(",", ":")))
    assert http.text(counting_model, text_input="t3 t1 t4", max_tokens=1) == " t1"


def test_32_at_once_are_each_told_what_it_is_told_alone(http: Http, counting_model: str) -> None:
    prompts = [" ".join(f"t{(which * word) % 15}" for word in range(1, 2 + which % 7)) for which in range(32)]
    alone = [http.text(counting_model, text_input=prompt, max_tokens=40) for prompt in prompts]
    assert len(set(alone)) > 16
    with ThreadPoolExecutor(32) as together:
        texts = together.map(lambda prompt: http.text(counting_model, text_input=prompt, max_tokens=40), prompts)
        assert list(texts) == alone


def test_a_client_that_hangs_up_frees_its_row_and_the_others_go_on(
    triton: Server, http: Http, endless_model: str
) -> None:
    """Both rows are taken for minutes, so a third request is answered only where one of them is free again."""
    forever = {"text_input": "t0", "max_tokens": 999_999, "stream": True}
    stays, leaves = http.stream(endless_model, **forever), http.stream(endless_model, **forever)
    assert next(stays) == next(leaves) == {"text_output": " t0"}
    leaves.close()
    assert http.text(endless_model, text_input="t3 t1 t4", max_tokens=3) == " t1 t2 t6"
    assert [next(stays) for _ in range(50)] == [{"text_output": " t0"}] * 50
    stays.close()
