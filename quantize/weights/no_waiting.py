"""Decide and factor on the device that holds a weight, without waiting for it.

A GPU works through a queue. A decision in Python that depends on its numbers waits until the queue is empty, and the
queue stays empty until Python has filled it again. So a weight is rounded without such decisions: what need not be done
is done and left out by `torch.where`, and one copy at the end tells what became of it. On the host a decision costs
nothing, and leaves work out.
"""

import torch


def on_host(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` lies in the host's memory."""
    return tensor.device.type == "cpu"


def certainly(flag: torch.Tensor) -> bool:
    """Tell whether the scalar `flag` is true, where asking takes no wait: on another device than the host it may be."""
    return on_host(flag) and bool(flag)


def factor_in_place(matrix: torch.Tensor) -> None:
    """Replace a symmetric `matrix` [in, in] by its lower Cholesky factor.

    One without a factor raises LinAlgError on the host. Elsewhere it gets NaN on its diagonal, and so do codes that are
    rounded by it, which `channels.weight_summary` refuses.
    """
    if on_host(matrix):
        torch.linalg.cholesky(matrix, out=matrix)
        return
    # as LAPACK lays matrices out, so that none is copied; its upper factor is the lower one of rows
    columns = matrix.mT
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(columns, upper=True, out=(columns, failed))
    matrix.diagonal().add_(torch.where(failed == 0, 0.0, torch.nan))
