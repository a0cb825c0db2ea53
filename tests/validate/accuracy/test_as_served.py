"""Windows that are read as a prompt and decoded token by token, against whole windows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from loaded_runtimes import stacked
from numpy.typing import NDArray

from fp8q import api
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.validate.accuracy.as_served import LogitsPart, by_distance, in_groups, served
from fp8q.validate.accuracy.compare import Turns, WindowBatch, compare_in_turn, numbered, windows_at_once
from fp8q.validate.accuracy.document import DistanceBucket, load_accuracy, load_token_losses

VOCABULARY = 5


def counting(calls: list[tuple[int, int]]) -> Callable[[int, int], Callable[[NDArray[np.int64]], torch.Tensor]]:
    """A runtime whose logits are the sum of all tokens so far, times 1 to 5; `calls` collects (windows, tokens)."""

    def start(windows: int, context: int) -> Callable[[NDArray[np.int64]], torch.Tensor]:
        total = np.zeros(windows, np.int64)

        def step(ids: NDArray[np.int64]) -> torch.Tensor:
            calls.append((ids.shape[0], ids.shape[1]))
            total[:] += ids.sum(1)
            return torch.from_numpy(total[:, None] * np.arange(1.0, VOCABULARY + 1))

        return step

    return start


def test_a_prompt_is_read_in_one_call_and_each_further_token_but_the_last_in_one() -> None:
    calls: list[tuple[int, int]] = []
    ids = np.array([[1, 2, 3, 4, 5, 6], [2, 2, 2, 2, 2, 2]])
    logits = stacked(served(counting(calls), 3)(ids))
    assert calls == [(2, 3), (2, 1), (2, 1)]
    assert logits[:, :, 0].tolist() == [[6, 10, 15], [6, 8, 10]]
    assert logits.shape == (2, 3, VOCABULARY)


def test_decoded_windows_go_together_by_their_tokens() -> None:
    assert windows_at_once(512, None, 49152) == 1  # 101 MB a window, of 16
    assert windows_at_once(512, 307, 49152) == 64  # 32,768 tokens, since 256 MB of logits have room for 6
    assert windows_at_once(512, 256, 151_936) == 64
    assert windows_at_once(2048, 1024, 128_256) == 16
    assert windows_at_once(128, 96, 512) == 4096  # 64 kB behind a prompt, of 256 MB
    assert windows_at_once(65_536, 1024, 128_256) == 1


def test_a_piece_has_the_tokens_behind_its_first_position() -> None:
    scored = np.array([[False, False, False, True, True], [False, False, True, True, True]])
    batch = WindowBatch(np.arange(10).reshape(2, 5), scored, scored, numbered(scored) + 7, numbered(scored))
    last = batch.part(LogitsPart(np.zeros((1, 2, 3)), slice(1, 2), 2))  # of the positions 2 and 3, from 0
    assert last.ids.tolist() == [[7, 8, 9]]
    assert last.scored.tolist() == last.top_positions.tolist() == [[False, True, True]]
    assert (last.rows[last.scored].tolist(), last.top_rows[last.scored].tolist()) == ([10, 11], [3, 4])
    whole = batch.part(LogitsPart(np.zeros((2, 5, 3)), slice(0, 2)))
    assert all(np.array_equal(getattr(whole, name), getattr(batch, name)) for name in vars(batch))


def test_windows_that_a_gpu_has_no_room_for_go_in_smaller_groups() -> None:
    """Room for three: four are too many at the second position, where they begin again as twos."""
    sizes: list[int] = []

    def forward(ids: NDArray[np.int64]) -> Iterator[LogitsPart]:
        sizes.append(len(ids))
        for position in range(2):
            if len(ids) > 3 and position == 1:
                raise MemoryError
            yield LogitsPart(ids[:, position, None, None], slice(0, len(ids)), position)

    ids = np.arange(10).reshape(5, 2)
    pieces = list(in_groups(forward, 4, MemoryError)(ids))
    assert sizes == [4, 2, 2, 1]
    assert np.array_equal(stacked(pieces[1:])[:, :, 0], ids)
    with pytest.raises(MemoryError):
        list(in_groups(failing, 4, MemoryError)(ids))


def failing(ids: NDArray[np.int64]) -> Iterator[LogitsPart]:
    """A runtime that has no room for a window."""
    yield LogitsPart(ids[:, :, None], slice(0, len(ids)))
    raise MemoryError


@pytest.mark.parametrize("most", [1, 3, 8])
def test_losses_do_not_depend_on_how_windows_are_grouped(tmp_path: Path, most: int) -> None:
    """Pieces come position by position, and twice where a group begins again; values are in the order of windows."""
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(1))
    other = torch.randn(7, 7, generator=torch.Generator().manual_seed(2))
    evaluation = cut(np.random.default_rng(0).integers(0, 7, 80), "text", 8, 8, prompt=3)

    def bigram(logits: torch.Tensor) -> Callable[[NDArray[np.int64]], Iterator[LogitsPart]]:
        def start(windows: int, context: int) -> Callable[[NDArray[np.int64]], torch.Tensor]:
            return lambda ids: logits[torch.from_numpy(ids[:, -1])]

        steps = served(start, 3)

        def twice(ids: NDArray[np.int64]) -> Iterator[LogitsPart]:
            yield next(steps(ids))
            yield from steps(ids)

        return in_groups(twice, most, MemoryError)

    outcome = compare_in_turn(
        Turns(evaluation, {"bf16": lambda: bigram(table), "fp32": lambda: bigram(other)}, 7, tmp_path / "work"), SILENT
    )
    at_once = {"bf16": lambda: lambda ids: table[ids], "fp32": lambda: lambda ids: other[ids]}
    whole = compare_in_turn(Turns(evaluation, at_once, 7, tmp_path / "whole"), SILENT)
    for name in ("bf16", "fp32"):
        np.testing.assert_array_equal(outcome.nll[name], whole.nll[name])
    for quantity, values in whole.measured["fp32"].items():
        np.testing.assert_array_equal(outcome.measured["fp32"][quantity], values)
    np.testing.assert_array_equal(outcome.top["fp32"].tokens, whole.top["fp32"].tokens)
    np.testing.assert_array_equal(outcome.top["fp32"].rest, whole.top["fp32"].rest)


def test_only_the_tokens_behind_the_prompt_are_scored() -> None:
    evaluation = cut(np.arange(10), "text", 5, 5, prompt=3)
    assert evaluation.scored.tolist() == [[False, False, False, True, True]] * 2
    assert (evaluation.protocol.tokens, evaluation.protocol.prompt) == (4, 3)
    assert evaluation.protocol.description == (
        "4 tokens of text that are decoded behind prompts of 3, each scored once, in windows of 5 tokens every 5"
    )
    with pytest.raises(InputError) as refused:
        cut(np.arange(10), "text", 5, 5, prompt=5)
    assert str(refused.value) == (
        "--as-served 5: leaves no token of a window of 5 to decode; give less, or a larger --context"
    )


def test_distances_are_counted_from_the_end_of_the_prompt() -> None:
    evaluation = cut(np.arange(20), "text", 10, 10, prompt=4)
    nll = np.where(evaluation.scored, np.arange(10, dtype=np.float32), np.nan)
    quarters = by_distance(evaluation, nll, None)
    assert quarters == [
        DistanceBucket(first=1, last=2, tokens=4, nll_nats=4.5),
        DistanceBucket(first=3, last=4, tokens=4, nll_nats=6.5),
        DistanceBucket(first=5, last=5, tokens=2, nll_nats=8.0),
        DistanceBucket(first=6, last=6, tokens=2, nll_nats=9.0),
    ]
    assert by_distance(cut(np.arange(20), "text", 10, 10), nll, None) is None


def test_decoding_gives_what_whole_windows_give_for_forms_without_phases(demo_run: Run, tmp_path: Path) -> None:
    """FP32 differs by the order of its sums alone; where FP8 rounds a value the other way it is another code."""
    run = Run(copytree(demo_run.root, tmp_path / "run"))
    runtimes = ("bf16", "fp32", "reference", "onnxruntime")
    losses = {}
    for prompt in (None, 96):
        api.validate(run.root, None, api.ValidateOptions(runtimes=runtimes, context=128, as_served=prompt))
        losses[prompt] = load_token_losses(run)
    accuracy = load_accuracy(run)
    assert accuracy.protocol.prompt == 96
    scored = ~np.isnan(losses[96]["fp32"])
    assert scored.any(axis=0).tolist() == [False] * 96 + [True] * 32
    for name, size, mean in (
        ("fp32", 1e-5, 1e-6), ("onnxruntime", 5e-3, 1e-3), ("reference", 5e-2, 5e-3), ("bf16", 5e-2, 5e-3)
    ):  # fmt: skip
        difference = (losses[96][name] - losses[None][name])[scored]
        assert np.abs(difference).mean() < size, name
        assert abs(difference.mean()) < mean, name
        assert np.any(difference != 0), f"{name}: its windows were not decoded, only scored as if they were"
    buckets = accuracy.runtimes["reference"].by_distance
    assert buckets is not None
    assert [(each.first, each.last) for each in buckets] == [(1, 8), (9, 16), (17, 24), (25, 32)]
    assert sum(each.tokens for each in buckets) == accuracy.protocol.tokens == scored.sum()
    kl = accuracy.runtimes["reference"].kl_mean_nats
    assert kl is not None
    assert np.average(
        [each.kl_mean_nats or 0 for each in buckets], weights=[each.tokens for each in buckets]
    ) == pytest.approx(kl)


def test_an_accumulator_runs_whole_windows_and_is_refused_beside_a_prompt(demo_run: Run) -> None:
    options = api.ValidateOptions(as_served=8, accumulator="fp22")
    with pytest.raises(InputError, match="^--as-served 8: --accumulator runs whole windows; leave one of the two out$"):
        api.validate(demo_run.root, None, options)
