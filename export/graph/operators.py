"""Quantization as torch operators, so that an exported graph says QuantizeLinear and DequantizeLinear and nothing else;
and one that stands for a layer which is not traced.

Each has a kernel (the reference's arithmetic) and a shape function; `translations` gives their ONNX form for torch's
exporter. Scales are FP32 and the output type is stated: with scales in a narrower type TensorRT multiplies by a rounded
reciprocal (docs/decisions).
"""

from collections.abc import Callable

import onnx
import torch

from ...quantize.linear import CODE, encode, encode_int8

#: Domain and name of the node in the place of a layer that is not traced; its attribute `index` says which.
SKIPPED = ("fp8q", "Layer")


@torch.library.custom_op("fp8q::quantize", mutates_args=())
def quantize(x: torch.Tensor, scale: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Codes of x / scale, of x's shape in the type `code`: float8_e4m3fn, or int8; `scale` float32 []."""
    return encode(x, scale) if code == CODE else encode_int8(x, scale)


@quantize.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=code, device=x.device)


@torch.library.custom_op("fp8q::dequantize", mutates_args=())
def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, axis: int = 0) -> torch.Tensor:
    """code × scale in FP32, cast to `dtype`; `scale` float32 [] for the tensor, or [channels] along `axis`."""
    factor = scale if scale.dim() == 0 else scale.view([-1 if dim == axis else 1 for dim in range(codes.dim())])
    return (codes.float() * factor).to(dtype)


@dequantize.register_fake
def _(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, axis: int = 0) -> torch.Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@torch.library.custom_op("fp8q::halves", mutates_args=())
def halves(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second half of `x` along `axis`, whose size is even."""
    first, second = x.chunk(2, axis)
    return first.clone(), second.clone()


@halves.register_fake
def _(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :]]
    return x.new_empty(shape), x.new_empty(shape)


@torch.library.custom_op("fp8q::layer", mutates_args=())
def layer(hidden: torch.Tensor, index: int) -> torch.Tensor:
    """`hidden` as it is: the place of layer `index`, which is not traced."""
    return hidden.clone()


@layer.register_fake
def _(hidden: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(hidden)


def skipped_schema() -> onnx.defs.OpSchema:
    """The operator `SKIPPED` as ONNX wants it described."""
    domain, name = SKIPPED
    kind = onnx.defs.OpSchema.FormalParameter
    return onnx.defs.OpSchema(
        name,
        domain,
        1,
        inputs=[kind("hidden", "T")],
        outputs=[kind("passed", "T")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=[onnx.defs.OpSchema.Attribute("index", onnx.defs.OpSchema.AttrType.INT)],
    )


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """The ONNX form of the operators, for `torch.onnx.export(custom_translation_table=…)`."""
    from onnxscript import opset23 as op
    from onnxscript.values import Op, Opset

    domain, name = SKIPPED
    skipped = Op(Opset(domain, 1), name, skipped_schema())

    # traced by onnxscript, whose values have no public type
    def onnx_quantize(x, scale, code):  # type: ignore[no-untyped-def]
        return op.QuantizeLinear(x, scale, output_dtype=int(code))

    def onnx_dequantize(codes, scale, dtype, axis=0):  # type: ignore[no-untyped-def]
        return op.DequantizeLinear(codes, scale, axis=axis, output_dtype=int(dtype))

    def onnx_halves(x, axis):  # type: ignore[no-untyped-def]
        return op.Split(x, num_outputs=2, axis=axis)

    def onnx_layer(hidden, index):  # type: ignore[no-untyped-def]
        return skipped(hidden, index=index)

    return {
        torch.ops.fp8q.quantize.default: onnx_quantize,
        torch.ops.fp8q.dequantize.default: onnx_dequantize,
        torch.ops.fp8q.halves.default: onnx_halves,
        torch.ops.fp8q.layer.default: onnx_layer,
    }
