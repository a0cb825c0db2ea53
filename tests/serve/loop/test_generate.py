from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.serve.loop.generate import GenerationError, Generator, complete, completion
from fp8q.serve.loop.host_batch import HostBatch
from fp8q.serve.loop.request import BusyError, GeneratedAnswer, Piece, Request
from fp8q.serve.loop.sessions import OnnxRuntimeSession, Pace
from fp8q.serve.loop.text import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.counting_model import CountingModel

PROMPTS = ["t1", "t3 t1 t4 t1 t5 t9", "t2 t7", "t14 t13 t12 t11 t10 t9 t8 t7 t6"]


class Recorder(HostBatch):
    """A batch that remembers its calls: first row, rows, positions in each, capacity."""

    def __init__(self, session: OnnxRuntimeSession, rows: int, positions: int):
        super().__init__(session, rows, positions)
        self.calls: list[tuple[int, int, int, int]] = []

    def prefill(self, first: int, tokens: Any, filled: Any, lengths: Any) -> Any:
        self.calls.append((first, *tokens.shape, self.capacity))
        return super().prefill(first, tokens, filled, lengths)

    def decode(self, tokens: Any, filled: Any) -> Any:
        self.calls.append((0, len(tokens), 1, self.capacity))
        return super().decode(tokens, filled)


def recorded(
    counting: CountingModel, max_batch: int = 8, pace: Pace = Pace(8, 8), **more: Any
) -> tuple[Generator, list[tuple[int, int, int, int]]]:
    session = counting.session()
    batches: list[Recorder] = []

    def open_batch(rows: int, positions: int) -> Recorder:
        batches.append(Recorder(session, rows, positions))
        return batches[-1]

    session.open_batch = open_batch  # type: ignore[method-assign]
    generator = Generator(session, Vocabulary.read(counting.directory), max_batch, pace=pace, **more)
    return generator, batches[0].calls


def expected(counting: CountingModel, prompt: str, max_tokens: int) -> GeneratedAnswer:
    tokens = counting.answer(prompt, max_tokens)
    return GeneratedAnswer(
        counting.text(tokens), tuple(tokens), "stop" if tokens[-1] == 15 else "length", len(prompt.split())
    )


