from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.serve import generate
from fp8q.serve.generate import Completion, Generator, Piece, Request, RequestError, complete
from fp8q.serve.sessions import OnnxRuntimeSession, Session
from fp8q.serve.text import Vocabulary

if TYPE_CHECKING:
    from tests.serve.conftest import CountingModel

PROMPTS = ["t1", "t3 t1 t4 t1 t5 t9", "t2 t7", "t14 t13 t12 t11 t10 t9 t8 t7 t6"]


@dataclass
class Recorder:
    """A session that remembers the shapes it was run with: rows, seq, capacity."""

    session: OnnxRuntimeSession
    shapes: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = self.session.layout
        self.new_cache = self.session.new_cache

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Any = None) -> Any:
        self.shapes.append((*input_ids.shape, 0 if past is None else past[0].shape[2]))
        return self.session.forward(input_ids, attention_mask, position_ids, past)


def recorded(counting: CountingModel, max_batch: int = 8) -> tuple[Generator, list[tuple[int, int, int]]]:
    session = Recorder(counting.session())
    checked: Session = session
    return Generator(checked, Vocabulary.read(counting.directory), max_batch), session.shapes


def expected(counting: CountingModel, prompt: str, max_tokens: int) -> Completion:
    tokens = counting.answer(prompt, max_tokens)
    return Completion(
        counting.text(tokens), tuple(tokens), "stop" if tokens[-1] == 15 else "length", len(prompt.split())
    )


def test_the_counting_model_counts(counting: CountingModel) -> None:
    # 3·1 + 1·2 + 4·3 = 17 -> 1; + 1·1 = 18 -> 2; + 2·2 = 22 -> 6
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=3)]) == [
        Completion(" t1 t2 t6", (1, 2, 6), "length", 3)
    ]
    assert counting.answer("t3 t1 t4", 3) == [1, 2, 6]


@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_prompts_of_different_lengths_are_answered_as_if_alone(counting: CountingModel, max_batch: int) -> None:
    answers = complete(counting.generator(max_batch), [Request(prompt, max_tokens=20) for prompt in PROMPTS])
    assert answers == [expected(counting, prompt, 20) for prompt in PROMPTS]


token = st.integers(0, 14).map("t{}".format)
prompt = st.lists(token, min_size=1, max_size=12).map(" ".join)


@settings(max_examples=60)
@given(st.lists(st.tuples(prompt, st.integers(1, 30)), min_size=1, max_size=7), st.integers(1, 3))
def test_whoever_comes_and_goes_every_answer_is_right(
    counting: CountingModel, asked: list[tuple[str, int]], max_batch: int
) -> None:
    answers = complete(counting.generator(max_batch), [Request(prompt, max_tokens) for prompt, max_tokens in asked])
    assert answers == [expected(counting, prompt, max_tokens) for prompt, max_tokens in asked]


