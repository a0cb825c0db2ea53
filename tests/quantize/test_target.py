"""The weights that rounding layer by layer goes toward."""

import numpy as np
import pytest
import torch

from fp8q.quantize.target import RIDGES, Sums, regression, target


def halves(tokens: torch.Tensor, drift: torch.Tensor, residue: torch.Tensor | None = None) -> tuple[Sums, Sums]:
    """Sums of the even and of the odd of `tokens` [tokens, in]."""
    made = tuple(Sums(tokens.shape[1], None if residue is None else residue.shape[1]) for _ in range(2))
    for half, sums in enumerate(made):
        sums.add(tokens[half::2], drift[half::2], (drift if residue is None else residue)[half::2])
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
    lost = got @ torch.randn(12, 5, generator=generator)
    wanted = torch.cat([x.double() @ weight.double().T + lost.double(), ridge @ weight.double().T])
    expected = torch.linalg.lstsq(rows, wanted).solution.T
    found = target(weight, *halves(got, x - got, lost))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)


def test_what_is_lost_by_chance_alone_is_not_made_up_for() -> None:
    """Two tokens of a half say that 1 is lost for each, and two of the other that it is -1."""
    tokens, lost = torch.ones(4, 1), torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    weight = torch.tensor([[10.0]])
    assert target(weight, *halves(tokens, torch.zeros(4, 1), lost)).tolist() == [[10.0]]
    assert float(target(weight, *halves(tokens, torch.zeros(4, 1), lost.abs()))) == pytest.approx(10 + 4 / 4.04)


def test_lambda_is_what_is_best_on_the_other_half_worked_by_hand() -> None:
    """One half says that 6 is lost where the input is 2: alone it gives 12 / (4 + λ) with λ of 8 · (4, 1, ¼ …). The
    other says 4, and so wants 8 / 4 = 2, which λ = 2 gives. Both together give 20 / (8 + 2).
    """
    first, second = halves(torch.tensor([[2.0], [2.0]]), torch.zeros(2, 1), torch.tensor([[6.0], [4.0]]))
    assert float(regression(first.moments, 2.0, first.lost(torch.zeros(1, 1)))) == pytest.approx(2, rel=1e-6)
    assert float(target(torch.tensor([[10.0]]), first, second)) == pytest.approx(12, rel=1e-6)


def test_a_weight_makes_up_for_what_the_layer_before_lost_worked_by_hand() -> None:
    """Two tokens, each 3 in the float model and 2 in the quantized one: H = 8, λ = 0.08, D = 2·(3-2)·2 = 4, and w* is
    w (1 + 4 / 8.08).
    """
    found = target(torch.tensor([[10.0]]), *halves(torch.full((2, 1), 2.0), torch.ones(2, 1)))
    assert float(found) == pytest.approx(10 * (1 + 4 / 8.08), rel=1e-6)


def test_a_product_makes_up_for_what_it_is_added_to_worked_by_hand() -> None:
    """Both models give it 2, twice, and it is added to 7 in one and to 6 in the other: H = 8, λ = 0.08, M = 2·1·2 = 4,
    so that w* = w + 4 / 8.08.
    """
    found = target(
        torch.tensor([[10.0]]), *halves(torch.full((2, 1), 2.0), torch.zeros(2, 1), torch.tensor([[1.0], [1.0]]))
    )
    assert float(found) == pytest.approx(10 + 4 / 8.08, rel=1e-6)


def test_one_batch_alone_has_nothing_to_choose_lambda_on_and_the_weight_stays() -> None:
    learned, none = Sums(1), Sums(1)
    learned.add(torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.zeros(1, 1))
    assert target(torch.tensor([[10.0]]), learned, none).tolist() == [[10.0]]
