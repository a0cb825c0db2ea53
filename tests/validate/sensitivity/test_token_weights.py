"""The weights of tokens: the gradients of a model's loss, by another way to them, and layer by layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fp8q.calibrate.measure.observe import probe_groups
from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.validate.sensitivity import token_weights
from fp8q.validate.sensitivity.gradients import drawn
from fp8q.validate.sensitivity.token_weights import LayerwiseTokenWeights, TokenNorms, batch_norms

IDS = np.random.default_rng(3).integers(0, 500, (3, 24))


@pytest.fixture(scope="module")
def source(demo_checkpoint: Path) -> Source:
    return open_source(str(demo_checkpoint))


@pytest.fixture(scope="module")
def model(source: Source) -> PreTrainedModel:
    return load_model(source, torch.float32, "cpu").requires_grad_(False)


def by_shifts(model: PreTrainedModel, names: list[str], ids: np.ndarray, seed: int) -> np.ndarray:
    """The root of Σ |∂ loss / ∂ shift|² of shifts, zeros, that are added to the outputs of modules: [windows, seq]."""
    modules = dict(model.named_modules())
    shifts = {name: torch.zeros((*ids.shape, modules[name].weight.shape[0]), requires_grad=True) for name in names}  # type: ignore[union-attr]
    hooks = [
        modules[name].register_forward_hook(lambda module, inputs, y, name=name: y + shifts[name]) for name in names
    ]
    log_p = model(input_ids=torch.from_numpy(ids), use_cache=False).logits.float().log_softmax(-1)[:, :-1].flatten(0, 1)
    labels = drawn(log_p.detach().exp(), torch.Generator().manual_seed(seed))
    nn.functional.nll_loss(log_p, labels, reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    grads = [shift.grad for shift in shifts.values()]
    assert all(grad is not None for grad in grads)
    square: np.ndarray = sum(grad.square().sum(-1) for grad in grads if grad is not None).numpy()  # type: ignore[union-attr]
    return np.sqrt(square)


def test_a_tokens_weight_is_the_size_of_the_losss_gradient_at_all_that_read_its_input(model: PreTrainedModel) -> None:
    groups = probe_groups(model, observed_gemms(model))
    norms = batch_norms(model, groups, 5, IDS)
    assert norms.keys() == groups.keys()
    weights = {first: values.gradients for first, values in norms.items()}
    qkv = next(first for first in groups if first.startswith("model.layers.1.self_attn") and len(groups[first]) == 3)
    for first in (qkv, "model.layers.2.mlp.down_proj"):
        np.testing.assert_allclose(weights[first], by_shifts(model, groups[first], IDS, 5), rtol=1e-3, atol=1e-6)
    assert (weights["model.layers.3.mlp.down_proj"][:, -1] == 0).all()  # the last token predicts nothing here
    assert (weights[qkv][:, :-1] > 0).all()


def test_layer_by_layer_the_weights_are_those_of_the_whole_model(
    source: Source, model: PreTrainedModel, tmp_path: Path
) -> None:
    batches = {0: IDS[:2], 1: IDS[2:]}
    layerwise = LayerwiseTokenWeights(source, batches, tmp_path)
    layerwise.run(SILENT, "Weighing tokens by")
    streamed, groups = layerwise.collected(), probe_groups(model, observed_gemms(model))
    whole = [batch_norms(model, groups, batch, ids) for batch, ids in batches.items()]
    assert streamed.keys() == groups.keys()
    for first, values in streamed.items():
        for part in ("gradients", "inputs"):
            expected = np.concatenate([getattr(norms[first], part) for norms in whole])
            np.testing.assert_allclose(getattr(values, part), expected, rtol=1e-3, atol=1e-6, err_msg=first)


def test_a_killed_pass_goes_on_at_its_layer(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, made = {0: IDS[:2]}, token_weights.token_norms
    (tmp_path / "whole").mkdir()
    whole = LayerwiseTokenWeights(source, batches, tmp_path / "whole")
    whole.run(SILENT, "Weighing tokens by")
    calls = []

    def killed(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # the head and the last layer are done
            raise KeyboardInterrupt
        return made(*given)

    monkeypatch.setattr(token_weights, "token_norms", killed)
    (tmp_path / "cut").mkdir()
    with pytest.raises(KeyboardInterrupt):
        LayerwiseTokenWeights(source, batches, tmp_path / "cut").run(SILENT, "Weighing tokens by")
    again = LayerwiseTokenWeights(source, batches, tmp_path / "cut")
    again.run(SILENT, "Weighing tokens by")
    assert len(calls) == 3 + 3  # three of four layers
    expected = whole.collected()
    assert again.collected().keys() == expected.keys()
    for name, values in again.collected().items():
        assert np.array_equal(values.gradients, expected[name].gradients), name
        assert np.array_equal(values.inputs, expected[name].inputs), name


def test_no_token_has_more_of_the_trace_than_thirty_medians() -> None:
    gradients = np.array([[4, 2, 2, 2, 0]], np.float32)
    inputs = np.array([[100, 1, 1, 1, 50]], np.float32)
    weights = TokenNorms(gradients, inputs).weights  # gradients over their mean: 2, 1, 1, 1, 0
    np.testing.assert_allclose(weights, [[30 / 100**2, 1, 1, 1, 0]], rtol=1e-6)
    assert TokenNorms(gradients, np.ones((1, 5), np.float32)).weights.tolist() == [[2, 1, 1, 1, 0]]


def test_tokens_without_gradients_or_inputs_keep_finite_weights() -> None:
    nothing, ones = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    assert TokenNorms(nothing, ones).weights.tolist() == [[0, 0, 0]]
    assert TokenNorms(ones, nothing).weights.tolist() == [[1, 1, 1]]
