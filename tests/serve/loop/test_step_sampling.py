"""Tokens that are chosen from summaries of a step's logits are those that each row's own sampling takes from all of
them; summaries are made by NumPy, as tests/serve/test_kernels.py holds the kernels to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.serve.loop.cache import CacheLayout
from fp8q.serve.loop.device_calls import Room
from fp8q.serve.loop.device_kernels import load_kernels, summarized
from fp8q.serve.loop.device_logits import DeviceLogits, DeviceSummaries, SummaryLayout
from fp8q.serve.loop.generate import Generator, complete
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sampling import BLOCK, RowChoice, Sampling, best_tokens, choose_step
from fp8q.serve.loop.step_logits import HostLogits, Summary
from fp8q.serve.loop.text import Vocabulary
from tests.serve.host_engine import HostDevice
from tests.serve.loop.plain_sampling import choose
from tests.serve.loop.test_batch_sampling import zipf
from tests.serve.loop.test_device_batch import OnDevice, OnDeviceSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.serve.counting_model import CountingModel

SAMPLINGS = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.01, 0.3, 0.8, 1.0, 2.0]),
    st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0]),
)


class Logits:
    """`StepLogits` of which it is recorded what was asked for."""

    def __init__(self, values: NDArray[np.float32], most_blocks: int = 1 << 20) -> None:
        self.values, self.count, self.most_blocks = values, len(values), most_blocks
        self.sent, self.asked, self.gathered = list[int](), 0, list[int]()

    @property
    def summaries(self) -> Logits:
        return self

    def rows(self, rows: Sequence[int]) -> list[NDArray[np.float32]]:
        self.sent += rows
        return [self.values[row] for row in rows]

    def summary(self, temperatures: NDArray[np.float32]) -> Summary:
        self.asked += 1
        with np.errstate(invalid="ignore"):
            return summarized(self.values[: len(temperatures)], np.float32(1.0) / temperatures)

    def blocks(self, pairs: NDArray[np.int32]) -> NDArray[np.float32]:
        assert len(pairs) <= self.most_blocks
        self.gathered.append(len(pairs))
        whole = np.full((len(self.values), -(-self.values.shape[1] // BLOCK) * BLOCK), -np.inf, np.float32)
        whole[:, : self.values.shape[1]] = self.values
        found: NDArray[np.float32] = whole.reshape(len(whole), -1, BLOCK)[pairs[:, 0], pairs[:, 1]]
        return found


def chosen(logits: Logits | HostLogits, samplings: Sequence[Sampling], seed: int) -> list[Any]:
    choices = [
        RowChoice(None, sampling, {}, np.random.default_rng(seed + row)) for row, sampling in enumerate(samplings)
    ]
    return choose_step(choices, range(len(samplings)), logits)


@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.floats(0.1, 6), st.lists(SAMPLINGS, min_size=1, max_size=4))
def test_each_row_gets_the_token_of_its_own_sampling(
    seed: int, vocabulary: int, spread: float, samplings: list[Sampling]
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((len(samplings), vocabulary)) * spread).astype(np.float32)
    if seed % 2:  # as BF16 has them: few values, and many ties
        logits = (logits.view(np.uint32) >> 16 << 16).view(np.float32)
    if seed % 3 == 0 and vocabulary > 1:  # some are forbidden
        logits[:, random.integers(0, vocabulary, vocabulary // 2)] = -np.inf
        logits[:, random.integers(0, vocabulary, vocabulary // 4)] = np.finfo(np.float32).min
        logits[:, random.integers(0, vocabulary)] = 1.0
    found = Logits(logits)
    assert chosen(found, samplings, seed % 1000) == [
        choose(row, sampling, {}, np.random.default_rng(seed % 1000 + number))
        for number, (row, sampling) in enumerate(zip(logits, samplings, strict=True))
    ]
    assert found.asked == any(sampling.temperature != 0.01 for sampling in samplings)  # too cold for their bounds
    assert sum(found.gathered) <= len(samplings) * -(-vocabulary // BLOCK)  # none is sent twice


@pytest.mark.parametrize("exponent", [1.25, 2.0])
def test_tokens_of_texts_take_a_summary_and_few_blocks(exponent: float) -> None:
    rows, sampling = np.stack([zipf(seed, exponent) for seed in range(4)]), Sampling(0.8, 0.95)
    sent, gathered = 0, list[int]()
    for seed in range(10):
        found = Logits(rows)
        expected = [choose(row, sampling, {}, np.random.default_rng(seed + at)) for at, row in enumerate(rows)]
        assert chosen(found, [sampling] * 4, seed) == expected
        sent, gathered = sent + len(found.sent), gathered + found.gathered
    assert sent == 0
    assert max(gathered) < 4 * 256


def test_greedy_tokens_take_nothing_but_the_summary() -> None:
    rows = np.stack([zipf(seed, 1.5) for seed in range(3)])
    rows[1, [70, 900]] = 40.0  # the first of equals
    found = Logits(rows)
    assert best_tokens(found, 3).tolist() == [int(rows[0].argmax()), 70, int(rows[2].argmax())]
    assert (found.asked, found.sent, found.gathered) == (1, [], [])
    assert best_tokens(HostLogits(rows), 3).tolist() == best_tokens(found, 3).tolist()


def test_a_row_without_a_decision_has_all_its_logits_sent() -> None:
    """Flat logits have more blocks near the best than are sent; equal ones have a boundary at every token."""
    flat = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32)
    flat[1] = 0.0
    found = Logits(flat, most_blocks=8)
    samplings = [Sampling(1.0, 0.95), Sampling(1.0, 0.5)]
    assert chosen(found, samplings, 3) == [
        choose(row, sampling, {}, np.random.default_rng(3 + at))
        for at, (row, sampling) in enumerate(zip(flat, samplings))
    ]
    assert found.sent == [0, 1]


def test_a_nucleus_of_nearly_all_weight_is_looked_for_in_ever_more_blocks() -> None:
    """A share nearer to 1 than sums in FP32 are; the whole vocabulary of 128 is a smaller count than those before it,
    so that fewer blocks are near: the first, which was sent, is not.
    """
    values = np.full((1, 128), -23.0, np.float32)
    values[0, 64:] = -np.inf
    values[0, 100] = 0.0
    found, sampling = Logits(values), Sampling(1.0, 1.0 - 1e-6)
    assert chosen(found, [sampling], 5) == [choose(values[0], sampling, {}, np.random.default_rng(5))]
    assert found.sent == [0]


def test_a_row_that_is_no_number_fails_alone() -> None:
    rows = np.stack([zipf(0, 1.5), zipf(1, 1.5), zipf(2, 1.5), zipf(3, 1.5)])
    rows[1, 9], rows[3, 4000] = np.nan, np.inf
    for sampling in (Sampling(), Sampling(0.8, 0.95), Sampling(0.8)):
        found = Logits(rows)
        tokens = chosen(found, [sampling] * 4, 1)
        for row in (0, 2):
            assert tokens[row] == choose(rows[row], sampling, {}, np.random.default_rng(1 + row))
        assert str(tokens[1]).startswith("the model's logit of token 9 is nan; ")
        assert str(tokens[3]).startswith("the model's logit of token 4000 is inf; ")
        assert found.sent == [1, 3]
    with pytest.raises(FloatingPointError, match="^the model's logit of token 9 is nan"):
        best_tokens(Logits(rows), 4)


def test_rows_that_have_their_logits_are_chosen_with_those_that_have_not() -> None:
    rows, penalized = np.stack([zipf(0, 1.5), zipf(1, 1.5)]), Sampling(0.0, 1.0, 2.0, 2.0)
    best = int(rows[1].argmax())
    choices = [RowChoice(None, Sampling(), {}, None), RowChoice(rows[1], penalized, {best: 9}, None)]
    found = Logits(rows)
    assert choose_step(choices, [0, 1], found) == [int(rows[0].argmax()), choose(rows[1], penalized, {best: 9}, None)]
    assert found.sent == []
    assert choose_step([], [], found) == []


def test_a_device_sends_the_summary_of_greedy_rows_and_the_logits_of_those_that_need_them(
    counting: CountingModel, on_device: OnDevice
) -> None:
    batch, device, _ = on_device(counting, 4)
    generator = Generator(OnDeviceSession(lambda rows: batch), Vocabulary.read(counting.directory))
    complete(generator, [Request("t3 t1 t4", 4, ignore_end=True)])  # its steps are captured, and compared
    read = device.downloaded
    complete(generator, [Request("t3 t1 t4", 4, ignore_end=True)])
    # the prompt's last logits, and three summaries of one block, whose parts begin 256 bytes apart
    assert device.downloaded - read == 16 * 4 + 3 * (2 * 256 + 4)
    read = device.downloaded
    (first,) = complete(generator, [Request("t3 t1 t4", 4, ignore_end=True, logprobs=2)])
    assert device.downloaded - read == 4 * 16 * 4
    (second,) = complete(generator, [Request("t3 t1 t4", 4, ignore_end=True)])
    assert first.tokens == second.tokens


def test_a_seed_gives_one_text_on_a_device_and_on_the_host(counting: CountingModel, on_device: OnDevice) -> None:
    requests = [
        Request("t3 t1 t4", 30, temperature=temperature, top_p=top_p, seed=7, ignore_end=True)
        for temperature, top_p in ((0.0, 1.0), (400.0, 1.0), (40.0, 1.0), (30.0, 0.9))
    ]
    texts = []
    for session in (OnDeviceSession(lambda rows: on_device(counting, rows)[0]), counting.session()):
        generator = Generator(session, Vocabulary.read(counting.directory), 4)
        texts.append([answer.tokens for answer in complete(generator, requests)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_a_device_s_summaries_and_blocks_are_those_of_its_rows(dtype: type[np.generic]) -> None:
    """Of three rows in memory for five, and a vocabulary of 17 blocks, the last of them broken."""
    values = np.stack([zipf(seed, 1.5)[:1050] for seed in range(3)])
    values = (values.view(np.uint32) >> 16 << 16).view(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(dtype) if dtype == np.uint16 else values
    device = HostDevice()
    kernels = load_kernels(device, CacheLayout(("0.key",), ((1, 4),), (np.dtype(np.uint8),)))
    assert kernels is not None
    at = device.allocate(raw.nbytes)
    device.upload(raw.view(np.uint8).reshape(-1), at)
    layout = SummaryLayout(3, 1050, np.dtype(dtype))
    room = Room(device).hold(SummaryLayout(5, 1050, np.dtype(dtype)))
    host = np.zeros((3, raw[0].nbytes), np.uint8)
    logits = DeviceLogits(device, at, host, np.dtype(dtype), DeviceSummaries(kernels, room, layout, at))
    samplings = [Sampling(), Sampling(0.8, 0.95), Sampling(0.8)]
    for seed in range(20):
        choices = [
            RowChoice(None, sampling, {}, np.random.default_rng(seed + row)) for row, sampling in enumerate(samplings)
        ]
        assert choose_step(choices, range(3), logits) == [
            choose(row, sampling, {}, np.random.default_rng(seed + number))
            for number, (row, sampling) in enumerate(zip(values, samplings, strict=True))
        ]
    assert logits.read
    np.testing.assert_array_equal(np.stack(logits.rows([2, 0, 1])), values[[2, 0, 1]])
