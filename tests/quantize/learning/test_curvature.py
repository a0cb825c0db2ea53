"""The curvature that steps are preconditioned by: factors by hand, Newton's step, and a descent that Adam's is not."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.learning.curvature import DAMPING, CurvatureSteps, inverse_factors
from fp8q.quantize.learning.linear import LearnedLinear


def learned(weight: torch.Tensor) -> LearnedLinear:
    scale = weight.abs().amax(1) / E4M3.max
    return LearnedLinear(encode(weight, scale[:, None]), scale, None, None)


class Head(nn.Module):
    """A model of one layer: its logits are the layer's output on a table of inputs."""

    def __init__(self, table: torch.Tensor, layer: LearnedLinear):
        super().__init__()
        self.table, self.layer = table, layer

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        assert not use_cache
        return type("Output", (), {"logits": self.layer(self.table[input_ids])})()


def test_the_factors_of_one_layer_are_those_of_its_softmax() -> None:
    """For logits z = W x the Fisher information of z is diag(p) - p pᵀ, here averaged over many draws."""
    table, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25], [-0.5, 0.125], [0.25, 0.25]])
    head = Head(table, learned(weight))
    windows = torch.zeros(40, 1000, dtype=torch.int64)
    inputs, outputs = inverse_factors(head, windows, 4, seed=0)["layer"]  # type: ignore[arg-type]
    p = head.layer(table)[0].detach().softmax(0)
    wanted = torch.diag(p) - torch.outer(p, p)
    damped = wanted + DAMPING * wanted.diagonal().mean() * torch.eye(3)
    assert torch.allclose(torch.linalg.inv(outputs), damped, rtol=0.03, atol=0.003)
    assert torch.allclose(torch.linalg.inv(inputs), torch.tensor([[3.5, 2.0], [2.0, 6.5]]), rtol=1e-4)


def test_a_step_is_newtons_whatever_the_spacing() -> None:
    layer = learned(torch.tensor([[1.0, 0.01], [0.3, 4.0]]))
    inputs, outputs = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.5]])
    optimizer = CurvatureSteps(layer, {"": (inputs, outputs)}, learning_rate=0.1)
    gradient = torch.tensor([[1.0, -1.0], [2.0, 0.5]])
    layer.weight.grad = gradient
    before = layer.weight.detach().clone()
    optimizer.step()
    moved = layer.weight.detach() - before
    # the first direction is a tenth of the gradient: MOMENTUM is 0.9
    assert torch.allclose(moved, -0.1 * 0.1 * (outputs @ gradient @ inputs), rtol=1e-3, atol=1e-6)


def test_one_rate_serves_weights_of_any_magnitude() -> None:
    draw = torch.Generator().manual_seed(2)
    weight, x = torch.randn(16, 32, generator=draw), torch.randn(256, 4, generator=draw)
    x = x @ torch.randn(4, 32, generator=draw) + 0.1 * torch.randn(256, 32, generator=draw)

    def left(times: float) -> float:
        """The least loss over that at the beginning, of weights so many times as large and inputs as much smaller."""
        layer, own = learned(weight * times), x / times
        wanted, factor = nn.functional.linear(own, weight * times), own.T @ own / len(own)
        factors = {"": (torch.linalg.inv(factor + factor.diagonal().mean() * torch.eye(32)), torch.eye(16))}
        optimizer, losses = CurvatureSteps(layer, factors, 0.1), []
        for _ in range(150):
            loss = (layer(own) - wanted).square().sum(1).mean()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return min(losses) / losses[0]

    assert left(1.0) < 0.2
    assert left(1024.0) == pytest.approx(left(1.0), rel=0.05)


def test_logits_that_are_no_numbers_leave_the_identity() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.layers[0].mlp.down_proj = learned(torch.randn(8, 8))
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))  # type: ignore[operator]
    factors = inverse_factors(model, torch.zeros(1, 4, dtype=torch.int64), 1, seed=0)
    assert all(torch.equal(inverse, torch.eye(8)) for inverse in factors["model.layers.0.mlp.down_proj"])


@pytest.mark.parametrize("seed", [0, 1])
def test_factors_are_the_same_when_they_are_measured_again(seed: int) -> None:
    """A killed training measures them again, and goes on to the same bytes."""
    head = Head(torch.randn(5, 4, generator=torch.Generator().manual_seed(3)), learned(torch.eye(6, 4) + 0.1))
    ids = torch.arange(10).remainder(5).reshape(2, 5)
    one, other = (inverse_factors(head, ids, 1, seed)["layer"] for _ in range(2))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
