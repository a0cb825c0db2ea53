"""The GEMM of activations with FP8 weights, as one operator that vLLM's compiler does not look into.

Rows of one code are what vLLM multiplies without this plugin: their codes come from vLLM's own operations, which its
compiler fuses with what is before them, and are multiplied by its own fused GEMM.

Outside of a forward pass vLLM asks a layer for its weights, by an identity matrix (latent attention does, when it is
loaded). A 1 may lie beyond all codes under the input's scale, so inputs are not rounded then.
"""

import torch
from torch.nn.functional import linear
from vllm._custom_ops import cutlass_scaled_mm
from vllm.forward_context import is_forward_context_available
from vllm.utils.torch_utils import direct_register_custom_op

from .codes.epilogue import Epilogue
from .rows import rows_of_batch
from .terms import exact_product, sixteen_bit_product, with_exact_rows


def fp8q_linear(
    x: torch.Tensor,
    codes: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor,
    bias: torch.Tensor | None,
    one: torch.Tensor,
    tail: int,
    free_rows: int,
) -> torch.Tensor:
    """`x` [..., in] times `weight` [out, in], E4M3 codes, with its scales float32 [out, 1] or [1], in x's type.

    `codes` [rows, in]: of x, for rows that are not exact; None: all are. `input_scale` float32 [], a power of two;
    `one` float32 [], 1. `tail`: the last positions of a call that are exact. `free_rows`: up to so many rows all are.
    """
    rows = x.flatten(0, -2)
    epilogue = Epilogue(input_scale, weight_scale.flatten(), bias)
    if not is_forward_context_available():
        y = sixteen_bit_product(rows, weight, epilogue, one)
    else:
        exact = None if codes is None else rows_of_batch(len(rows), tail, free_rows)
        if codes is None or exact is None:
            y = exact_product(rows, weight, epilogue, one)
        else:
            y = one_code_product(codes, weight, epilogue, x.dtype)
            y = with_exact_rows(y, rows, weight, epilogue, one, exact)
    return y.view(*x.shape[:-1], len(weight))


def one_code_product(codes: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, dtype: torch.dtype) -> torch.Tensor:
    """Multiply `codes` [rows, in] by `weight` [out, in] to `dtype` [rows, out], scaled in the epilogue of vLLM's GEMM;
    on a CPU in FP32.
    """
    if not codes.is_cuda:
        return epilogue.of_sums(linear(codes.float(), weight.float()), dtype)
    scales = epilogue.input_scale, epilogue.weight_scale
    y: torch.Tensor = cutlass_scaled_mm(codes, weight.t(), *scales, out_dtype=dtype, bias=epilogue.bias)
    return y


def _fake(x: torch.Tensor, codes: torch.Tensor | None, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


direct_register_custom_op("fp8q_linear", fp8q_linear, fake_impl=_fake)
