"""The loss that an error is predicted to cost: half of the square of what it adds along the gradient, by hand."""

import pytest
import torch

from fp8q.quantize.sensitivity.gradients import (
    DRAWN_ROWS,
    drawn,
    drawn_gradient,
    half_square,
    summed,
    uniform,
)


def test_what_errors_add_is_summed_in_a_token_and_squared_after_that() -> None:
    """Two tokens: 1·2 + 3·(-1) = -1, and 2·1 + 0·5 = 2; half of 1 + 4 is 2.5."""
    gradient, error = torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([[2.0, -1.0], [1.0, 5.0]])
    assert half_square(gradient, error) == 2.5
    assert half_square(gradient[None], error[None]) == 2.5


def test_all_heads_of_a_position_are_one_token() -> None:
    """[windows, heads, seq, size] with one window, two heads, one position: 3·1 + 1·2 = 5, half of 25."""
    gradient, error = torch.tensor([3.0, 1.0]).view(1, 2, 1, 1), torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    assert half_square(gradient, error) == 12.5
    assert half_square(gradient.transpose(1, 2), error.transpose(1, 2)) == (9 + 4) / 2


def test_nats_of_batches_add_up_variant_by_variant() -> None:
    assert summed([{"a": {"x": 1.0}}, {"a": {"x": 2.0, "y": 4.0}, "b": {"x": 8.0}}]) == {
        "a": {"x": 3.0, "y": 4.0}, "b": {"x": 8.0},
    }  # fmt: skip


def test_labels_are_drawn_as_often_as_they_are_probable() -> None:
    """Of 10,000 draws a class of 70 % has 7,000, within four standard deviations of 46; one of 0 % none."""
    p = torch.tensor([0.7, 0.0, 0.3]).expand(10_000, 3)
    counts = torch.bincount(drawn(p, uniform(len(p), torch.Generator().manual_seed(1))), minlength=3).tolist()
    assert counts[0] == pytest.approx(7000, abs=4 * 46)
    assert counts[1] == 0


@pytest.mark.parametrize("prompt", [1, 40])
def test_the_gradient_of_drawn_labels_is_that_of_the_loss_bit_for_bit(prompt: int) -> None:
    logits = torch.randn(2, DRAWN_ROWS + 20, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    log_p = logits[:, prompt - 1 : -1].log_softmax(-1).flatten(0, 1)
    labels = drawn(log_p.detach().exp(), uniform(len(log_p), torch.Generator().manual_seed(1)))
    (whole,) = torch.autograd.grad(-log_p[range(len(labels)), labels].sum(), [logits])
    given = logits.detach().clone()
    gradient = drawn_gradient(given, prompt, torch.Generator().manual_seed(1))
    assert torch.equal(gradient, whole)
    assert gradient.data_ptr() == given.data_ptr()  # with a vocabulary of 152 K a table is 0.6 GB
