"""Decide and factor on the device that holds a weight, without waiting for it.

A GPU works through a queue. A decision in Python that depends on its numbers waits until the queue is empty, and the
queue stays empty until Python has filled it again. So a weight is rounded without such decisions: what need not be done
is done and left out by `torch.where`, and one copy at the end tells what became of it. On the host a decision costs
nothing, and leaves work out.
"""

import torch

#: Rows and columns of what is transposed at a time.
TILE = 512


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
    columns = matrix.mT  # as LAPACK lays matrices out, so that none is copied
    if on_host(matrix):
        transpose_in_place(matrix)
        torch.linalg.cholesky(columns, out=columns)
        transpose_in_place(matrix)
        return
    # its upper factor is the lower one of rows
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(columns, upper=True, out=(columns, failed))
    matrix.diagonal().add_(torch.where(failed == 0, 0.0, torch.nan))


def transpose_in_place(matrix: torch.Tensor) -> None:
    """Replace a square `matrix` by its transpose, a pair of tiles at a time."""
    for row in range(0, len(matrix), TILE):
        for column in range(0, row + 1, TILE):
            below = matrix[row : row + TILE, column : column + TILE]
            above = matrix[column : column + TILE, row : row + TILE]
            transposed = below.mT.clone(memory_format=torch.contiguous_format)
            if row != column:
                below.copy_(above.mT)
            above.copy_(transposed)
