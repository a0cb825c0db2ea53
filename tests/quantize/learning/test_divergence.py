"""The loss of learning: the divergence of two distributions, its gradient, and the memory it takes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8q.quantize.learning import divergence
from fp8q.quantize.learning.divergence import forward_kl


def by_autograd(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """The divergence as torch has it, in FP64."""
    log_p, log_q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    return torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True) / (
        student.numel() // student.shape[-1]
    )


def test_the_divergence_is_that_of_two_coins() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert float(forward_kl(p.log()[None], q.log()[None])) == pytest.approx(expected, rel=1e-6)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 40)),
    seed=st.integers(0, 99),
    at_once=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_value_and_gradient_are_those_of_autograd(
    shape: tuple[int, int, int], seed: int, at_once: int, dtype: torch.dtype, transposed: bool
) -> None:
    torch.manual_seed(seed)
    teacher = 3 * torch.randn(shape[1], shape[0], shape[2]).transpose(0, 1) if transposed else 3 * torch.randn(shape)
    student = (teacher + 0.3 * torch.randn(shape)).to(dtype).requires_grad_()
    reference = student.detach().double().requires_grad_()
    expected = by_autograd(teacher, reference)
    (2 * expected).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "VALUES", at_once)
        found = forward_kl(teacher.clone(), student)
        (2 * found).backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)
    assert student.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(student.grad.double(), reference.grad, rtol=0.01, atol=1e-6)


def test_a_teacher_stays_where_nothing_is_learned() -> None:
    teacher, student = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    before = teacher.clone()
    forward_kl(teacher, student)
    with torch.no_grad():
        forward_kl(teacher, student.requires_grad_())
    assert torch.equal(teacher, before)


def test_no_more_tensors_of_the_size_of_logits_are_made() -> None:
    shape = 4, 64, 4096
    teacher, student = torch.randn(shape), torch.randn(shape, requires_grad=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        patch.setattr(divergence, "VALUES", 4096)
        found = forward_kl(teacher, student)
    assert found.requires_grad
    logits = student.numel() * student.element_size()
    kept = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    assert kept < 0.01 * logits