def test_the_counting_model_counts(counting: CountingModel) -> None:
    # 3·1 + 1·2 + 4·3 = 17 -> 1; + 1·1 = 18 -> 2; + 2·2 = 22 -> 6
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=3)]) == [
        GeneratedAnswer(" t1 t2 t6", (1, 2, 6), "length", 3)
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


def test_prompts_go_in_by_chunks_of_as_many_rows_as_fit(counting: CountingModel) -> None:
    generator, calls = recorded(counting)
    prompts = [PROMPTS[1], PROMPTS[3], "t1 t2", "t3 t4"]  # 6, 9, 2 and 2 tokens
    answers = complete(generator, [Request(prompt, max_tokens=2) for prompt in prompts])
    assert answers == [expected(counting, prompt, 2) for prompt in prompts]
    assert (
        calls
        == [
            (0, 1, 6, 64),  # the first alone: with its neighbour's eight there would be sixteen
            (0, 1, 1, 64),  # it ends, and the last row takes its place
            (1, 1, 8, 64),
            (0, 2, 2, 64),
            (0, 2, 1, 64),
            (0, 1, 1, 64),
        ]
        or calls
    )


def test_a_prompt_in_chunks_joins_those_in_flight(counting: CountingModel) -> None:
    generator, calls = recorded(counting, max_batch=2, pace=Pace(4, 4))
    asked = [Request(PROMPTS[0], max_tokens=2), Request(PROMPTS[2], max_tokens=9), Request(PROMPTS[3], max_tokens=9)]
    assert complete(generator, asked) == [
        expected(counting, str(request.prompt), request.max_tokens) for request in asked
    ]
    # 1 and 2 tokens together; both answered, and the first ends; the 9 tokens by fours beside the other
    assert calls[:8] == [
        (0, 2, 2, 64), (0, 2, 1, 64), (0, 1, 1, 64), (1, 1, 4, 64), (0, 1, 1, 64), (1, 1, 4, 64), (0, 1, 1, 64),
        (1, 1, 1, 64),
    ]  # fmt: skip


def test_a_steady_queue_of_one_token_requests_starves_nobody(counting: CountingModel) -> None:
    generator, _ = recorded(counting, max_batch=4)
    running = generator.submit(Request("t0", max_tokens=60))
    generator.step()
    tokens = 0
    for _ in range(50):
        while generator.load[1] < 8:
            generator.submit(Request("t0 t0 t0", max_tokens=1))
        pieces = generator.step()
        tokens += sum(piece.ticket == running for piece in pieces)
        assert len(pieces) > 1, "those who wait are served too"
    assert tokens == 50


def test_between_two_tokens_go_no_more_positions_of_prompts_than_their_share(counting: CountingModel) -> None:
    generator, calls = recorded(counting, pace=Pace(chunk=8, share=2))
    generator.submit(Request("t0", max_tokens=100))
    generator.step()
    for _ in range(4):
        generator.submit(Request(" ".join(["t0"] * 100), max_tokens=1))
    del calls[:]
    for _ in range(40):
        generator.step()
    decoded = [index for index, call in enumerate(calls) if call[2] == 1]
    assert len(decoded) == 40
    assert sum(rows * seq for _, rows, seq, _ in calls if seq > 1) == 80  # two a token
    assert {after - before for before, after in pairwise(decoded)} == {1, 2}, "a chunk at a time"


def test_more_of_a_prompt_goes_in_beside_more_answers_and_after_a_time_without_any(counting: CountingModel) -> None:
    generator, calls = recorded(counting, pace=Pace(chunk=8, share=2, saved=24))
    for _ in range(3):
        generator.submit(Request("t0", max_tokens=100))
    generator.step()
    generator.submit(Request(" ".join(["t0"] * 100), max_tokens=1))
    del calls[:]
    for _ in range(10):
        generator.step()
    # 24 and 2 + 2 each step: a chunk in each of the first five, then in every second one
    assert [call[2] for call in calls] == [1, 8] * 5 + [1, 1, 8] * 2 + [1]


def test_a_long_prompt_holds_nobody(counting: CountingModel) -> None:
    """Those who come after it are answered while it is taken in, which goes on all the while."""
    generator, _ = recorded(counting, max_batch=3)
    long = generator.submit(Request(" ".join(["t0"] * 190), max_tokens=1))  # 24 chunks
    generator.step()
    ended: dict[int, int] = {}
    for step in range(1, 50):
        while generator.load[1] < 2:
            generator.submit(Request("t3 t1 t4", max_tokens=1))
        ended |= {piece.ticket: step for piece in generator.step() if piece.finish_reason}
    assert sum(ticket > long for ticket in ended) >= 20
    assert ended[long] == 46  # every second step is its turn


def test_as_many_as_may_wait_and_then_it_is_busy(counting: CountingModel) -> None:
    generator, _ = recorded(counting, max_batch=1, max_waiting=2)
    for _ in range(2):
        generator.submit(Request("t0", max_tokens=1))
    with pytest.raises(BusyError) as raised:
        generator.submit(Request("t0"))
    assert str(raised.value) == "2 requests are waiting already; try again later"
    generator.step()
    assert generator.load == (0, 1)
    generator.submit(Request("t0"))


def test_clients_share_the_rows_and_one_alone_has_them_all(counting: CountingModel) -> None:
    generator = counting.generator(2)
    many = [generator.submit(Request("t0", max_tokens=3), "many") for _ in range(6)]
    assert {piece.ticket for piece in generator.step()} == {many[0], many[1]}
    few = [generator.submit(Request("t0", max_tokens=3), "few") for _ in range(2)]
    ends = [piece.ticket for piece in iter_pieces(generator) if piece.finish_reason]
    assert ends == [many[0], many[1], many[2], few[0], many[3], few[1], many[4], many[5]]


def iter_pieces(generator: Generator) -> Iterator[Piece]:
    while generator.busy:
        yield from generator.step()


def test_requests_that_end_together_leave_together(counting: CountingModel) -> None:
    asked = [Request("t3 t1 t4", max_tokens=n) for n in (2, 5, 2, 4, 2)]
    assert complete(counting.generator(), asked) == [
        expected(counting, "t3 t1 t4", request.max_tokens) for request in asked
    ]


def test_the_cache_grows_by_doubling_and_to_what_can_be_filled(counting: CountingModel) -> None:
    generator, calls = recorded(counting)
    asked = Request(" ".join(["t0"] * 60), max_tokens=130)  # the sum stays 0, so t0 goes on for ever
    assert complete(generator, [asked]) == [GeneratedAnswer(" t0" * 130, (0,) * 130, "length", 60)]
    assert [call[2:] for call in calls[:8]] == [(8, 64)] * 7 + [(4, 64)]
    # slots 60 to 63, then up to 127, then 60 + 130 in steps of 64, but no more than the model's 200 positions
    assert [capacity for *_, capacity in calls[8:]] == [64] * 4 + [128] * 64 + [192] * 61


def test_the_capacity_never_exceeds_the_models_positions(counting: CountingModel) -> None:
    generator, calls = recorded(counting)
    complete(generator, [Request(" ".join(["t0"] * 195), max_tokens=100)])
    assert calls[-4:] == [(0, 1, 1, 200)] * 4


def test_a_session_with_bounds_of_its_own_is_held_to_them(counting: CountingModel) -> None:
    session = counting.session()
    session.most_rows, session.most_positions = 2, 20
    generator = Generator(session, Vocabulary.read(counting.directory), 8)
    assert (generator.max_batch, generator.positions) == (2, 20)
    (answer,) = complete(generator, [Request(" ".join(["t0"] * 15), max_tokens=100)])
    assert (len(answer.tokens), answer.finish_reason) == (5, "length")


def test_a_freed_row_is_taken_at_once(counting: CountingModel) -> None:
    generator, calls = recorded(counting, max_batch=2)
    lengths = {"t0": 5, "t0 t0": 2, "t0 t0 t0": 3}
    assert [
        len(answer.tokens) for answer in complete(generator, [Request(prompt, n) for prompt, n in lengths.items()])
    ] == [5, 2, 3]
    # both prefilled, one token each; the second ends, and the third's prompt follows the first's token; two more tokens
    # together; the first has ended
    assert [call[:3] for call in calls] == [(0, 2, 2), (0, 2, 1), (0, 1, 1), (1, 1, 3), (0, 2, 1), (0, 2, 1)]


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
        Piece(1, 1, " t1", None, 3, 1, added=" t1"),
        Piece(2, 0, " t0", "length", 1, 1, added=" t0"),
        Piece(1, 2, " t2", "length", 3, 2, added=" t2"),
    ]


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(199, 1), (190, 10)])
def test_the_last_position_ends_the_text_with_length(
    counting: CountingModel, prompt_tokens: int, output_tokens: int
) -> None:
    (answer,) = complete(counting.generator(), [Request(" ".join(["t0"] * prompt_tokens), max_tokens=50)])
    assert (answer.finish_reason, len(answer.tokens)) == ("length", output_tokens)


