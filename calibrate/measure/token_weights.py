"""The weight of each calibration token in GPTQ's second moments, and the file that holds them.

GPTQ minimizes the squared error of a GEMM's output, the same at every token. What the model makes of an error differs
by orders of magnitude: to second order it is Σ_t (g_t · e_t)², with g_t the gradient of the loss at the output of token
t. So H = Σ w_t x_t x_tᵀ, where the weights w_t are those that `validate.sensitivity.token_weights` computes.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file

from ...core.files import reading, replacing

#: The largest number of the file's FP16.
LARGEST = float(np.finfo(np.float16).max)


class TokenWeights:
    """Weights float16 [windows, seq_len] of the tokens of named tensors, whose mean is one; batches are of `size`
    windows.
    """

    def __init__(self, weights: Mapping[str, npt.NDArray[np.float16]], size: int):
        """Hold `weights` by the first module of each group."""
        self._weights, self._size = weights, size

    def of(self, name: str, batch: int) -> torch.Tensor | None:
        """The weights of the tokens of tensor `name` in batch number `batch`, float32 [tokens]; None where all are
        alike: experts see some of the tokens.
        """
        weights = self._weights.get(name)
        if weights is None:
            return None
        return torch.from_numpy(weights[batch * self._size : (batch + 1) * self._size].astype(np.float32)).flatten()


def normalized(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """Scale weights [windows, seq_len] to a mean of one; where all are zero, or none is finite, all are one."""
    mean = float(weights.mean(dtype=np.float64))
    if not 0 < mean < float("inf"):
        return np.ones(weights.shape, np.float16)
    scaled: npt.NDArray[np.float16] = np.minimum(weights / mean, LARGEST).astype(np.float16)
    return scaled


def save_token_weights(path: Path, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Write the `weights` float32 [windows, seq_len] of each tensor to the file at `path`, scaled to a mean of one."""
    with replacing(path) as partial:
        save_file({name: normalized(values) for name, values in weights.items()}, partial)


def load_token_weights(path: Path, size: int) -> TokenWeights:
    """Read the weights in the file at `path`, for batches of `size` windows."""
    with reading(path, "token weights"):
        return TokenWeights(load_file(path), size)
