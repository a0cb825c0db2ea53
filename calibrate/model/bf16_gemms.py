"""Compute BF16 GEMMs with FP32 arithmetic on processors that have no BF16 units.

Without such units (AVX2 alone, or AVX-512 before its BF16 instructions) torch multiplies BF16 matrices by converting
element by element, at a seventh of the speed of an FP32 GEMM. Here the operands are cast to FP32, which is exact,
multiplied by FP32 units, and the sum is rounded to BF16 once. BF16 units accumulate in FP32 and round once too, so both
give the same value but for the order of the sum (Intel's VDPBF16PS, Intel SDM volume 2, moreover flushes subnormal
numbers to zero).

The decision follows from the instructions that the processor has, never from a timing: a machine always computes alike.

Two GEMMs stay as they are, since FP32 gains nothing there: a linear layer applied to a single row, for which
torch has a vector kernel that is bound by reading the weight, and `scaled_dot_product_attention`, whose kernel widens
its tiles itself. Eager attention multiplies by `matmul`, in FP32.
"""

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from pydantic import JsonValue
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from .gemms import gemm_modules, other_matrix_modules

#: Values of a weight that are cast to FP32 at once: 4 MB in FP32, which stays in the cache and in the allocator's pool,
#: and bounds the memory taken whatever the weight's size.
BLOCK = 1 << 20
#: The functions that multiply matrices. Each is given its BF16 operands in FP32.
MATMULS = frozenset(
    {
        torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm,
        torch.Tensor.bmm, torch.addmm, torch.Tensor.addmm, torch.baddbmm, torch.Tensor.baddbmm, torch.einsum,
    }
)  # fmt: skip

#: Limits of oneDNN under which it takes BF16, and emulates its instructions. (Under lower ones it takes none.)
WITHOUT_BF16_UNITS = frozenset({"AVX512_CORE", "AVX512_CORE_VNNI"})


@cache
def has_bf16_units() -> bool:
    """Tell whether this processor multiplies BF16 by units of its own, and torch lets it.

    oneDNN also takes BF16 on AVX-512 without BF16 instructions, where it emulates them at half the speed of FP32. torch
    reads the processor's flags, and not the limit that the environment sets to oneDNN, which computes the GEMMs.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return True
    return bool(torch.cpu._is_avx512_bf16_supported()) and onednn_limit() not in WITHOUT_BF16_UNITS


def onednn_limit() -> str:
    """Return the level of instructions that the environment holds oneDNN to, in its own capitals; empty for none."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return limit.upper()


def bf16_arithmetic(device: str) -> dict[str, JsonValue]:
    """Say how BF16 GEMMs are computed on `device`, for the record of a run.

    Empty for a GPU and where BF16 units compute them: so it was recorded before there was a choice.
    """
    if device != "cpu" or has_bf16_units():
        return {}
    return {"bf16_products": "fp32"}


def bf16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x` [..., in] by `weight` [out, in] and add `bias` [out], all BF16, in FP32; round once to BF16.

    The weight is cast `BLOCK` values at a time.
    """
    x_fp32 = x.float()
    rows = max(1, BLOCK // max(1, weight.shape[1]))
    biases = [None] * -(-len(weight) // rows) if bias is None else bias.float().split(rows)
    parts = [
        nn.functional.linear(x_fp32, part.float(), added).to(torch.bfloat16)
        for part, added in zip(weight.split(rows), biases, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, -1)


class GemmsInFP32(TorchFunctionMode):
    """Compute the BF16 GEMMs of the CPU in FP32 while this mode is on, in the thread that entered it.

    Tensors of other types, on other devices, and those of tracers are left alone.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, in FP32 where it is a GEMM of BF16 matrices."""
        named = kwargs or {}
        if func is nn.functional.linear and all(map(_is_wanted, args[:2])) and len(args) > 1:
            bias = args[2] if len(args) > 2 else named.get("bias")
            if args[0].numel() > args[0].shape[-1] and (bias is None or _is_wanted(bias)):
                return bf16_linear(args[0], args[1], bias)
        elif func in MATMULS and "out" not in named:
            operands = [*filter(_is_tensor, (*args, *named.values()))]
            if operands and all(map(_is_wanted, operands)):
                widened = {name: _widened(argument) for name, argument in named.items()}
                return func(*map(_widened, args), **widened).to(torch.bfloat16)
        return func(*args, **named)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


def _is_wanted(value: object) -> bool:
    """Tell whether `value` is a BF16 tensor of numbers on the CPU, and no tracer's stand-in for one."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) in {torch.Tensor, nn.Parameter}
        and value.dtype == torch.bfloat16
        and value.device.type == "cpu"
    )


def gemms_in_fp32() -> AbstractContextManager[object]:
    """Compute BF16 GEMMs of the CPU in FP32 in this block, where the processor has no BF16 units."""
    if has_bf16_units():
        return nullcontext()
    return GemmsInFP32()


def compute_gemms_in_fp32(model: PreTrainedModel, dtype: torch.dtype, device: str) -> None:
    """Let the modules of `model`, which computes in `dtype` on `device`, multiply as `gemms_in_fp32` does, for good.

    Nothing is done for another type than BF16, another device than the CPU, or where the processor has BF16 units.
    Modules get a subclass of their own class, of the same name, that differs in `forward` alone: parameters, hooks and
    copies stay what they were.
    """
    if dtype != torch.bfloat16 or device != "cpu" or has_bf16_units():
        return
    gemms = {**gemm_modules(model), **other_matrix_modules(model)}
    for name, module in model.named_modules():
        if name in gemms or "attention" in type(module).__name__.lower():
            module.__class__ = _fp32_class(type(module))


def _fp32_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `kind` whose forward pass has its GEMMs in FP32, one for each `kind`."""
    if kind in _FP32_CLASSES.values():
        return kind
    if kind not in _FP32_CLASSES:

        @wraps(kind.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with GemmsInFP32():
                return kind.forward(self, *args, **kwargs)

        names = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _FP32_CLASSES[kind] = type(kind.__name__, (kind,), names)
    return _FP32_CLASSES[kind]


_FP32_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
