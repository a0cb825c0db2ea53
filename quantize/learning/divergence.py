"""The loss of a training: how far the student's distribution is from the teacher's, in the memory of their logits.

Logits are the largest tensors of a step: [4, 512, 262,144] take 2.1 GB, and a divergence by autograd holds ten tensors
of their size. With p the teacher's distribution and q the student's, the gradient of KL(p || q) by the student's logits
is q - p (Hinton et al., 2015, arXiv 1503.02531, section 2.1, at temperature 1). So it is computed along with the
divergence, some rows at a time, and takes the place of the teacher's logits.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...calibrate.measure.scoring import divergences, log_softmax

#: Values of logits that are worked on at a time.
VALUES = 1 << 24


def forward_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) of logits [..., vocabulary], in nats, the mean over positions.

    Where the student's take part in a gradient, this is written over the teacher's, which take part in none and were
    not made in inference mode.
    """
    learned = torch.is_grad_enabled() and student.requires_grad
    mean: torch.Tensor = _ForwardKL.apply(teacher, student, learned)  # type: ignore[no-untyped-call]
    return mean


class _ForwardKL(torch.autograd.Function):
    """`forward_kl` with its gradient."""

    @staticmethod
    def forward(ctx: Any, teacher: torch.Tensor, student: torch.Tensor, learned: bool) -> torch.Tensor:
        """The mean divergence, float32 []; `learned`: its gradient will be asked for."""
        vocabulary = student.shape[-1]
        wanted, actual = teacher.reshape(-1, vocabulary), student.reshape(-1, vocabulary)
        gradient = wanted if wanted.dtype == actual.dtype else torch.empty_like(actual)
        of_rows = []
        for start in range(0, len(actual), at_once := max(1, VALUES // vocabulary)):
            rows = slice(start, start + at_once)
            log_p, log_q = log_softmax(wanted[rows]), log_softmax(actual[rows])
            of_rows.append(divergences(log_p, log_q))
            if learned:
                torch.sub(log_q.exp_(), log_p.exp_(), out=log_q)
                torch.div(log_q, len(actual), out=gradient[rows])
        if learned:
            ctx.save_for_backward(gradient.view(student.shape))
        return torch.cat(of_rows).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        """The gradient by the student's logits."""
        (gradient,) = ctx.saved_tensors
        return None, gradient * of_mean, None
