"""Training that loses as in FP8: rounding against ml_dtypes, scales by history by hand, gradients of a GEMM."""

import ml_dtypes
import numpy as np
import pytest
import torch
from emulation import EmulatedLinear, Emulation, emulate
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp8q.options import GradientFormat
from fp8q.quantize.codes.formats import E4M3, E5M2, FORMATS
from fp8q.quantize.training.emulation import DelayedScale, grid_values

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def on_grid(x: torch.Tensor, name: str, scale: float = 1.0) -> torch.Tensor:
    """Round by ml_dtypes, saturating."""
    largest = FORMATS[name].max
    quotient = np.clip(x.detach().numpy() / np.float32(scale), -largest, largest)
    return torch.from_numpy(quotient.astype(TYPES[name]).astype(np.float32)) * scale


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), st.sampled_from(["e4m3", "e5m2"]))
def test_values_are_those_of_ml_dtypes(values: list[float], name: str) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(grid_values(x, 0.5, FORMATS[name]), on_grid(x, name, 0.5))


def test_nan_stays_nan_in_both_formats() -> None:
    for format_ in (E4M3, E5M2):
        assert grid_values(torch.tensor([float("nan")]), 1.0, format_).isnan().all()


def test_a_scale_follows_from_the_amax_before_it() -> None:
    scale = DelayedScale(E4M3, history=2)
    assert scale(torch.tensor([448.0, 1.0])).tolist() == [448.0, 1.0]  # the first by its own amax
    assert scale(torch.tensor([4480.0, 1.0])).tolist() == [448.0, 1.0]  # ten times the history saturates
    assert scale(torch.tensor([4480.0, 0.005])).tolist() == [4480.0, 0.0]  # scale 10: half of 10 / 512 is 0.0098
    assert scale(torch.tensor([1.0])).tolist() == [1.015625]  # 0.1 is 0.1015625 in E4M3
    assert scale.amax.tolist() == [1.0, 4480.0]
    assert scale(torch.tensor([float("nan")])).isnan().all()
    assert scale.amax.tolist() == [1.0, 4480.0]  # NaN is no amax


def test_zeros_alone_have_no_scale() -> None:
    scale = DelayedScale(E5M2, history=4)
    assert scale(torch.zeros(3)).tolist() == [0, 0, 0]
    assert scale(torch.tensor([57344.0])).tolist() == [57344.0]


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_gradients_are_products_of_rounded_tensors(gradients: GradientFormat) -> None:
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 16, generator=draw))
    how = Emulation(gradients, fixed_gradient_scale=2.0**-10)
    emulated = EmulatedLinear(layer, how)
    emulated.of_input.fixed = emulated.of_weight.fixed = 2.0**-5
    x = torch.randn(4, 16, generator=draw, requires_grad=True)
    back = torch.randn(4, 8, generator=draw) / 100
    y = emulated(x)
    y.backward(back)
    rounded_x, rounded_weight = on_grid(x, "e4m3", 2.0**-5), on_grid(layer.weight, "e4m3", 2.0**-5)
    rounded_back = on_grid(back, gradients, 2.0**-10)
    assert x.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close(y, rounded_x @ rounded_weight.T + layer.bias)
    torch.testing.assert_close(x.grad, rounded_back @ rounded_weight)
    torch.testing.assert_close(layer.weight.grad, rounded_back.T @ rounded_x)


def test_without_a_scale_small_gradients_die_in_e4m3_alone() -> None:
    grads: dict[str, list[float]] = {}
    formats: tuple[GradientFormat, ...] = ("e4m3", "e5m2")
    for gradients in formats:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        emulate(model, ["0", "2"], Emulation(gradients, fixed_gradient_scale=1.0))
        (model(torch.randn(2000, 8)) - 1).square().mean().mul(0.1).backward()  # of one output: 1e-4 and below
        grads[gradients] = [
            float(parameter.grad.abs().max())
            for parameter in model.parameters()
            if parameter.grad is not None and parameter.dim() > 1
        ]
    assert grads["e4m3"] == [0.0, 0.0]  # below half of E4M3's 2^-9
    assert min(grads["e5m2"]) > 0


def test_other_layers_than_linear_ones_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^0: is no torch.nn.Linear but a Conv1d$"):
        emulate(nn.Sequential(nn.Conv1d(1, 1, 1)), ["0"])
