"""A learned layer: its grid, its gradients by hand and against ModelOpt's, and the codes that it begins with."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modelopt.torch.quantization.tensor_quant import scaled_e4m3

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.learning.linear import LearnedLinear, on_grid
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.quantize.scales.decisions import TensorScale

TWO = TensorScale(
    method="amax", amax=4.0, clip=448 / 64, scale=2.0**-6, saturation=0, underflow=0, sqnr_db=None, terms=2
)
ONE = TWO.model_copy(update={"terms": 1, "sqnr_db": 30.0})


def spacing(values: torch.Tensor) -> torch.Tensor:
    """The distance of E4M3 numbers to the next larger magnitude."""
    return torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(2.0**-6)))) / 8


def test_gradients_pass_where_values_have_codes_and_nowhere_else() -> None:
    x = torch.tensor([0.3, -448.0, 449.0, -1e4, 0.0], requires_grad=True)
    rounded = on_grid(x, torch.tensor(1.0))
    assert rounded.tolist() == [0.3125, -448.0, 448.0, -448.0, 0.0]
    (rounded * torch.tensor([1.0, 2, 3, 4, 5])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 2, 0, 0, 5]


@given(st.integers(0, 2**31), st.sampled_from([0.5, 1.0, 3.0]))
def test_values_and_gradients_are_those_of_modelopt(seed: int, amax: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    values, back = torch.randn(64, generator=draw), torch.randn(64, generator=draw)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    scale = torch.tensor(amax) / E4M3.max
    rounded, expected = on_grid(ours, scale), scaled_e4m3(theirs, torch.tensor(amax), None, 4, 3)
    rounded.backward(back)
    expected.backward(back)
    assert ours.grad is not None
    assert theirs.grad is not None
    # theirs multiplies by the reciprocal of the scale, so a value at a midpoint may get the code beside
    assert ((rounded - expected).abs() <= spacing(expected / scale) * scale * 1.001).all()
    assert ((rounded - expected).abs() > 1e-3 * expected.abs()).float().mean() < 0.05
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("activation", [None, ONE, TWO], ids=["weights alone", "one code", "two codes"])
def test_a_layer_begins_as_the_reference_computes(activation: TensorScale | None) -> None:
    draw = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(shape, generator=draw) for shape in ((24, 32), (5, 7, 32), (24,)))
    x = x.bfloat16().float()  # of which two codes lose nothing
    scale = weight.abs().amax(1) / E4M3.max
    codes = encode(weight, scale[:, None])
    learned = LearnedLinear(codes, scale, activation, bias)
    given_scale = None if activation is None else torch.tensor(activation.scale)
    reference = FP8Linear(codes, scale, given_scale, bias, "exact", activation.terms if activation else 1)
    assert torch.allclose(learned(x), reference(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(learned.learned()[0], codes)


def test_half_a_spacing_changes_a_code_and_scales_stay() -> None:
    codes = torch.tensor([[1.0, 448.0], [-2.0, 0.0]]).to(torch.float8_e4m3fn)
    layer = LearnedLinear(codes, torch.tensor([0.5, 2.0]), None, None)
    with torch.no_grad():  # spacings are 0.125 and 32, 0.25 and 2^-9
        layer.weight.add_(0.6 * torch.tensor([[0.125 * 0.5, 32 * 0.5], [-0.1 * 2.0, 2.0**-9 * 2.0]]))
    assert layer.learned()[0].float().tolist() == [[1.125, 448.0], [-2.0, 2.0**-9]]  # none is beyond the largest
    assert layer.scale.flatten().tolist() == [0.5, 2.0]
    layer.restore()
    assert torch.equal(layer.learned()[0], codes)
    other = torch.tensor([[1.125, 448.0], [-2.0, 0.0]]).to(torch.float8_e4m3fn)
    assert layer.settle(other, torch.tensor([0.5, 2.0])) == 1
    assert codes.tolist() == [[1.0, 448.0], [-2.0, 0.0]]  # a view of a file stays as it is
    assert layer.weight.tolist() == [[0.5625, 224.0], [-4.0, 0.0]]


def test_the_gradient_is_that_of_the_weight_and_nothing_else_is_learned() -> None:
    codes = torch.tensor([[1.0, 4.0]]).to(torch.float8_e4m3fn)
    layer = LearnedLinear(codes, torch.tensor([0.5]), None, None)
    layer(torch.tensor([[3.0, 5.0]])).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3.0, 5.0]]
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_a_gain_moves_the_scale_of_its_channel_on_the_grid_of_bf16() -> None:
    codes = torch.tensor([[1.0, 4.0], [2.0, -8.0]]).to(torch.float8_e4m3fn)
    layer = LearnedLinear(codes, torch.tensor([0.5, 2.0]), None, None, learn_scale=True)
    x = torch.tensor([[3.0, 5.0]])
    assert layer(x).tolist() == [[11.5, -68.0]]
    layer(x).sum().backward()
    assert layer.gain is not None
    assert layer.gain.grad is not None
    assert layer.gain.grad.tolist() == [[11.5], [-68.0]]  # each channel's codes under its scale, times the input
    with torch.no_grad():
        layer.gain.copy_(torch.tensor([[1 + 0.4 * 2**-7], [1 + 0.6 * 2**-7]]))  # of 8 bits: a half is nearer to neither
    found, scale = layer.learned()
    assert torch.equal(found, codes)
    assert scale.tolist() == [0.5, 2.0 + 2**-6]
    assert torch.allclose(layer(x), torch.tensor([[11.5, -68.0 * (1 + 2**-7)]]), rtol=1e-6)
    assert layer.settle(found, scale) == 0
    assert layer.gain.tolist() == [[1.0], [1.0]]
    assert layer.learned()[1].tolist() == [0.5, 2.0 + 2**-6]


def test_scales_that_are_no_bf16_numbers_begin_as_they_are() -> None:
    codes, scale = torch.tensor([[1.0]]).to(torch.float8_e4m3fn), torch.tensor([0.1])
    layer = LearnedLinear(codes, scale, None, None, learn_scale=True)
    assert torch.equal(layer.learned()[1], scale)
    assert layer(torch.ones(1, 1)).item() == scale.item()
