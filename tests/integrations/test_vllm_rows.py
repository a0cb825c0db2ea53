"""Which rows of a batch the vLLM plugin gives second terms; the rest of it runs in tests/elsewhere."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp8q_vllm import rows as rows_module
from fp8q_vllm.rows import PROMPTS, SHARE, Rows, keep_starts, rows_of_batch, tail_rows, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from tests.stand_in.vllm import Plugin

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


def test_a_prompt_alone_has_no_more_rows_with_second_terms_than_its_tail() -> None:
    """As many rows are multiplied twice more as there is room for."""
    rows = rows_of([2048], padding=0, tail=64)
    assert sorted(rows.numbers.tolist()) == [*range(1984, 2048)]
    assert rows.exact.all()


@given(BATCHES)
def test_tails_are_whole_where_there_is_room_for_them(batch: tuple[list[int], int, int]) -> None:
    lengths, padding, tail = batch
    rows, tails = rows_of(lengths, padding, tail), set[int]().union(*tails_of(lengths, tail))
    exact = rows.numbers[rows.exact].tolist()
    assert len(exact) == len(set(exact))
    count = sum(lengths) + padding
    assert len(set(rows.numbers.tolist())) == len(rows.numbers)
    most = len(lengths) + max(PROMPTS * tail, count // SHARE)
    assert len(rows.numbers) == min(count, len(lengths) * tail, most)
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


def metadata(lengths: list[int], **fields: Any) -> dict[str, Any]:
    """A batch's metadata: of a layer that says nothing of it, and of one of attention."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    fields = fields or {"num_actual_tokens": sum(lengths)}
    return {"a": SimpleNamespace(), "b": SimpleNamespace(query_start_loc=starts, **fields)}


def test_a_layer_with_fewer_rows_than_the_batch_has_tokens_has_second_terms_in_all(plugin: Plugin) -> None:
    """As where latent attention expands a batch's prompts, behind its decoded tokens: rows have other numbers there."""
    plugin.forward(metadata([1, 1, 70, 40]))
    for rows in (110, 111, 70, 40):
        assert rows_of_batch(rows, 8, 0) is None
    for rows in (112, 128):  # as many as tokens, and with what fills up
        found = rows_of_batch(rows, 8, 0)
        assert found is not None
        assert sorted(found.numbers[found.exact].tolist()) == [0, 1, *range(64, 72), *range(104, 112)]


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"num_actual_tokens": 112}, 112),
        ({"num_prefill_tokens": 110, "num_decode_tokens": 2}, 112),
        ({"num_prefill_tokens": 110}, None),
        ({"causal": True}, None),
    ],
)
def test_the_tokens_of_a_batch_are_those_that_the_host_knows(
    plugin: Plugin, fields: dict[str, Any], tokens: int | None
) -> None:
    """Without a number of them all rows have second terms."""
    batch = metadata([1, 1, 70, 40], **fields)
    assert tokens_of(batch["b"]) == tokens
    plugin.forward(batch)
    assert (rows_of_batch(112, 8, 0) is None) == (tokens is None)
    assert rows_of_batch(111, 8, 0) is None


def test_microbatches_and_passes_without_attention_have_second_terms_in_all_rows(plugin: Plugin) -> None:
    batches: list[Any] = [None, [metadata([70, 40])], {}]
    for batch in batches:
        plugin.forward(batch)
        assert rows_of_batch(110, 8, 0) is None


class Builder:
    """What vLLM 0.32's builders of attention's metadata derive from, as far as they are alike."""

    def __init__(self, device: str) -> None:
        self.device = device

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        raise NotImplementedError


@dataclass
class WithoutStarts:
    """FlashInfer's metadata, as far as tails go."""

    num_actual_tokens: int


@dataclass
class WithStarts:
    num_actual_tokens: int
    query_start_loc: torch.Tensor | None


def test_metadata_of_a_backend_that_drops_where_sequences_begin_keep_it(plugin: Plugin) -> None:
    class Base(Builder):
        pass

    class FlashInfer(Base):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> WithoutStarts:
            return WithoutStarts(common_attn_metadata.num_actual_tokens)

    class Hybrid(Base):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> WithStarts:
            return WithStarts(common_attn_metadata.num_actual_tokens, None)

    class Frozen(Base):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return (9,)

    keep_starts(Base)
    common = SimpleNamespace(num_actual_tokens=9, query_start_loc=torch.tensor([0, 4, 9], dtype=torch.int32))
    for _ in range(2):  # builders are made for each group of layers
        found = FlashInfer("cpu").build(0, common_attn_metadata=common)
    plugin.forward({"a": found})
    rows = rows_of_batch(9, 2, 4)
    assert rows is not None
    assert sorted(rows.numbers[rows.exact].tolist()) == [2, 3, 7, 8]
    assert Frozen("cpu").build(0, common) == (9,), "what takes no field is served as it is"
    assert Hybrid("cpu").build(0, common, fast_build=True).query_start_loc is None, (
        "a field of its own means what it did"
    )


def test_a_batch_that_says_nothing_of_sequences_is_warned_of_once(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rows_module, "WARNED", [])
    for _ in range(2):
        plugin.forward({"a": WithoutStarts(9)})
        assert rows_of_batch(9, 2, 4) is None
    (message,) = caplog.messages
    assert message == (
        "attention says nothing of where sequences begin (WithoutStarts), so all rows are exact, not the tails of "
        "prompts alone: prompts take the time of 16 bits"
    )
