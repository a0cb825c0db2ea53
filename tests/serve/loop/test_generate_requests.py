"""The fields of one request, on the model that counts: where its text ends, what is refused, and what it draws."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.serve.loop.generate import Generator, complete
from fp8q.serve.loop.request import GeneratedAnswer, Request, RequestError
from fp8q.serve.loop.text import Vocabulary

if TYPE_CHECKING:
    from tests.serve.counting_model import CountingModel


def test_the_end_of_text_stops_and_leaves_no_text(counting: CountingModel) -> None:
    # 5·1 + 5·2 = 15, which ends the text
    assert complete(counting.generator(), [Request("t5 t5", max_tokens=9)]) == [GeneratedAnswer("", (15,), "stop", 2)]


def test_a_token_that_ends_the_text_is_no_text_though_the_tokenizer_does_not_call_it_special(
    counting: CountingModel,
) -> None:
    vocabulary = dataclasses.replace(Vocabulary.read(counting.directory), end=frozenset({6, 7}))
    generator = Generator(counting.session(), vocabulary)
    assert complete(generator, [Request("t3 t1 t4", max_tokens=9)]) == [GeneratedAnswer(" t1 t2", (1, 2, 6), "stop", 3)]


def test_a_stop_word_stops_and_is_not_part_of_the_text(counting: CountingModel) -> None:
    # t1 t2 t6 …: the text up to the stop word, and the tokens up to the one that completed it
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=9, stop_words=("t9", " t6"))]) == [
        GeneratedAnswer(" t1 t2", (1, 2, 6), "stop", 3)
    ]


def test_the_beginning_of_a_stop_word_is_delivered_at_the_end(counting: CountingModel) -> None:
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=3, stop_words=("t6 t",))]) == [
        GeneratedAnswer(" t1 t2 t6", (1, 2, 6), "length", 3)
    ]


def test_a_prompt_that_leaves_no_position_is_refused(counting: CountingModel) -> None:
    with pytest.raises(RequestError) as raised:
        counting.generator().submit(Request(" ".join(["t0"] * 200)))
    assert str(raised.value) == (
        "the prompt has 200 tokens and the model 200 positions for prompt and answer; shorten it to 199 tokens or fewer"
    )


def test_a_prompt_with_half_a_character_is_refused(counting: CountingModel) -> None:
    with pytest.raises(RequestError) as refused:
        counting.generator().submit(Request("t1 \ud800"))
    assert str(refused.value) == "the prompt has half a character (a lone surrogate), which is no text; leave it out"


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


def test_penalties_count_what_was_produced_and_not_the_prompt(counting: CountingModel) -> None:
    # logit[v] = -(v - sum)², less 2 for what was produced. Sum 0: t0 (0); then t1 (-1) before t0 (0 - 2). Position 3
    # weighs t1 once, so
    # sum 1: t2 (-1) before t1 (0 - 2) and t0 (-1 - 2).
    (answer,) = complete(counting.generator(), [Request("t0 t0", max_tokens=3, presence_penalty=2.0)])
    assert answer.text == " t0 t1 t2"


def test_the_stop_words_and_the_prompt_are_bounded_before_anything_is_tokenized(counting: CountingModel) -> None:
    with pytest.raises(RequestError) as raised:
        Request("t1", stop_words=tuple("a" * n for n in range(1, 18)))
    assert str(raised.value) == (
        "stop_words are 17, the longest of 17 characters; there may be at most 16, of at most 256 characters"
    )
    with pytest.raises(RequestError) as raised:
        counting.generator().submit(Request("t0 " * 1067))
    assert str(raised.value) == (
        "the prompt has 3,201 characters, more than 3,200, and the model 200 positions for prompt and answer; shorten "
        "it"
    )


def test_a_prompt_may_be_token_ids_that_the_model_has(counting: CountingModel) -> None:
    assert complete(counting.generator(), [Request((3, 1, 4), max_tokens=3)]) == [
        GeneratedAnswer(" t1 t2 t6", (1, 2, 6), "length", 3)
    ]
    for ids, wrong in (((1, 16), 16), ((-1, 3), -1)):
        with pytest.raises(RequestError) as raised:
            counting.generator().submit(Request(ids))
        assert str(raised.value) == f"the prompt has the token {wrong}, and the model's go from 0 to 15"


def test_the_end_of_text_can_be_ignored(counting: CountingModel) -> None:
    # 15 after t5 t5 ends the text; going on, + 15·3 = 60 -> 12
    (answer,) = complete(counting.generator(), [Request("t5 t5", max_tokens=2, ignore_end=True)])
    assert (answer.tokens, answer.finish_reason) == ((15, 12), "length")


def test_log_probabilities_come_where_they_are_asked_for(counting: CountingModel) -> None:
    plain, asked = (
        next(iter(counting.generator().run([Request("t3 t1 t4", max_tokens=1, logprobs=most)]))) for most in (None, 2)
    )
    assert (plain.logprob, plain.best) == (None, ())
    # logit[v] = -(v - 1)²: the sum of e^logit over the 16 tokens is 1 + 2/e + e^-4 + e^-9 + … = 1.7542
    assert asked.logprob == pytest.approx(-0.5620, abs=1e-4)
    assert [token for token, _ in asked.best] == [1, 0]
    assert asked.best[1][1] == pytest.approx(-1.5620, abs=1e-4)
