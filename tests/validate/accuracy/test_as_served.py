"""Windows that are read as a prompt and decoded token by token, against whole windows."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fp8q import api
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.validate.accuracy.as_served import by_distance, served
from fp8q.validate.accuracy.compare import WindowBatch, windows_at_once
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
    logits = served(counting(calls), 3)(ids)
    assert calls == [(2, 3), (2, 1), (2, 1)]
    assert logits[:, :, 0].tolist() == [[6, 10, 15], [6, 8, 10]]
    assert logits.shape == (2, 3, VOCABULARY)


def test_decoded_windows_go_together_by_the_size_of_their_own_logits() -> None:
    assert windows_at_once(512, None, 49152) == 1  # 101 MB a window, of 16
    assert windows_at_once(512, 307, 49152) == 6  # 40 MB behind a prompt, of 256


def test_logits_of_the_last_positions_are_of_the_end_of_windows() -> None:
    scored = np.array([[False, False, False, True, True]])
    batch = WindowBatch(np.arange(5)[None], scored, scored, 7, 9)
    last = batch.of_last(2)  # of the positions 2 and 3, from 0, which the tokens at 3 and 4 are scored by
    assert last.ids.tolist() == [[2, 3, 4]]
    assert last.scored.tolist() == last.top_positions.tolist() == [[False, True, True]]
    assert (last.row, last.top_row) == (7, 9)
    assert batch.of_last(5) is batch


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