def test_a_seed_draws_the_same_text_whatever_shares_the_batch(counting: CountingModel) -> None:
    asked = Request("t3 t1 t4", max_tokens=20, temperature=30.0, seed=11)
    (alone,) = complete(counting.generator(), [asked])
    others = [Request(prompt, max_tokens=7, temperature=30.0, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    assert complete(counting.generator(3), [*others, asked])[-1] == alone
    assert alone.text != expected(counting, str(asked.prompt), 20).text
    assert complete(counting.generator(), [Request("t3 t1 t4", max_tokens=20, temperature=30.0, seed=12)]) != [alone]


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


def test_one_whose_logits_are_no_numbers_breaks_off_alone(counting: CountingModel) -> None:
    generator, _ = recorded(counting)
    batch = generator._batch
    decode = batch.decode

    def broken(tokens: Any, filled: Any) -> Any:
        logits = decode(tokens, filled)
        (values,) = logits.rows([0])
        values[:] = float("nan")  # a view: they are in host memory
        return logits

    with pytest.MonkeyPatch.context() as patched:
        tickets = [generator.submit(Request(prompt, max_tokens=4)) for prompt in ("t1", "t3 t1 t4")]
        pieces = generator.step()
        patched.setattr(batch, "decode", broken)
        pieces += generator.step()
    while generator.busy:
        pieces += generator.step()
    last = [piece for piece in pieces if piece.ticket == tickets[0]][-1]
    assert (last.finish_reason, last.output_tokens, last.text) == ("error", 1, "")
    assert last.error == (
        "FloatingPointError: the model's logit of token 0 is nan; `fp8q inspect` shows its scales, `fp8q validate` "
        "where it goes wrong"
    )
    text = "".join(piece.text for piece in pieces if piece.ticket == tickets[1])
    assert text == expected(counting, "t3 t1 t4", 4).text
    with pytest.raises(GenerationError, match="^generation failed: FloatingPointError: the model's logit"):
        completion([last])


def test_an_interrupt_is_of_whoever_steps_and_of_no_request(counting: CountingModel) -> None:
    def interrupted(stream: Any, token: int) -> str:
        raise KeyboardInterrupt

    generator, _ = recorded(counting)
    generator.submit(Request("t1", max_tokens=4))
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("fp8q.serve.loop.text.TextStream.push", interrupted)
        while generator.busy:
            generator.step()


def test_those_in_flight_can_be_dropped_and_the_others_go_on(counting: CountingModel) -> None:
    generator = counting.generator(1)
    tickets = [generator.submit(Request(PROMPTS[1], max_tokens=4)) for _ in range(2)]
    generator.step()
    assert generator.drop() == tickets[:1]
    pieces = []
    while generator.busy:
        pieces += generator.step()
    assert "".join(piece.text for piece in pieces) == expected(counting, PROMPTS[1], 4).text
    assert {piece.ticket for piece in pieces} == {tickets[1]}


def test_tokens_of_a_prompt_that_are_taken_in_one_by_one_draw_no_random_number(counting: CountingModel) -> None:
    """With one seed the answer is the same, whether the log-probabilities of its prompt are asked for or not. At this
    temperature all 16 tokens are about equally likely, so that every number that is drawn tells.
    """
    prompt, generator = "t3 t1 t4 t1 t5 t9", counting.generator(2)
    drawn: list[int] = []

    class Counted(np.random.Generator):
        def random(self, *given: Any, **more: Any) -> Any:
            drawn.append(len(pieces))
            return super().random(*given, **more)

    pieces: list[Piece] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: Counted(np.random.PCG64(seed)))
        asked = Request(prompt, 12, temperature=1000.0, seed=5, ignore_end=True, prompt_logprobs=1)
        for piece in generator.run([asked]):
            pieces += [piece]
    of_prompt = [piece.token for piece in pieces if piece.of_prompt]
    assert of_prompt == [1, 4, 1, 5, 9]
    assert drawn == [*range(5, 17)]  # one for each token behind the prompt, when its turn has come
    alone = [*generator.run([dataclasses.replace(asked, prompt_logprobs=None)])]
    answer = [piece.token for piece in pieces if not piece.of_prompt]
    assert answer == [piece.token for piece in alone]
    assert len(set(answer)) > 4
    other = [piece.token for piece in generator.run([dataclasses.replace(asked, prompt_logprobs=None, seed=6)])]
    assert answer != other
