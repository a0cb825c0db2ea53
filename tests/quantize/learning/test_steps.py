"""The steps of learned weights: Adam's by hand, and one rate for weights of any magnitude."""

import pytest
import torch
from torch import nn

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.learning.linear import LearnedLinear, weight_steps


def learned(weight: torch.Tensor) -> LearnedLinear:
    scale = weight.abs().amax(1) / E4M3.max
    return LearnedLinear(encode(weight, scale[:, None]), scale, None, None)


def test_the_first_step_is_a_share_of_the_root_mean_square_against_the_sign_of_the_gradient() -> None:
    layer = LearnedLinear(encode(torch.tensor([[1.0, 7.0]]), torch.tensor(1.0)), torch.ones(1), None, None)
    optimizer = weight_steps(nn.Sequential(layer), 0.1)
    layer.weight.grad = torch.tensor([[3e-9, -2e4]])
    optimizer.step()
    # the root mean square of 1 and 7 is 5; Adam's first means are the gradient and its square
    assert torch.allclose(layer.weight.detach(), torch.tensor([[0.5, 7.5]]))


def test_each_layer_has_a_step_of_its_own_magnitude() -> None:
    small, large = learned(torch.full((2, 2), 0.25)), learned(torch.full((2, 2), 16.0))
    rates = [group["lr"] for group in weight_steps(nn.ModuleList([small, large]), 0.5).param_groups]
    assert rates == pytest.approx([0.125, 8.0])


def test_a_gain_has_a_fourth_of_the_step_whatever_its_channel_weighs() -> None:
    scale = torch.full((2,), 0.25)
    layer = LearnedLinear(encode(torch.full((2, 16), 8.0), scale[:, None]), scale, None, None, learn_scale=True)
    assert layer.gain is not None
    optimizer = weight_steps(layer, 0.5)
    layer.weight.grad, layer.gain.grad = torch.zeros(2, 16), torch.tensor([[3.0], [-1e-6]])
    optimizer.step()
    assert layer.gain.flatten().tolist() == pytest.approx([1 - 0.125, 1 + 0.125])


def test_weights_of_zero_stay() -> None:
    layer = LearnedLinear(encode(torch.zeros(2, 2), torch.tensor(1.0)), torch.ones(2), None, None)
    optimizer = weight_steps(layer, 0.5)
    layer.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(layer.weight.detach(), torch.zeros(2, 2))


def test_one_rate_serves_weights_and_losses_of_any_magnitude() -> None:
    draw = torch.Generator().manual_seed(2)
    weight, x = torch.randn(16, 32, generator=draw), torch.randn(256, 4, generator=draw)
    x = x @ torch.randn(4, 32, generator=draw) + 0.1 * torch.randn(256, 32, generator=draw)

    def left(times: float) -> float:
        """The least loss over that at the beginning, of weights so many times as large and inputs 1024 times smaller
        than those that would give the same outputs.
        """
        layer, own = learned(weight * times), x / times / 1024
        wanted, losses = nn.functional.linear(own, weight * times), []
        optimizer = weight_steps(layer, 0.005)
        for _ in range(150):
            loss = (layer(own) - wanted).square().sum(1).mean()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return min(losses) / losses[0]

    assert left(1.0) < 0.2
    assert left(1024.0) == pytest.approx(left(1.0), rel=1e-3)
