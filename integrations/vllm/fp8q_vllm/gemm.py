"""The GEMM of activations in two terms with FP8 weights, as one operator that vLLM's compiler does not look into.

Outside of a forward pass vLLM asks a layer for its weights, by an identity matrix (latent attention does, when it is
loaded). A 1 may lie beyond all codes under the input's scale, so inputs are not rounded then.
"""

import torch
from torch.nn.functional import linear
from vllm.forward_context import is_forward_context_available
from vllm.utils.torch_utils import direct_register_custom_op

from .codes.epilogue import Epilogue
from .rows import rows_of_batch
from .terms import scaled_of


def fp8q_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    bias: torch.Tensor | None,
    one: torch.Tensor,
    tail: int,
    free_rows: int,
) -> torch.Tensor:
    """`x` [..., in] times `weight` [out, in], E4M3 codes, with its scales float32 [out, 1] or [1], in x's type.

    `input_scale` float32 [], a power of two; `one` float32 [], 1. `tail`: the last positions of a call that have second
    terms, 0: all. `free_rows`: up to so many rows all have them.
    """
    rows = x.flatten(0, -2)
    scales = weight_scale.flatten()
    if is_forward_context_available():
        exact = rows_of_batch(len(rows), tail or None, free_rows)
        y = scaled_of(rows, weight, Epilogue(input_scale, scales, bias), one, exact)
    else:
        total = linear(rows.float(), weight.float()) * scales
        y = (total if bias is None else total + bias).to(x.dtype)
    return y.view(*x.shape[:-1], -1)


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


direct_register_custom_op("fp8q_linear", fp8q_linear, fake_impl=_fake)
