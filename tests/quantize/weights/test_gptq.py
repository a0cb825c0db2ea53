"""Error-compensating rounding: what it must equal, what it must beat, and that it follows the formulas of the paper."""

import weakref
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.calibrate.measure.moments import SecondMoments, load_moments
from fp8q.core.errors import InputError
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.clip import lost_share
from fp8q.quantize.weights.channels import channel_scales
from fp8q.quantize.weights.gptq import (
    BLOCK,
    DAMPING,
    MARGIN,
    RUN,
    Compensations,
    compensation,
    gptq_codes,
    gptq_round,
    ridge_weights,
)
from fp8q.quantize.weights.no_waiting import factor_in_place

WIDTHS = (24, BLOCK, 2 * BLOCK + 9)


def problem(width: int, seed: int, outputs: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight [outputs, width] BF16, its amax scales, and the second moments of correlated inputs of uneven size."""
    generator = torch.Generator().manual_seed(seed)
    weight = (0.02 * torch.randn(outputs, width, generator=generator)).to(torch.bfloat16)
    few = torch.randn(4 * width, max(width // 4, 1), generator=generator)
    x = few @ torch.randn(few.shape[1], width, generator=generator) + 0.3 * torch.randn(
        4 * width, width, generator=generator
    )
    x *= torch.exp2(2 * torch.randn(width, generator=generator))
    scale = channel_scales(weight, "amax")
    assert scale is not None
    return weight, scale, x.T @ x


def product_error(
    weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor
) -> torch.Tensor:
    """(w - s c) H (w - s c)ᵀ of each channel, float64 [out]."""
    lost = weight.double() - codes.double() * scale.double()[:, None]
    return ((lost @ moments.double()) * lost).sum(1)


def damped(moments: torch.Tensor) -> torch.Tensor:
    """What is added to the diagonal, added in float64."""
    wide = moments.double()
    return wide + DAMPING * wide.diagonal().mean() * torch.eye(len(wide))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(3))
def test_the_product_errs_far_less_than_with_nearest_rounding(width: int, seed: int) -> None:
    weight, scale, moments = problem(width, seed)
    nearest = product_error(weight, encode(weight, scale[:, None]), scale, moments).sum()
    made = product_error(weight, gptq_codes(weight, scale, compensation(moments)), scale, moments).sum()
    assert made < 0.5 * nearest


@pytest.mark.parametrize("width", WIDTHS)
def test_uncorrelated_inputs_give_the_codes_of_nearest_rounding(width: int) -> None:
    weight, scale, moments = problem(width, 3)
    for uncorrelated in (torch.eye(width), torch.diag(moments.diagonal()), torch.zeros(width, width)):
        codes = gptq_codes(weight, scale, compensation(uncorrelated))
        np.testing.assert_array_equal(
            codes.view(torch.uint8).numpy(), encode(weight, scale[:, None]).view(torch.uint8).numpy()
        )


@pytest.mark.parametrize("width", [48, 2 * BLOCK + 9])
def test_the_factor_is_the_upper_cholesky_factor_of_the_inverse_in_falling_order(width: int) -> None:
    _, _, moments = problem(width, 4)
    found = compensation(moments)
    assert moments.diagonal()[found.order].tolist() == sorted(moments.diagonal().tolist(), reverse=True)
    ordered = damped(moments)[found.order][:, found.order]
    expected = torch.linalg.cholesky(torch.linalg.inv(ordered), upper=True)
    np.testing.assert_allclose(found.factor.numpy(), expected.numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.moments.numpy(), ordered.numpy(), rtol=2e-7)


@pytest.mark.parametrize("inputs", [2, RUN + 1, BLOCK + 1])
def test_errors_reach_the_last_input_within_a_block_and_behind_it(inputs: int) -> None:
    """1.03 becomes 1, and 0.98 makes up for it: 0.95 is nearer to 0.9375 than to 1."""
    left, factor = torch.zeros(inputs, 1), torch.eye(inputs)
    left[0], left[-1], factor[0, -1] = 1.03, 0.98, 1.0
    values = gptq_round(left, torch.ones(1), factor)
    assert [float(values[0]), float(values[-1])] == [1.0, 0.9375]
    assert float(left.square().sum()) == pytest.approx(0.03**2 + 0.0125**2, rel=1e-3)


def test_moments_are_damped_by_a_thousandth_of_their_mean() -> None:
    """Of 6 and 2 that is 0.004; without correlation U is one over the root of the diagonal."""
    found = compensation(torch.diag(torch.tensor([2.0, 6.0])))
    assert found.order.tolist() == [1, 0]
    np.testing.assert_allclose(found.moments.numpy(), [[6.004, 0], [0, 2.004]], rtol=1e-6)
    np.testing.assert_allclose(found.factor.numpy(), [[6.004**-0.5, 0], [0, 2.004**-0.5]], rtol=1e-6)


def test_one_direction_that_holds_all_the_energy_leaves_the_factor_finite() -> None:
    direction = torch.randn(1500, generator=torch.Generator().manual_seed(10)).abs() + 1
    factor = compensation(torch.outer(direction, direction)).factor
    assert torch.isfinite(factor).all()
    assert (factor.diagonal() > 0).all()


def test_each_rounding_is_followed_by_the_best_move_of_what_is_left() -> None:
    """One input at a time, the optimum solved anew by least squares in float64 (the paper's equation 2), where the code
    uses one factor.
    """
    weight, scale, moments = problem(12, 5, outputs=6)
    found = compensation(moments)
    wide = damped(moments)[found.order][:, found.order]
    wanted = weight[:, found.order].double()
    left, expected = wanted.clone(), torch.empty(6, 12)
    for j in range(12):
        expected[:, j] = encode(left[:, j].float(), scale).float()
        error = left[:, j] - expected[:, j].double() * scale.double()
        if j + 1 < 12:
            left[:, j + 1 :] += error[:, None] * torch.linalg.solve(wide[j + 1 :, j + 1 :], wide[j + 1 :, j])[None, :]
    left = wanted.float().T.contiguous()
    values = gptq_round(left, scale, found.factor)
    errors = left.square().sum(0) * scale.square()
    np.testing.assert_array_equal(values.T.numpy(), expected.numpy())
    np.testing.assert_allclose(errors.numpy(), product_error(wanted, expected, scale, wide).numpy(), rtol=1e-4)


#: Width and seed of a problem.
problems = st.tuples(st.sampled_from([2, 5, 24, BLOCK + 3]), st.integers(0, 10_000))


@settings(max_examples=40)
@given(problems)
def test_no_channel_errs_more_than_rounded_in_turn_and_all_less_than_rounded_to_nearest(drawn: tuple[int, int]) -> None:
    weight, scale, moments = problem(*drawn, outputs=7)
    found, wide = compensation(moments), damped(moments)
    codes = gptq_codes(weight, scale, found)
    made = product_error(weight, codes, scale, wide)
    left = weight[:, found.order].float().T.contiguous()
    gptq_round(left, scale, found.factor)
    in_turn = left.square().sum(0) * scale.square()
    assert (made <= in_turn * (1 + 1e-4)).all()
    assert made.sum() <= product_error(weight, encode(weight, scale[:, None]), scale, wide).sum() * (1 + 1e-9)
    assert np.isin(codes.float().abs().numpy(), E4M3.grid).all()


@given(problems)
def test_no_other_code_for_one_weight_lowers_the_error(drawn: tuple[int, int]) -> None:
    """Each weight is tried with the codes below and above its own, in float64, when passes go on to the end."""
    weight, scale, moments = problem(min(drawn[0], 5), drawn[1], outputs=3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fp8q.quantize.weights.gptq.PASSES", 100)
        patched.setattr("fp8q.quantize.weights.gptq.WORTHWHILE", 0.0)
        codes = gptq_codes(weight, scale, compensation(moments)).double()
    wide = damped(moments)
    grid = torch.from_numpy(np.unique(np.concatenate([-E4M3.grid, E4M3.grid]))).double()
    least = product_error(weight, codes, scale, wide)
    for row, column, step in product(range(3), range(codes.shape[1]), (-1, 1)):
        other = codes.clone()
        place = int(torch.searchsorted(grid, codes[row, column])) + step
        if 0 <= place < len(grid):
            other[row, column] = grid[place]
            gap = (other - codes)[row, column] * scale[row]
            slack = MARGIN * wide[column, column] * gap**2
            assert product_error(weight, other, scale, wide)[row] >= least[row] * (1 - 1e-5) - slack


def test_each_thread_rounds_a_part_of_the_channels() -> None:
    weight, scale, moments = problem(2 * BLOCK + 9, 12, outputs=41)
    found, threads = compensation(moments), torch.get_num_threads()
    lost = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            lost.append(product_error(weight, gptq_codes(weight, scale, found), scale, damped(moments)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for some in lost[1:]:  # other shapes of a GEMM may round it otherwise, and change a code
        np.testing.assert_allclose(some.numpy(), lost[0].numpy(), rtol=0.05)
        assert float(some.sum()) == pytest.approx(float(lost[0].sum()), rel=0.01)


def test_a_large_matrix_is_rounded_some_channels_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale, moments = problem(24, 2, outputs=40)
    found = compensation(moments)
    expected = torch.cat([gptq_codes(*part, found) for part in zip(weight.split(7), scale.split(7), strict=True)])
    monkeypatch.setattr("fp8q.quantize.weights.gptq.VALUES", 24 * 7)
    assert torch.equal(gptq_codes(weight, scale, found).view(torch.uint8), expected.view(torch.uint8))


def test_two_equal_inputs_cancel_each_other_s_errors_worked_by_hand() -> None:
    """Scale 1, weights 17 and 17: both round to 16 (a tie goes to the even code), 2 off together.

    Told of the first's error, the second is rounded from almost 18.
    """
    weight, scale = torch.tensor([[17.0, 17.0]]), torch.ones(1)
    assert encode(weight, scale[:, None]).float().tolist() == [[16.0, 16.0]]
    assert gptq_codes(weight, scale, compensation(torch.ones(2, 2))).float().tolist() == [[16.0, 18.0]]


def test_an_input_that_is_always_zero_is_rounded_to_nearest_and_disturbs_no_other() -> None:
    weight, scale, moments = problem(40, 6)
    dead = torch.tensor([0, 7, 39])
    moments[dead], moments[:, dead] = 0, 0
    alive = torch.tensor([i for i in range(40) if i not in dead.tolist()])
    codes = gptq_codes(weight, scale, compensation(moments)).float()
    np.testing.assert_array_equal(codes[:, dead].numpy(), encode(weight, scale[:, None]).float()[:, dead].numpy())
    assert torch.isfinite(codes).all()
    nearest = encode(weight, scale[:, None])
    kept = moments[alive][:, alive]
    assert (
        product_error(weight[:, alive], codes[:, alive], scale, kept).sum()
        < 0.6 * product_error(weight[:, alive], nearest[:, alive], scale, kept).sum()
    )


def test_codes_stay_on_the_grid_where_compensation_leaves_it() -> None:
    """Almost equal inputs drive what is left beyond the amax; it is clipped to the largest code, never NaN."""
    weight, scale, moments = problem(64, 7)
    codes = gptq_codes(weight * 3, scale, compensation(moments + 1e4 * moments.max()))
    assert codes.dtype == torch.float8_e4m3fn
    assert float(codes.float().abs().max()) == E4M3.max
    assert np.isin(codes.float().abs().numpy(), E4M3.grid).all()


def test_the_same_moments_give_the_same_bytes() -> None:
    weight, scale, moments = problem(150, 8)
    first, second = (gptq_codes(weight, scale, compensation(moments.clone())).view(torch.uint8) for _ in range(2))
    assert torch.equal(first, second)


def test_a_module_of_which_too_little_was_seen_has_no_compensation(tmp_path: Path) -> None:
    assert Compensations(tmp_path, {"down": "down"}, {"down": 0.0}, {"down"}).get("down") is None


def test_members_of_a_group_share_their_moments(tmp_path: Path) -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(9))
    moments = SecondMoments(tmp_path)
    moments.add("layer.q", x)
    moments.close()
    factors = Compensations(tmp_path, {"layer.k": "layer.q", "layer.q": "layer.q"}, {"layer.k": 0.5, "layer.q": 0.5})
    shared = factors.get("layer.k")
    assert shared is not None
    assert shared is factors.get("layer.q")
    np.testing.assert_array_equal(
        shared.factor.numpy(), compensation(load_moments(tmp_path, "layer.q"), 0.5).factor.numpy()
    )


def test_moments_are_let_go_of_before_they_are_factored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a wide input they are gigabytes beside the factor."""
    moments = SecondMoments(tmp_path)
    moments.add("layer.q", torch.randn(50, 6, generator=torch.Generator().manual_seed(9)))
    moments.close()
    held = list[weakref.ref[torch.Tensor]]()
    factored = list[bool]()

    def loaded(folder: Path, name: str, first: float, window: int | None) -> torch.Tensor:
        tensor = load_moments(folder, name, first, window)
        held.append(weakref.ref(tensor))
        return tensor

    def factor(matrix: torch.Tensor) -> None:
        factored.append(held[0]() is None)
        factor_in_place(matrix)

    monkeypatch.setattr("fp8q.quantize.weights.gptq.load_moments", loaded)
    monkeypatch.setattr("fp8q.quantize.weights.gptq.factor_in_place", factor)
    assert Compensations(tmp_path, {}, {"layer.q": 0.0}).get("layer.q") is not None
    assert factored == [True]


def test_moments_that_overflow_are_refused(tmp_path: Path) -> None:
    moments = SecondMoments(tmp_path)
    moments.add("layer.q", torch.full((2, 3), 1e30))
    moments.close()
    with pytest.raises(InputError) as caught:
        Compensations(tmp_path, {}, {"layer.q": 0.0}).get("layer.q")
    assert str(caught.value) == (
        "layer.q: the second moments of its input exceed FP32; use --weight-rounding nearest, or keep it in BF16 "
        "with --skip layer.q"
    )


def test_weights_make_up_for_what_rounding_their_inputs_loses_as_ridge_regression_does() -> None:
    """The oracle: least squares with a row for each input's noise and one for its damping, in float64."""
    weight, _, moments = problem(30, 11, outputs=5)
    found = compensation(moments, lost=0.05)
    made = ridge_weights(weight[:, found.order].float().T.contiguous(), found)
    wide, noise = moments.double(), 0.05 * moments.diagonal().double()
    damping = torch.full_like(noise, DAMPING * float(noise.mean() / 0.05))
    square = torch.linalg.cholesky(wide + 1e-12 * torch.eye(30), upper=True)
    rows = torch.cat([square, noise.sqrt().diag(), damping.sqrt().diag()])
    wanted = weight.double().T
    goal = torch.cat([square @ wanted, torch.zeros(30, 5, dtype=torch.float64), damping.sqrt()[:, None] * wanted])
    expected = torch.linalg.lstsq(rows, goal, driver="gelsd").solution
    np.testing.assert_allclose(made.numpy(), expected[found.order].numpy(), rtol=1e-3, atol=1e-4)


def test_two_inputs_of_which_one_repeats_the_other_share_their_weight_worked_by_hand() -> None:
    """x twice, energy 1 each, w = (1, 0), a tenth of each lost: (H + N) w* = H w, so that w* = (1, 1) / 2.1."""
    found = compensation(torch.ones(2, 2), lost=0.1)
    made = ridge_weights(torch.tensor([[1.0], [0.0]]), found)
    np.testing.assert_allclose(made.numpy(), [[1 / 2.1], [1 / 2.1]], atol=5 * DAMPING)  # damping pulls toward (1, 0)


@pytest.mark.parametrize("seed", range(3))
def test_products_of_rounded_inputs_err_less_where_their_rounding_is_known(seed: int) -> None:
    """Inputs that nearly repeat each other, really rounded to E4M3, and other ones of the same kind."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(8, 40, generator=random)
    learned, fresh = (
        torch.randn(4000, 8, generator=random) @ mix + 0.02 * torch.randn(4000, 40, generator=random) for _ in range(2)
    )
    weight = torch.randn(16, 40, generator=random).bfloat16()
    unit = learned.abs().max() / E4M3.max
    seen, given = (encode(x, unit).float() * unit for x in (learned, fresh))
    lost = float((seen - learned).square().sum() / learned.square().sum())
    scale = weight.float().abs().amax(1) / E4M3.max

    def error(lost: float) -> float:
        codes = gptq_codes(weight, scale, compensation(learned.T @ learned, lost))
        return float((fresh @ weight.float().T - given @ (codes.float() * scale[:, None]).T).square().sum())

    assert error(lost) < 0.8 * error(0.0)


def test_a_share_of_the_energy_is_what_decibels_say() -> None:
    assert [lost_share(decibels) for decibels in (None, 0.0, 10.0, 30.0)] == [0.0, 1.0, 0.1, 0.001]


def test_threads_that_share_a_weight_round_it_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, tokens = torch.randn(96, 64).to(torch.bfloat16), torch.randn(512, 64)
    scale, factored = torch.full((96,), 0.01), compensation(tokens.T @ tokens)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr("fp8q.quantize.weights.gptq.VALUES", 64 * 40)
    try:
        shared = gptq_codes(weight, scale, factored)
        torch.set_num_threads(1)
        alone = gptq_codes(weight, scale, factored)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(shared.view(torch.uint8), alone.view(torch.uint8))
