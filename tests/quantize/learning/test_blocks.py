"""Layers that learn one by one: the error falls, never rises, and is that of tokens by their own size."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.learning.block_training import (
    BlockSchedule,
    LearningBlock,
    held_out_error,
    learn_block,
    output_error,
)
from fp8q.quantize.learning.linear import LearnedLinear

TRAIN, HELD_OUT = range(12), range(12, 16)


def learned(weight: torch.Tensor) -> LearnedLinear:
    scale = weight.abs().amax(1) / E4M3.max
    return LearnedLinear(encode(weight, scale[:, None]), scale, None, None)


class Layer(nn.Module):
    """A residual layer of two GEMMs and a curve between them."""

    def __init__(self, up: nn.Module, down: nn.Module):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


@pytest.fixture
def block() -> LearningBlock:
    """A layer of 24 and 40 channels on inputs that are much alike, and what the float one makes of them."""
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 24, generator=draw)
    inputs = [
        torch.randn(2, 16, 6, generator=draw) @ mixing + 0.1 * torch.randn(2, 16, 24, generator=draw)
        for _ in range(len(TRAIN) + len(HELD_OUT))
    ]
    up, down = (torch.randn(shape, generator=draw) * 0.2 for shape in ((40, 24), (24, 40)))
    exact = Layer(nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False)).requires_grad_(False)
    exact.up.weight.copy_(up)  # type: ignore[operator]
    exact.down.weight.copy_(down)  # type: ignore[operator]
    targets = [exact(x) for x in inputs]
    layer = Layer(learned(up), learned(down))
    return LearningBlock(layer, lambda batch: layer(inputs[batch]), targets.__getitem__)


def test_the_error_of_a_token_is_a_share_of_its_size() -> None:
    target = torch.tensor([[[3.0, 4.0], [300.0, 400.0]]])
    output = torch.tensor([[[3.0, 4.5], [300.0, 300.0]]])
    # 0.25 of 25, and 10,000 of 250,000: the mean of 1 % and 4 %
    assert float(output_error(output, target)) == pytest.approx(0.025)
    assert float(output_error(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))) == 0


def test_the_error_falls_and_the_codes_are_those_of_the_best_moment(block: LearningBlock) -> None:
    steps = list[int]()
    result, codes = learn_block(block, (TRAIN, HELD_OUT), BlockSchedule(120, 0.005, 0), steps.append)
    assert sum(steps) == 120
    assert result.stopped is None
    assert result.step > 0
    assert result.after < 0.9 * result.before
    for name, layer in (("up", block.layer.up), ("down", block.layer.down)):
        assert isinstance(layer, LearnedLinear)
        scale = layer.scale.clone()
        assert layer.settle(*codes[name]) > 0
        assert torch.equal(layer.learned()[0].view(torch.uint8), codes[name][0].view(torch.uint8))
        assert torch.equal(layer.scale, scale)
    assert held_out_error(block, HELD_OUT) == pytest.approx(result.after, rel=1e-5)


def test_what_gets_worse_keeps_its_codes(block: LearningBlock) -> None:
    before = {name: each.learned()[0] for name, each in learned_products(block)}
    result, codes = learn_block(block, (TRAIN, HELD_OUT), BlockSchedule(10, 1e4, 0), lambda steps: None)
    assert (result.after, result.step) == (result.before, 0)
    assert all(torch.equal(codes[name][0].view(torch.uint8), each.view(torch.uint8)) for name, each in before.items())


def test_steps_that_are_too_large_are_made_smaller(block: LearningBlock) -> None:
    """The first training makes the layer worse; each begins with the codes that were there."""
    steps = list[int]()
    result, codes = learn_block(block, (TRAIN, HELD_OUT), BlockSchedule(10, 0.2, 0), steps.append)
    assert 0 < result.after < result.before
    assert 0 < sum(steps) <= 10
    for name, layer in learned_products(block):
        layer.settle(*codes[name])
    assert held_out_error(block, HELD_OUT) == pytest.approx(result.after, rel=1e-5)


def learned_products(block: LearningBlock) -> Iterator[tuple[str, LearnedLinear]]:
    for name in ("up", "down"):
        layer = block.layer.get_submodule(name)
        assert isinstance(layer, LearnedLinear)
        yield name, layer


@pytest.mark.parametrize("bad", [3, 13], ids=["train", "held out"])
def test_a_loss_that_is_no_number_ends_it(block: LearningBlock, bad: int) -> None:
    def target(batch: int) -> torch.Tensor:
        found = block.target(batch)
        return found * float("nan") if batch == bad else found

    broken = LearningBlock(block.layer, block.output, target)
    result, _ = learn_block(broken, (TRAIN, HELD_OUT), BlockSchedule(12, 0.01, 0), lambda steps: None)
    order = [*BlockSchedule(12, 0.01, 0).order(TRAIN)]
    assert result.stopped == (0 if bad in HELD_OUT else order.index(bad) + 1)
    assert result.step <= (result.stopped or 0)


def test_every_batch_comes_by_in_another_order_each_time() -> None:
    schedule = BlockSchedule(40, 0.1, 3)
    order = [*schedule.order(range(20))]
    assert sorted(order[:20]) == sorted(order[20:]) == [*range(20)]
    assert order[:20] != order[20:]
    assert order == [*schedule.order(range(20))]


def test_learned_scales_are_those_of_the_best_moment(block: LearningBlock) -> None:
    for name, layer in learned_products(block):
        codes, scale = layer.learned()
        setattr(block.layer, name, LearnedLinear(codes, scale.bfloat16().float(), None, None, learn_scale=True))
    result, found = learn_block(block, (TRAIN, HELD_OUT), BlockSchedule(60, 0.005, 0, scales=True), lambda steps: None)
    assert 0 < result.after < result.before
    for name, layer in learned_products(block):
        before = layer.scale[:, 0].clone()
        layer.settle(*found[name])
        assert not torch.equal(layer.scale[:, 0], before)
        assert torch.equal(layer.scale, layer.scale.bfloat16().float())
    assert held_out_error(block, HELD_OUT) == pytest.approx(result.after, rel=1e-5)
