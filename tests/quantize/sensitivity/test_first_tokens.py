"""The weights of first tokens: the gradients of a model's loss, by another way to them, and layer by layer."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.quantize.sensitivity import backward, output_gradients
from fp8q.quantize.sensitivity.gradients import drawn, drawn_gradient, uniform
from fp8q.quantize.sensitivity.output_gradients import (
    GradientSquares,
    LayerwiseFirstTokens,
    WatchedGemms,
    added,
    batch_squares,
)

IDS = np.random.default_rng(3).integers(0, 500, (3, 24))


@pytest.fixture(scope="module")
def source(demo_checkpoint: Path) -> Source:
    return open_source(str(demo_checkpoint))


@pytest.fixture(scope="module")
def model(source: Source) -> PreTrainedModel:
    return load_model(source, torch.float32, "cpu").requires_grad_(False)


@pytest.fixture(scope="module")
def watched(model: PreTrainedModel) -> WatchedGemms:
    return WatchedGemms(model, observed_gemms(model))


def by_shifts(model: PreTrainedModel, names: list[str], ids: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Module -> |∂ loss / ∂ shift|² of a shift, zeros, that is added to its output: [windows, seq_len]."""
    modules = {name: model.get_submodule(name) for name in names}
    shifts = {
        name: torch.zeros((*ids.shape, len(module.get_parameter("weight"))), requires_grad=True)
        for name, module in modules.items()
    }
    hooks = [
        module.register_forward_hook(lambda module, inputs, y, name=name: y + shifts[name])
        for name, module in modules.items()
    ]
    log_p = model(input_ids=torch.from_numpy(ids), use_cache=False).logits.float().log_softmax(-1)[:, :-1].flatten(0, 1)
    labels = drawn(log_p.detach().exp(), uniform(len(log_p), torch.Generator().manual_seed(seed)))
    nn.functional.nll_loss(log_p, labels, reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    squares = dict[str, np.ndarray]()
    for name, shift in shifts.items():
        assert shift.grad is not None
        squares[name] = shift.grad.square().sum(-1).numpy()
    return squares


def test_squares_are_of_the_losss_gradient_at_the_output_of_each_gemm(
    model: PreTrainedModel, watched: WatchedGemms
) -> None:
    squares = batch_squares(watched, 5, IDS)
    assert squares.keys() == watched.gemms.keys()
    names = [*(f"model.layers.1.self_attn.{part}_proj" for part in "qkv"), "model.layers.2.mlp.down_proj"]
    for name, expected in by_shifts(model, names, IDS, 5).items():
        sums = squares[name]
        assert sums.first == pytest.approx(expected[:, 0].sum(), rel=1e-3, abs=1e-9)
        assert sums.others == pytest.approx(expected[:, 1:].sum(), rel=1e-3)
        assert (sums.first_tokens, sums.other_tokens) == (3, 3 * 23)
        assert sums.weight == pytest.approx(max(expected[:, 0].mean() / expected[:, 1:].mean(), 1e-4), rel=1e-3)


def test_the_query_of_a_first_token_which_meets_one_key_alone_has_no_weight(watched: WatchedGemms) -> None:
    squares = batch_squares(watched, 5, IDS)
    weights = {part: squares[f"model.layers.1.self_attn.{part}_proj"].weight for part in "qkv"}
    assert weights["q"] == 1e-4
    assert weights["v"] > 1
    assert weights["v"] > weights["k"] > 1000 * weights["q"]


def test_the_weight_is_the_mean_at_first_tokens_over_that_at_others_and_bounded() -> None:
    assert GradientSquares(first=6, others=20, first_tokens=2, other_tokens=10).weight == 1.5
    assert GradientSquares(first=0, others=20, first_tokens=2, other_tokens=10).weight == 1e-4
    assert GradientSquares(first=6, others=0, first_tokens=2, other_tokens=10).weight == 1e4
    assert GradientSquares(first=0, others=0, first_tokens=2, other_tokens=10).weight == 1
    assert GradientSquares(first=float("inf"), others=1, first_tokens=2, other_tokens=10).weight == 1
    assert GradientSquares().weight == 1
    assert GradientSquares(first=3, first_tokens=2).weight == 1  # windows of one token


def test_sums_of_batches_are_added() -> None:
    one = {"a": GradientSquares(first=1, others=2, first_tokens=3, other_tokens=4)}
    assert added([one, {}, one | {"b": GradientSquares(first=5)}]) == {
        "a": GradientSquares(first=2, others=4, first_tokens=6, other_tokens=8), "b": GradientSquares(first=5),
    }  # fmt: skip


def test_layer_by_layer_the_squares_are_those_of_the_whole_model(
    source: Source, watched: WatchedGemms, tmp_path: Path
) -> None:
    batches = {0: IDS[:2], 1: IDS[2:]}
    layerwise = LayerwiseFirstTokens(source, batches, tmp_path)
    layerwise.run(SILENT, "Weighing first tokens in")
    whole = added(batch_squares(watched, batch, ids) for batch, ids in batches.items())
    streamed = layerwise.results.squares
    assert streamed.keys() == whole.keys()
    for first, squares in streamed.items():
        assert squares.first == pytest.approx(whole[first].first, rel=1e-3, abs=1e-9), first
        assert squares.others == pytest.approx(whole[first].others, rel=1e-3), first


def test_the_tensors_of_a_batch_are_freed_before_the_next_one(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a vocabulary of 152 K those of a head are 0.6 GB."""
    tables: list[weakref.ref[torch.Tensor]] = []
    living: list[int] = []

    def noted(*given: Any) -> torch.Tensor:
        living.append(sum(earlier() is not None for earlier in tables))
        table = drawn_gradient(*given)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(backward, "drawn_gradient", noted)
    LayerwiseFirstTokens(source, {0: IDS[:1], 1: IDS[1:2], 2: IDS[2:]}, tmp_path).run(SILENT, "Weighing")
    assert living == [0, 0, 0]


def test_a_killed_pass_goes_on_at_its_layer(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, made = {0: IDS[:2]}, output_gradients.gradient_squares
    (tmp_path / "whole").mkdir()
    whole = LayerwiseFirstTokens(source, batches, tmp_path / "whole")
    whole.run(SILENT, "Weighing first tokens in")
    calls = []

    def killed(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # the head and the last layer are done
            raise KeyboardInterrupt
        return made(*given)

    monkeypatch.setattr(output_gradients, "gradient_squares", killed)
    (tmp_path / "cut").mkdir()
    with pytest.raises(KeyboardInterrupt):
        LayerwiseFirstTokens(source, batches, tmp_path / "cut").run(SILENT, "Weighing first tokens in")
    again = LayerwiseFirstTokens(source, batches, tmp_path / "cut")
    again.run(SILENT, "Weighing first tokens in")
    assert len(calls) == 3 + 3  # three of four layers
    assert again.results.squares == whole.results.squares
