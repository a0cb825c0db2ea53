"""Which rows of a batch the vLLM plugin gives second terms; the rest of it runs in tests/elsewhere."""

import torch
from fp8q_vllm.rows import PROMPTS, SHARE, Rows, tail_rows
from hypothesis import given
from hypothesis import strategies as st

#: The lengths of a batch's sequences, rows that fill it up, and the tail.
BATCHES = st.tuples(st.lists(st.integers(1, 80), min_size=1, max_size=12), st.integers(0, 9), st.integers(1, 8))


def rows_of(lengths: list[int], padding: int, tail: int) -> Rows:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return tail_rows(starts, sum(lengths) + padding, tail)


def tails_of(lengths: list[int], tail: int) -> list[set[int]]:
    """The rows of each sequence's tail, in order."""
    found, end = [], 0
    for length in lengths:
        end += length
        found.append(set(range(end - min(length, tail), end)))
    return found


def test_decoded_tokens_and_the_last_rows_of_each_prompt_have_second_terms() -> None:
    rows = rows_of([1, 5, 1, 3], padding=2, tail=2)
    assert sorted(rows.numbers[rows.exact].tolist()) == [0, 4, 5, 6, 8, 9]


@given(BATCHES)
def test_tails_are_whole_where_there_is_room_for_them(batch: tuple[list[int], int, int]) -> None:
    lengths, padding, tail = batch
    rows, tails = rows_of(lengths, padding, tail), set[int]().union(*tails_of(lengths, tail))
    exact = rows.numbers[rows.exact].tolist()
    assert len(exact) == len(set(exact))
    count = sum(lengths) + padding
    assert len(set(rows.numbers.tolist())) == len(rows.numbers)
    assert len(rows.numbers) == min(count, len(lengths) + max(PROMPTS * tail, count // SHARE))
    assert set(exact) <= tails
    assert len(exact) == min(len(tails), len(rows.numbers))


@given(BATCHES)
def test_every_sequence_has_its_last_row_and_tails_are_cut_by_the_same_number(
    batch: tuple[list[int], int, int],
) -> None:
    lengths, padding, tail = batch
    rows = rows_of(lengths, padding, tail)
    exact = set(rows.numbers[rows.exact].tolist())
    kept = [sorted(each & exact) for each in tails_of(lengths, tail)]
    for tail_rows_of_one, whole in zip(kept, tails_of(lengths, tail), strict=True):
        assert tail_rows_of_one == sorted(whole)[-len(tail_rows_of_one) :]
        assert tail_rows_of_one
    shortened = [len(each) for each, whole in zip(kept, tails_of(lengths, tail), strict=True) if len(each) < len(whole)]
    assert max(shortened, default=0) - min(shortened, default=0) <= 1


@given(BATCHES)
def test_shapes_depend_on_the_numbers_of_rows_and_sequences_alone(batch: tuple[list[int], int, int]) -> None:
    """As CUDA graphs and a host that does not wait for the GPU ask."""
    lengths, padding, tail = batch
    others = [1] * (len(lengths) - 1) + [sum(lengths) - len(lengths) + 1]
    assert rows_of(lengths, padding, tail).numbers.shape == rows_of(others, padding, tail).numbers.shape
