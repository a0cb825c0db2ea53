"""The descent that sees the output side: held against brute force, and against GPTQ's own where outputs are alike."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.quantize.codes.encoding import nearest_values
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.weights.gptq import MARGIN, compensation, descend, gptq_codes
from fp8q.quantize.weights.output_side import (
    OutputSide,
    descend_both,
    descend_input,
    moving_channels,
    nearest,
    revised_codes,
)

#: Every finite value of E4M3, ascending.
GRID = sorted({float(value) for value in E4M3.grid} | {-float(value) for value in E4M3.grid})


def positive(size: int, generator: torch.Generator) -> torch.Tensor:
    """Correlated second moments float32 [size, size] of few vectors."""
    vectors = torch.randn(size + 2, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return vectors.T @ vectors + 0.1 * torch.eye(size)


def problem(inputs: int, outputs: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Weights [in, out], nearest values, scale [out], H_I and H_O."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randn(inputs, outputs, generator=generator)
    scale = 0.05 + 0.05 * torch.rand(outputs, generator=generator)
    values = nearest_values(wanted / scale)
    return wanted, values, scale, positive(inputs, generator), positive(outputs, generator)


def error(
    wanted: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, h_in: torch.Tensor, h_out: torch.Tensor
) -> float:
    """tr(H_O E H_I Eᵀ) in FP64."""
    lost = (wanted.double() - values.double() * scale.double()).T
    return float(torch.trace(h_out.double() @ lost @ h_in.double() @ lost.T))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
def test_the_error_never_rises_and_no_neighbour_of_a_code_is_better(inputs: int, outputs: int, seed: int) -> None:
    wanted, values, scale, h_in, h_out = problem(inputs, outputs, seed)
    before = error(wanted, values, scale, h_in, h_out)
    for _ in range(20):  # until a whole call changes nothing
        start = values.clone()
        descend_both(wanted, values, scale, h_in, h_out)
        after = error(wanted, values, scale, h_in, h_out)
        assert after <= before * (1 + 1e-6)
        before = after
        if torch.equal(start, values):
            break
    else:
        pytest.fail("still moving")
    for j, i in product(range(inputs), range(outputs)):
        position = GRID.index(float(values[j, i]))
        for other in GRID[max(position - 1, 0) : position + 2]:
            changed = values.clone()
            changed[j, i] = other
            # MARGIN of the way to the minimum is left out, so a neighbour may win what that is worth
            step = (scale[i] * (changed[j, i] - values[j, i])) ** 2 * h_in[j, j] * h_out[i, i]
            assert error(wanted, changed, scale, h_in, h_out) >= after - 4 * MARGIN * float(step) - 1e-5 * after


def test_one_input_of_two_channels_has_the_codes_that_brute_force_finds() -> None:
    wanted, scale = torch.tensor([[1.03, 1.09]]), torch.ones(2)
    values, h_in, h_out = torch.tensor([[1.0, 1.125]]), torch.ones(1, 1), torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    near = [value for value in GRID if 0.5 <= value <= 2]
    best = min(product(near, near), key=lambda pair: error(wanted, torch.tensor([pair]), scale, h_in, h_out))
    descend_both(wanted, values, scale, h_in, h_out)
    assert values.tolist() == [[*best]]


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 16), (200, 40)])
def test_where_outputs_are_alike_the_codes_of_gptq_stay(inputs: int, outputs: int) -> None:
    wanted, values, scale, h_in, _ = problem(inputs, outputs, 3)
    for _ in range(30):  # until no move helps
        descend(wanted.clone(), values, scale, h_in)
    start = values.clone()
    descend_both(wanted, values, scale, h_in, torch.eye(outputs))
    assert torch.equal(values, start)


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 16), (200, 40)])
def test_the_error_falls_below_that_of_a_descent_that_takes_channels_as_alike(inputs: int, outputs: int) -> None:
    wanted, values, scale, h_in, h_out = problem(inputs, outputs, 4)
    descend(wanted.clone(), values, scale, h_in)
    before = error(wanted, values, scale, h_in, h_out)
    descend_both(wanted, values, scale, h_in, h_out)
    assert error(wanted, values, scale, h_in, h_out) < 0.9 * before


def test_a_channel_moves_by_what_those_before_it_left_of_its_slope() -> None:
    values, slopes, outputs = torch.zeros(2), torch.tensor([1.0, 0.9]), torch.tensor([[1.0, 0.95], [0.95, 1.0]])
    channels = moving_channels(values, slopes, 1.0, outputs)
    assert channels == [0, 1]
    passed_on = torch.zeros(2)
    assert descend_input(channels, values.numpy(), slopes.numpy(), 1.0, outputs.numpy(), passed_on.numpy())
    assert values.tolist() == pytest.approx([1.0, -0.05078125])  # of the slope 0.9 - 0.95
    assert moving_channels(torch.zeros(2), torch.zeros(2), 1.0, outputs) == []


@given(st.floats(-500, 500, width=32))
def test_the_nearest_value_is_that_of_the_whole_package(value: float) -> None:
    expected = float(nearest_values(torch.tensor([value])))
    assert abs(nearest(value) - value) == abs(expected - value)


def test_a_channel_without_a_gradient_stays_as_it_is() -> None:
    wanted, values, scale, h_in, h_out = problem(8, 4, 5)
    h_out[1] = h_out[:, 1] = 0
    start = values.clone()
    descend_both(wanted, values, scale, h_in, h_out)
    assert torch.equal(values[:, 1], start[:, 1])
    assert not torch.equal(values, start)


def test_codes_do_not_depend_on_the_number_of_threads() -> None:
    threads, codes = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            wanted, values, scale, h_in, h_out = problem(140, 60, 6)
            descend_both(wanted, values, scale, h_in, h_out)
            codes.append(values)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(codes[0], codes[1])


def revised(h_out: torch.Tensor, gradients: torch.Tensor, lost: float = 0.0) -> tuple[torch.Tensor, ...]:
    """The codes of GPTQ and the revised ones of a weight [out, 24], and the loss of both on held-out tokens with these
    `gradients` [tokens, out].
    """
    wanted, _, scale, h_in, _ = problem(24, len(h_out), 7)
    weight = wanted.T.contiguous()
    inputs = torch.randn(len(gradients), 24, generator=torch.Generator().manual_seed(8)) @ torch.linalg.cholesky(h_in).T
    side = OutputSide(h_out, inputs, gradients)
    compensated = compensation(h_in, lost)
    before = gptq_codes(weight, scale, compensated)
    after = revised_codes(weight, before, scale, compensated, side, lost)
    losses = (side.loss(weight, codes.float() * scale[:, None], lost) for codes in (before, after))
    return before.float(), after.float(), *map(torch.tensor, losses)


def drawn(h_out: torch.Tensor, tokens: int, seed: int) -> torch.Tensor:
    """Gradients float32 [tokens, out] whose second moments are those of `h_out`, but for chance."""
    draw = torch.Generator().manual_seed(seed)
    factor: torch.Tensor = torch.linalg.cholesky(h_out)
    return torch.randn(tokens, len(h_out), generator=draw) @ factor.T


def test_codes_are_revised_where_held_out_gradients_are_as_those_of_h_o() -> None:
    h_out = positive(16, torch.Generator().manual_seed(9))
    before, after, loss, least = revised(h_out, drawn(h_out, 2000, 10))
    assert not torch.equal(before, after)
    assert least < 0.8 * loss


def test_codes_of_gptq_stay_where_held_out_gradients_contradict_h_o() -> None:
    """Both channels err alike by H_O, and against each other on held-out tokens."""
    alike, against = torch.tensor([[1.0, 0.9], [0.9, 1.0]]), torch.tensor([[1.0, -0.9], [-0.9, 1.0]])
    before, after, _, _ = revised(alike, drawn(against, 2000, 10))
    assert torch.equal(before, after)
    before, after, _, _ = revised(alike, drawn(alike, 2000, 10))
    assert not torch.equal(before, after)


def test_codes_of_gptq_stay_where_the_loss_is_no_number() -> None:
    h_out = positive(16, torch.Generator().manual_seed(9))
    gradients = drawn(h_out, 50, 10)
    before, after, loss, _ = revised(h_out, gradients * float("nan"))
    assert loss.isnan()
    assert torch.equal(before, after)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.001]))
def test_the_loss_on_held_out_tokens_never_rises(seed: int, lost: float) -> None:
    h_out, other = (positive(8, torch.Generator().manual_seed(seed + part)) for part in range(2))
    _, _, before, after = revised(h_out, drawn(other, 40, seed), lost)
    assert after <= before