def test_long_prompts_are_prefilled_in_pieces(counting: CountingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PREFILL_POSITIONS", 8)
    generator, shapes = recorded(counting)
    prompts = [PROMPTS[1], PROMPTS[3]]  # 6 and 9 tokens: pieces of 8 / 2 = 4 positions
    answers = complete(generator, [Request(prompt, max_tokens=2) for prompt in prompts])
    assert answers == [expected(counting, prompt, 2) for prompt in prompts]
    assert shapes == [(2, 4, 0), (2, 4, 64), (2, 1, 64), (2, 1, 64)]


def test_a_prompt_in_pieces_joins_those_in_flight(counting: CountingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PREFILL_POSITIONS", 4)
    generator, shapes = recorded(counting, max_batch=2)
    asked = [Request(PROMPTS[0], max_tokens=2), Request(PROMPTS[2], max_tokens=9), Request(PROMPTS[3], max_tokens=9)]
    assert complete(generator, asked) == [expected(counting, request.prompt, request.max_tokens) for request in asked]
    assert shapes[:5] == [(2, 2, 0), (2, 1, 64), (1, 4, 0), (1, 4, 64), (1, 1, 64)]


def test_requests_that_end_together_leave_together(counting: CountingModel) -> None:
    asked = [Request("t3 t1 t4", max_tokens=n) for n in (2, 5, 2, 4, 2)]
    assert complete(counting.generator(), asked) == [
        expected(counting, "t3 t1 t4", request.max_tokens) for request in asked
    ]


def test_the_cache_grows_by_doubling_and_to_what_can_be_filled(counting: CountingModel) -> None:
    generator, shapes = recorded(counting)
    asked = Request(" ".join(["t0"] * 60), max_tokens=130)  # the sum stays 0, so t0 goes on for ever
    assert complete(generator, [asked]) == [Completion(" t0" * 130, (0,) * 130, "length", 60)]
    assert shapes[0] == (1, 60, 0)
    capacities = [capacity for _, _, capacity in shapes[1:]]
    # slots 60 to 63, then up to 127, then 60 + 130 in steps of 64, but no more than the model's 200 positions
    assert capacities == [64] * 4 + [128] * 64 + [192] * 61


def test_the_capacity_never_exceeds_the_models_positions(counting: CountingModel) -> None:
    generator, shapes = recorded(counting)
    complete(generator, [Request(" ".join(["t0"] * 195), max_tokens=100)])
    assert shapes[1:] == [(1, 1, 200)] * 4


def test_a_freed_row_is_taken_at_once(counting: CountingModel) -> None:
    generator, shapes = recorded(counting, max_batch=2)
    lengths = {"t0": 5, "t0 t0": 2, "t0 t0 t0": 3}
    assert [
        len(answer.tokens) for answer in complete(generator, [Request(prompt, n) for prompt, n in lengths.items()])
    ] == [5, 2, 3]
    # both prefilled, one token each; the second ends, the third is prefilled in its place; two more tokens together;
    # the first ends alone
    assert shapes == [(2, 2, 0), (2, 1, 64), (1, 3, 0), (2, 1, 64), (2, 1, 64), (1, 1, 64)]


def test_a_request_joins_those_in_flight(counting: CountingModel) -> None:
    generator = counting.generator()
    first = generator.submit(Request(PROMPTS[1], max_tokens=12))
    pieces = [*generator.step(), *generator.step()]
    second = generator.submit(Request(PROMPTS[3], max_tokens=12))
    while generator.busy:
        pieces += generator.step()
    for ticket, prompt in ((first, PROMPTS[1]), (second, PROMPTS[3])):
        assert "".join(piece.text for piece in pieces if piece.ticket == ticket) == expected(counting, prompt, 12).text
    assert generator.step() == []


def test_every_token_is_a_piece(counting: CountingModel) -> None:
    pieces = list(counting.generator().run([Request("t3 t1 t4", max_tokens=2), Request("t0", max_tokens=1)]))
    assert pieces == [
        Piece(1, 1, " t1", None, 3, 1),
        Piece(2, 0, " t0", "length", 1, 1),
        Piece(1, 2, " t2", "length", 3, 2),
    ]


def test_the_end_of_text_stops_and_leaves_no_text(counting: CountingModel) -> None:
    # 5·1 + 5·2 = 15, which ends the text
    assert complete(counting.generator(), [Request("t5 t5", max_tokens=9)]) == [Completion("", (15,), "stop", 2)]


def test_a_token_that_ends_the_text_is_no_text_though_the_tokenizer_does_not_call_it_special(
    counting: CountingModel,
) -> None:
    vocabulary = dataclasses.replace(Vocabulary.read(counting.directory), end=frozenset({6, 7}))
    generator = Generator(counting.session(), vocabulary)
    assert complete(generator, [Request("t3 t1 t4", max_tokens=9)]) == [Completion(" t1 t2", (1, 2, 6), "stop", 3)]


def test_a_stop_word_stops_and_is_not_part_of_the_text(counting: CountingModel) -> None:
    # t1 t2 t6 …: the text up to the stop word, and the tokens up to the one that completed it
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=9, stop_words=("t9", " t6"))]) == [
        Completion(" t1 t2", (1, 2, 6), "stop", 3)
    ]


