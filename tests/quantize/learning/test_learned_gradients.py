"""Learned layers whose gradients are rounded, and the log of their training: by hand, killed, and resumed."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8q.options import LearningGradients
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.learning.linear import LearnedLinear, learned_layers, round_gradients
from fp8q.quantize.learning.training import Listener, Schedule, learn
from fp8q.quantize.training.training_log import read_log

from .test_training import TEXT, codes, models

__all__ = ["models"]
SCHEDULE = Schedule(epochs=2, batch_size=4, learning_rate=0.005, seed=0, gradients="e5m2")


@pytest.mark.parametrize("gradients", ["fp32", "bf16", "e4m3", "e5m2"])
def test_the_gradient_of_an_output_is_rounded_before_both_products(gradients: LearningGradients) -> None:
    layer = LearnedLinear(encode(torch.eye(3), torch.tensor(1.0)), torch.ones(3), None, None)
    round_gradients(torch.nn.Sequential(layer), gradients)
    x = torch.ones(1, 3, requires_grad=True)
    back = torch.tensor([[1.1, 448.0, 2.0**-17]])  # E4M3's scale is 1, E5M2's 2^-7
    layer(x).backward(back)
    assert x.grad is not None
    assert layer.weight.grad is not None
    expected = {
        "fp32": [1.1, 448.0, 2.0**-17],
        "bf16": [1.1015625, 448.0, 2.0**-17],
        "e4m3": [1.125, 448.0, 0.0],  # a code of 3 bits; half of the smallest is 2^-10
        "e5m2": [1.0, 448.0, 2.0**-17],  # of 2 bits: 1.1 is nearer to 1 than to 1.25
    }[gradients]
    assert torch.equal(x.grad, torch.tensor([expected]))
    assert torch.equal(layer.weight.grad, x.grad.T.expand(3, 3))


def train(pair: tuple[torch.nn.Module, torch.nn.Module], folder: Path, listener: Listener) -> dict[str, bytes]:
    learn(pair, TEXT, SCHEDULE, folder, listener)  # type: ignore[arg-type]
    return codes(pair[1])  # type: ignore[arg-type]


def test_a_killed_training_goes_on_to_the_same_bytes_and_the_same_log(
    models: tuple[torch.nn.Module, torch.nn.Module], tmp_path: Path
) -> None:
    class Killed(BaseException):
        """A kill."""

    taken, again = list[int](), deepcopy(models)

    def advance(steps: int) -> None:
        taken.append(steps)
        if len(taken) == 8:
            raise Killed

    whole = train(models, tmp_path / "whole", Listener(lambda steps: None, lambda ids: "", log=(tmp_path / "a", 1)))
    with pytest.raises(Killed):
        train(deepcopy(again), tmp_path / "killed", Listener(advance, lambda ids: "", log=(tmp_path / "b", 1)))
    assert train(again, tmp_path / "killed", Listener(taken.append, lambda ids: "", log=(tmp_path / "b", 1))) == whole
    one, other = read_log(tmp_path / "a"), read_log(tmp_path / "b")
    assert one.steps.tolist() == other.steps.tolist() == list(range(12))
    layers = [*learned_layers(models[1])]
    assert one.tensors == other.tensors
    assert len(layers) == 14
    assert {f"{name}.{kind}" for name in layers for kind in ("weight", "gradient")} < set(one.tensors)
    for column in ("amax", "e5m2_lost"):
        np.testing.assert_array_equal(one.column(column)[:, one.of_kind("gradient")][0] > 0, True)
        np.testing.assert_array_equal(one.column(column), other.column(column))
    assert np.isfinite(one.loss).all()


def test_the_log_of_rounded_gradients_is_of_gradients_before_their_rounding(
    models: tuple[torch.nn.Module, torch.nn.Module], tmp_path: Path
) -> None:
    train(models, tmp_path / "work", Listener(lambda steps: None, lambda ids: "", log=(tmp_path / "log", 4)))
    log = read_log(tmp_path / "log")
    assert log.steps.tolist() == [0, 4, 8]
    assert (log.column("e5m2_lost")[:, log.of_kind("gradient")] > 1e-4).all()  # values on the grid would lose nothing
