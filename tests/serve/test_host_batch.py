from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fp8q.serve.host_batch import HostBatch, attention_mask

if TYPE_CHECKING:
    from tests.serve.conftest import CountingModel


def opened(counting: CountingModel, rows: int = 4) -> HostBatch:
    batch = counting.session().open_batch(rows, counting.positions)
    batch.reserve(1, counting.positions, 0)
    return batch


def prefill(batch: HostBatch, first: int, *prompts: list[int], filled: int = 0) -> list[int]:
    """Take in chunks; the best next token of each row."""
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    found: list[int] = batch.prefill(first, tokens, np.full(len(prompts), filled), lengths).argmax(-1).tolist()
    return found


def decode(batch: HostBatch, tokens: list[int], filled: list[int]) -> list[int]:
    found: list[int] = batch.decode(np.array(tokens), np.array(filled)).argmax(-1).tolist()
    return found


def test_a_mask_shows_the_filled_slots_and_the_new_tokens_that_are_real() -> None:
    mask = attention_mask(np.array([2, 0]), 3, np.array([[True, True], [True, False]]))
    np.testing.assert_array_equal(mask, [[1, 1, 0, 1, 1], [0, 0, 0, 1, 0]])
    assert mask.dtype == np.int64


def test_chunks_and_tokens_of_rows_at_other_positions_add_up(counting: CountingModel) -> None:
    batch = opened(counting)
    # 3·1 + 1·2 + 4·3 = 17 -> 1; 9·1 + 2·2 = 13
    assert prefill(batch, 0, [3, 1, 4], [9, 2]) == [1, 13]
    # + 1·1 + 5·2 = 28 -> 12 with another chunk, while the row beside it is left alone
    assert prefill(batch, 0, [1, 5], filled=3) == [12]
    # + 7·3 = 49 -> 1; 13 + 6·3 = 31 -> 15
    assert decode(batch, [7, 6], [5, 2]) == [1, 15]


def test_what_a_row_writes_while_its_prompt_is_taken_in_is_written_over(counting: CountingModel) -> None:
    batch = opened(counting)
    prefill(batch, 0, [3], [9, 2])
    assert decode(batch, [11, 6], [1, 2])[1] == 15
    assert prefill(batch, 0, [1, 4], filled=1) == [1]


def test_a_row_that_moves_is_masked_as_what_it_is(counting: CountingModel) -> None:
    batch = opened(counting)
    prefill(batch, 0, [1] * 6, [3, 1, 4])
    decode(batch, [0, 0], [6, 3])
    batch.move(1, 0, 3)
    assert decode(batch, [1], [3]) == [2]  # 17 + 1·1 = 18
    batch.clear()
    batch.reserve(64, 200, 0)
    assert prefill(batch, 0, [5, 5]) == [15]
    assert decode(batch, [1], [2]) == [2]  # 15 + 1·3 = 18


def test_growing_and_giving_up_slots_loses_nothing(counting: CountingModel) -> None:
    batch = opened(counting)
    prefill(batch, 0, [3, 1, 4])
    for needed, most, capacity in ((64, 200, 64), (65, 200, 128), (129, 150, 192), (4, 48, 192), (4, 47, 192)):
        batch.reserve(needed, most, 1)
        assert batch.capacity == capacity
    assert decode(batch, [1], [3]) == [2]
    batch.reserve(200, 200, 1)
    assert batch.capacity == 200


def test_a_wiped_row_hides_nothing_that_is_no_number(counting: CountingModel) -> None:
    batch = opened(counting)
    prefill(batch, 0, [3, 1, 4])
    for buffer in batch._held().past(0, 1):
        buffer[:, :, 3:] = 0x7F if buffer.dtype == np.uint8 else np.nan
    assert not np.isfinite(batch.decode(np.array([1]), np.array([3]))).all()
    batch.wipe(0)
    assert prefill(batch, 0, [3, 1, 4]) == [1]
    assert decode(batch, [1], [3]) == [2]