def test_the_beginning_of_a_stop_word_is_delivered_at_the_end(counting: CountingModel) -> None:
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=3, stop_words=("t6 t",))]) == [
        Completion(" t1 t2 t6", (1, 2, 6), "length", 3)
    ]


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(199, 1), (190, 10)])
def test_the_last_position_ends_the_text_with_length(
    counting: CountingModel, prompt_tokens: int, output_tokens: int
) -> None:
    (answer,) = complete(counting.generator(), [Request(" ".join(["t0"] * prompt_tokens), max_tokens=50)])
    assert (answer.finish_reason, len(answer.tokens)) == ("length", output_tokens)


def test_a_prompt_that_leaves_no_position_is_refused(counting: CountingModel) -> None:
    with pytest.raises(RequestError) as raised:
        counting.generator().submit(Request(" ".join(["t0"] * 200)))
    assert str(raised.value) == (
        "the prompt has 200 tokens and the model 200 positions for prompt and answer; shorten it to 199 tokens or fewer"
    )


def test_a_prompt_without_tokens_is_refused(counting: CountingModel) -> None:
    with pytest.raises(RequestError) as raised:
        counting.generator().submit(Request(" "))
    assert str(raised.value) == "the prompt has no tokens; write something to continue"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be 0 or more, and finite"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 or more, and finite"),
        ({"temperature": float("inf")}, "temperature is inf; it must be 0 or more, and finite"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be from 0 to 1"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5; it must be from -2 to 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan; it must be from -2 to 2"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be from 0 to 2^64 - 1"),
        ({"stop_words": ("a", "")}, "stop_words is ['a', '']; it must be without an empty one"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        Request("t1", **values)
    assert str(raised.value) == message


def test_a_seed_draws_the_same_text_whatever_shares_the_batch(counting: CountingModel) -> None:
    asked = Request("t3 t1 t4", max_tokens=20, temperature=30.0, seed=11)
    (alone,) = complete(counting.generator(), [asked])
    others = [Request(prompt, max_tokens=7, temperature=30.0, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    assert complete(counting.generator(3), [*others, asked])[-1] == alone
    assert alone.text != expected(counting, asked.prompt, 20).text
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=20, temperature=30.0, seed=12)]) != [alone]


def test_penalties_count_what_was_produced_and_not_the_prompt(counting: CountingModel) -> None:
    # logit[v] = -(v - sum)², less 2 for what was produced. Sum 0: t0 (0); then t1 (-1) before t0 (0 - 2). Position 3
    # weighs t1 once, so
    # sum 1: t2 (-1) before t1 (0 - 2) and t0 (-1 - 2).
    (answer,) = complete(counting.generator(), [Request("t0 t0", max_tokens=3, presence_penalty=2.0)])
    assert answer.text == " t0 t1 t2"


def test_a_cancelled_request_leaves_and_the_others_go_on(counting: CountingModel) -> None:
    generator = counting.generator(2)
    tickets = [generator.submit(Request(prompt, max_tokens=10)) for prompt in PROMPTS]
    pieces = generator.step()
    generator.cancel(tickets[0])
    generator.cancel(tickets[3])
    generator.cancel(99)
    while generator.busy:
        pieces += generator.step()
    texts = {ticket: "".join(piece.text for piece in pieces if piece.ticket == ticket) for ticket in tickets}
    assert texts[tickets[1]] == expected(counting, PROMPTS[1], 10).text
    assert texts[tickets[2]] == expected(counting, PROMPTS[2], 10).text
    assert texts[tickets[3]] == ""
    assert sum(piece.ticket == tickets[0] for piece in pieces) == 1


def test_after_a_reset_nothing_is_left(counting: CountingModel) -> None:
    generator = counting.generator(1)
    for prompt in PROMPTS[:2]:
        generator.submit(Request(prompt))
    generator.step()
    generator.reset()
    assert not generator.busy
    assert complete(generator, [Request(PROMPTS[1], max_tokens=4)]) == [expected(counting, PROMPTS[1], 4)]


def test_a_mask_shows_the_filled_slots_and_the_new_tokens_that_are_real() -> None:
    mask = generate.attention_mask(np.array([2, 0]), 3, np.array([[True, True], [True, False]]))
    np.testing.assert_array_equal(mask, [[1, 1, 0, 1, 1], [0, 0, 0, 1, 0]])
    assert mask.dtype == np.int64
