"""The weights that rounding layer by layer goes toward."""

import numpy as np
import pytest
import torch

from fp8q.quantize.weights.ridge_target import RIDGES, MomentSums, ridge_factor, ridge_targets


def halves(tokens: torch.Tensor, lost: torch.Tensor) -> tuple[MomentSums, MomentSums]:
    """Sums of the even and of the odd of `tokens` [tokens, in], of which `lost` [tokens, out] was lost."""
    made = tuple(MomentSums(tokens.shape[1], lost.shape[1]) for _ in range(2))
    for half, sums in enumerate(made):
        sums.add(tokens[half::2], lost[half::2])
    return made[0], made[1]


@pytest.mark.parametrize("seed", range(3))
def test_the_target_is_the_ridge_regression_of_the_float_outputs(seed: int) -> None:
    """Least squares in float64 on the inputs themselves, with √λ rows for λ, where what was lost follows from the
    inputs, so that λ is the weakest.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 12, generator=generator) @ torch.randn(12, 12, generator=generator)
    got, weight = 0.8 * x, torch.randn(5, 12, generator=generator)
    mean = float((got.T @ got).diagonal().double().mean())
    ridge = (RIDGES[-1] * mean) ** 0.5 * torch.eye(12, dtype=torch.float64)
    rows = torch.cat([got.double(), ridge])
    residue = got @ torch.randn(12, 5, generator=generator)
    wanted = torch.cat([x.double() @ weight.double().T + residue.double(), ridge @ weight.double().T])
    expected = torch.linalg.lstsq(rows, wanted).solution.T
    (found,) = ridge_targets([weight], *halves(got, (x - got) @ weight.T + residue))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)


def test_what_is_lost_by_chance_alone_is_not_made_up_for() -> None:
    """Two tokens of a half say that 1 is lost for each, and two of the other that it is -1."""
    tokens, lost = torch.ones(4, 1), torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    weight = torch.tensor([[10.0]])
    assert ridge_targets([weight], *halves(tokens, lost))[0].tolist() == [[10.0]]
    assert float(ridge_targets([weight], *halves(tokens, lost.abs()))[0]) == pytest.approx(10 + 4 / 4.04)


def test_lambda_is_what_is_best_on_the_other_half_worked_by_hand() -> None:
    """One half says that 6 is lost where the input is 2: alone it gives 12 / (4 + λ) with λ of 8 · (4, 1, ¼ …). The
    other says 4, and so wants 8 / 4 = 2, which λ = 2 gives. Both together give 20 / (8 + 2).
    """
    first, second = halves(torch.tensor([[2.0], [2.0]]), torch.tensor([[6.0], [4.0]]))
    factor = ridge_factor(first.moments.double(), torch.tensor(2.0))
    assert float(torch.cholesky_solve(first.lost, factor)) == pytest.approx(2, rel=1e-6)
    assert float(ridge_targets([torch.tensor([[10.0]])], first, second)[0]) == pytest.approx(12, rel=1e-6)


def test_a_weight_makes_up_for_what_the_layer_before_lost_worked_by_hand() -> None:
    """Two tokens, each 3 in the float model and 2 in the quantized one: H = 8, λ = 0.08, M = 2·10·(3-2)·2 = 40, and w*
    is w + 40 / 8.08. Then one more channel, of a GEMM beside it, that has lost nothing.
    """
    sums = halves(torch.full((2, 1), 2.0), torch.tensor([[10.0, 0.0], [10.0, 0.0]]))
    found = ridge_targets([torch.tensor([[10.0]])] * 2, *sums)
    assert float(found[0]) == pytest.approx(10 + 40 / 8.08, rel=1e-6)
    assert float(found[1]) == 10


def test_one_batch_alone_has_nothing_to_choose_lambda_on_and_the_weight_stays() -> None:
    learned, none = MomentSums(1, 1), MomentSums(1, 1)
    learned.add(torch.tensor([[2.0]]), torch.tensor([[10.0]]))
    assert ridge_targets([torch.tensor([[10.0]])], learned, none)[0].tolist() == [[10.0]]


def test_moments_that_overflowed_leave_the_weight_to_whoever_names_them() -> None:
    sums = halves(torch.full((2, 1), 3e38), torch.ones(2, 1))
    assert ridge_targets([torch.tensor([[10.0]])], *sums)[0].tolist() == [[10.0]]
