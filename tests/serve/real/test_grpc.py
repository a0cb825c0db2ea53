"""The gRPC port, by NVIDIA's client: decoupled streams, many requests in one, and what is wrong with a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from clients import Grpc

if TYPE_CHECKING:
    from clients import Http
    from tritonserver import Server


def test_a_stream_ends_with_its_last_piece(grpc: Grpc, counting_model: str) -> None:
    asked = {"text_input": "t3 t1 t4", "max_tokens": 3}
    assert grpc.ask(counting_model, **asked) == [{"text_output": b" t1 t2 t6"}]
    pieces = [{"text_output": b" t1"}, {"text_output": b" t2"}, {"text_output": b" t6"}]
    assert grpc.ask(counting_model, **asked, stream=True) == pieces


def test_counts_and_reasons_have_their_types(grpc: Grpc, counting_model: str) -> None:
    wanted = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_finish_reason": True}
    assert grpc.ask(counting_model, text_input="t5 t5", **wanted) == [
        {"text_output": b"", "num_input_tokens": 2, "num_output_tokens": 1, "finish_reason": b"stop"}
    ]


def test_requests_of_one_stream_are_answered_side_by_side(grpc: Grpc, counting_model: str) -> None:
    prompts = {f"{word}": f"t{word} t1" for word in range(12)}
    alone = {name: grpc.ask(counting_model, text_input=prompt, max_tokens=30) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        grpc.send(counting_model, name, text_input=prompt, max_tokens=30, stream=True)
    texts, left = dict.fromkeys(prompts, b""), len(prompts)
    while left:
        name, outputs, last = grpc.next()
        texts[name] += outputs["text_output"]
        left -= last
    assert [[{"text_output": text}] for text in texts.values()] == list(alone.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": ""}, "the prompt has no tokens; write something to continue"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"top_p": float("nan")}, "top_p is nan; it must be from 0 to 1"),
        (
            {"text_input": b"t1 \xc3"},
            (
                "text_input is not UTF-8 ('utf-8' codec can't decode byte 0xc3 in position 3: unexpected end of data); "
                "encode it so"
            ),
        ),
        (
            {"max_tokens": [1, 2]},
            (
                "[request id: only] unexpected shape for input 'max_tokens' for model 'counting'. Expected [-1,1], got "
                "[1,2]. NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
                "prepended to each input shape. If you want to specify the full shape including the batch dim in your "
                "input dims config, try setting max_batch_size to zero. See the model configuration docs for more info "
                "on max_batch_size."
            ),
        ),
        ({"stop_words": ["x"] * 17}, "stop_words holds 17 texts; send at most 16"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(
    grpc: Grpc, counting_model: str, fields: dict[str, Any], message: str
) -> None:
    (told,) = grpc.ask(counting_model, **{"text_input": "t1"} | fields)
    assert told["error"] == message
    assert grpc.ask(counting_model, text_input="t3 t1 t4", max_tokens=1) == [{"text_output": b" t1"}]


def test_a_stream_that_is_cancelled_frees_its_row_and_the_others_go_on(
    triton: Server, grpc: Grpc, http: Http, endless_model: str
) -> None:
    """Both rows are taken for minutes, so a third request is answered only where one of them is free again."""
    forever = {"text_input": "t0", "max_tokens": 999_999, "stream": True}
    grpc.send(endless_model, "stays", **forever)
    with Grpc(triton.grpc) as leaves:
        leaves.send(endless_model, "leaves", **forever)
        assert leaves.next() == ("leaves", {"text_output": b" t0"}, False)
    assert http.text(endless_model, text_input="t3 t1 t4", max_tokens=3) == " t1 t2 t6"
    assert [grpc.next() for _ in range(50)] == [("stays", {"text_output": b" t0"}, False)] * 50
