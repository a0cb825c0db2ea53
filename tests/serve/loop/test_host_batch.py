"""Sequences in flight in host memory, and on a device: one suite, for both are a `Batch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8q.serve.loop.host_batch import attention_mask, chunk_layout
from fp8q.serve.loop.sampling import best_tokens
from fp8q.serve.loop.sessions import Batch

if TYPE_CHECKING:
    from tests.serve.counting_model import CountingModel


Open = Callable[..., Batch]


def reserved(batch: Batch) -> Batch:
    batch.reserve(1, 192, 0)
    return batch


def prefill(batch: Batch, first: int, *prompts: list[int], filled: int = 0) -> list[int]:
    """Take in chunks; the best next token of each row."""
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    found: list[int] = batch.prefill(first, tokens, np.full(len(prompts), filled), lengths).argmax(-1).tolist()
    return found


def decode(batch: Batch, tokens: list[int], filled: list[int]) -> list[int]:
    found: list[int] = best_tokens(batch.decode(np.array(tokens), np.array(filled)), len(tokens)).tolist()
    return found


def test_a_mask_shows_the_filled_slots_and_the_new_tokens_that_are_real() -> None:
    mask = attention_mask(np.array([2, 0]), 3, np.array([[True, True], [True, False]]))
    np.testing.assert_array_equal(mask, [[1, 1, 0, 1, 1], [0, 0, 0, 1, 0]])
    assert mask.dtype == np.int64


def test_rows_of_a_chunk_end_together_and_padding_sees_the_row_s_first_token() -> None:
    positions, real = chunk_layout(4, np.array([0, 8]), np.array([4, 2]))
    np.testing.assert_array_equal(positions, [[0, 1, 2, 3], [8, 8, 8, 9]])
    np.testing.assert_array_equal(real, [[True] * 4, [False, False, True, True]])


def test_chunks_and_tokens_of_rows_at_other_positions_add_up(counting: CountingModel, open_batch: Open) -> None:
    batch = reserved(open_batch(counting))
    # 3·1 + 1·2 + 4·3 = 17 -> 1; 9·1 + 2·2 = 13
    assert prefill(batch, 0, [3, 1, 4], [9, 2]) == [1, 13]
    # + 1·1 + 5·2 = 28 -> 12 with another chunk, while the row beside it is left alone
    assert prefill(batch, 0, [1, 5], filled=3) == [12]
    # + 7·3 = 49 -> 1; 13 + 6·3 = 31 -> 15
    assert decode(batch, [7, 6], [5, 2]) == [1, 15]


def test_what_a_row_writes_while_its_prompt_is_taken_in_is_written_over(
    counting: CountingModel, open_batch: Open
) -> None:
    batch = reserved(open_batch(counting))
    prefill(batch, 0, [3], [9, 2])
    assert decode(batch, [11, 6], [1, 2])[1] == 15
    assert prefill(batch, 0, [1, 4], filled=1) == [1]


def test_a_step_of_the_first_rows_leaves_the_others_as_they_are(counting: CountingModel, open_batch: Open) -> None:
    """On a device three rows run as four: the fourth holds a prompt, and is padding."""
    batch = reserved(open_batch(counting))
    # 3·1 + 1·2 + 4·3 = 17 -> 1, in each row
    assert prefill(batch, 0, *[[3, 1, 4]] * 4) == [1] * 4
    # + 1·1 = 18 -> 2
    assert decode(batch, [1, 1, 1], [3, 3, 3]) == [2] * 3
    # the fourth too, and + 2·2 = 22 -> 6 in the others
    assert decode(batch, [2, 2, 2, 1], [4, 4, 4, 3]) == [6, 6, 6, 2]


def test_a_row_that_moves_is_masked_as_what_it_is(counting: CountingModel, open_batch: Open) -> None:
    batch = reserved(open_batch(counting))
    prefill(batch, 0, [1] * 6, [3, 1, 4])
    decode(batch, [0, 0], [6, 3])
    batch.move(1, 0, 3)
    assert decode(batch, [1], [3]) == [2]  # 17 + 1·1 = 18
    batch.clear()
    batch.reserve(64, 192, 0)
    assert prefill(batch, 0, [5, 5]) == [15]
    assert decode(batch, [1], [2]) == [2]  # 15 + 1·3 = 18


def test_growing_and_giving_up_slots_loses_nothing(counting: CountingModel, open_batch: Open) -> None:
    batch: Any = reserved(open_batch(counting))
    prefill(batch, 0, [3, 1, 4], [9, 2])
    for needed, most, capacity in ((64, 192, 64), (65, 192, 128), (129, 150, 192), (4, 48, 192), (4, 47, 192)):
        batch.reserve(needed, most, 2)
        assert batch.capacity == capacity
    assert decode(batch, [1, 6], [3, 2]) == [2, 15]


def test_the_last_slots_are_those_of_the_model(counting: CountingModel) -> None:
    batch = counting.session().open_batch(4, counting.positions)
    batch.reserve(193, 200, 1)
    assert batch.capacity == 200


def test_a_wiped_row_holds_zeros(counting: CountingModel, open_batch: Open) -> None:
    batch = reserved(open_batch(counting))
    prefill(batch, 0, [3, 1, 4], [9, 2])
    batch.wipe(0)
    assert decode(batch, [1, 6], [0, 2]) == [1, 15]


def test_a_wiped_row_hides_nothing_that_is_no_number(counting: CountingModel) -> None:
    batch = counting.session().open_batch(4, counting.positions)
    batch.reserve(1, 192, 0)
    prefill(batch, 0, [3, 1, 4])
    for buffer in batch._held().past(0, 1):
        buffer[:, :, 3:] = 0x7F if buffer.dtype == np.uint8 else np.nan
    assert not np.isfinite(batch.decode(np.array([1]), np.array([3])).rows([0])).all()
    batch.wipe(0)
    assert prefill(batch, 0, [3, 1, 4]) == [1]
    assert decode(batch, [1], [3]) == [2]
