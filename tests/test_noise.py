"""The limits that tests hold implementations to, on numbers made by hand."""

import numpy as np
import pytest
import torch

from tests.noise import MARGIN, check_one_model, largest_noise, mean_noise, root_mean_square

NAN = float("nan")


def test_noise_of_logits_is_the_largest_difference_of_a_log_probability_four_times() -> None:
    exact = torch.tensor([[0.0, 0.0], [1.0, 1.0]])  # each token has a probability of 1/2
    rounded = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    assert largest_noise(rounded, exact) == pytest.approx(4 * np.log(2), rel=1e-6)
    assert largest_noise(exact + 7, exact) == 0


def test_noise_of_a_mean_falls_with_the_tokens_that_were_scored() -> None:
    one, other = np.array([1.0, 2.0, NAN, 5.0, 1.0]), np.array([1.5, 1.5, 9.0, 5.5, 0.5])
    assert root_mean_square(one, other) == (0.5, 4)
    assert mean_noise(0.5, 4) == MARGIN * 0.25


def losses(difference: float, bias: float) -> dict[str, np.ndarray]:
    """The losses of 1,000 tokens: two runtimes' differ by `difference`, up and down, and by `bias`; BF16's by 0.1."""
    signs = np.resize([1.0, -1.0], 1000)
    one = np.full(1000, 2.0)
    return {"one": one, "other": one + difference * signs + bias, "bf16": one + 0.1 * np.resize([1, 1, -1, -1], 1000)}


@pytest.mark.parametrize(
    ("difference", "bias", "same"),
    [
        (0.0, 0.0, True),
        (0.03, 0.0, True),
        (0.03, 0.003, True),  # 0.03 * 4 / √1000 is 0.0038
        (0.03, 0.005, False),
        (0.06, 0.0, False),  # 0.36 of BF16's square, and 0.2 is the limit
        (0.0, 0.03, False),
    ],
)
def test_two_runtimes_are_one_model_where_they_differ_little_and_to_no_side(
    difference: float, bias: float, same: bool
) -> None:
    if same:
        check_one_model(losses(difference, bias), "one", "other")
    else:
        with pytest.raises(AssertionError):
            check_one_model(losses(difference, bias), "one", "other")
