"""Quantization as torch operators that export to QuantizeLinear and DequantizeLinear, and placeholders for layers and
experts that are not traced.

Each operator has a kernel (the reference's arithmetic) and a shape function; `translations` gives torch's exporter
their ONNX form. Scales are FP32 and output types are explicit: with scales in a narrower type TensorRT multiplies by a
rounded reciprocal (docs/decisions).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch

from ...quantize.codes.encoding import CODE, encode, encode_int8
from . import cached_attention

if TYPE_CHECKING:
    from onnxscript.values import Op

#: Domain and name of the node in the place of a layer that is not traced; its attribute `index` says which.
SKIPPED = ("fp8q", "Layer")
#: Those around an expert that is traced; the attribute `members` of the first says for which it stands.
EXPERT_BEGINS = ("fp8q", "ExpertBegins")
EXPERT_ENDS = ("fp8q", "ExpertEnds")
#: A Reshape to sizes that its input has already, which the passes that simplify would take away (`passes.state_sizes`).
SIZED = ("fp8q", "Sized")

#: The end of every axis, for Slice.
END = 2**63 - 1


@torch.library.custom_op("fp8q::quantize", mutates_args=())
def quantize(x: torch.Tensor, scale: torch.Tensor, code: torch.dtype, axis: int = 0) -> torch.Tensor:
    """Encode x / scale in the type `code`, float8_e4m3fn or int8, with x's shape; `scale` as in `dequantize`."""
    factor = _along(scale, axis, x.dim())
    if code == CODE:
        return encode(x, factor)
    return encode_int8(x, factor)


@quantize.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, code: torch.dtype, axis: int = 0) -> torch.Tensor:
    return torch.empty(x.shape, dtype=code, device=x.device)


def _along(scale: torch.Tensor, axis: int, dims: int) -> torch.Tensor:
    """Shape `scale` [] or [channels] to be broadcast along `axis` of a tensor with so many `dims`."""
    if scale.dim() == 0:
        return scale
    return scale.view([-1 if dim == axis else 1 for dim in range(dims)])


@torch.library.custom_op("fp8q::dequantize", mutates_args=())
def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, axis: int = 0) -> torch.Tensor:
    """Multiply codes by their scale in FP32 and cast to `dtype`; `scale` float32 [], or [channels] along `axis`."""
    return (codes.float() * _along(scale, axis, codes.dim())).to(dtype)


@dequantize.register_fake
def _(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, axis: int = 0) -> torch.Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@torch.library.custom_op("fp8q::halves", mutates_args=())
def halves(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `x` along `axis`, whose size is even, into two halves."""
    first, second = x.chunk(2, axis)
    return first.clone(), second.clone()


@halves.register_fake
def _(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :]]
    return x.new_empty(shape), x.new_empty(shape)


@torch.library.custom_op("fp8q::last_positions", mutates_args=())
def last_positions(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` positions of `x` [batch, seq, width], or all where there are fewer."""
    return x[:, -count:].clone()


@last_positions.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], torch.sym_min(x.shape[1], count), *x.shape[2:]))


@torch.library.custom_op("fp8q::first_positions", mutates_args=())
def first_positions(x: torch.Tensor, count: int) -> torch.Tensor:
    """All but the last `count` positions of `x` [batch, seq, width], none where there are not more."""
    return x[:, :-count].clone()


@first_positions.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1] - torch.sym_min(x.shape[1], count), *x.shape[2:]))


@torch.library.custom_op("fp8q::part_behind", mutates_args=())
def part_behind(rows: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut `rows` [batch, seq + more, out] behind as many positions as `x` [batch, seq, width] has."""
    seq = x.shape[1]
    return rows[:, :seq].clone(), rows[:, seq:].clone()


@part_behind.register_fake
def _(rows: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, positions, out = rows.shape
    seq = x.shape[1]
    return rows.new_empty((batch, seq, out)), rows.new_empty((batch, positions - seq, out))


@torch.library.custom_op("fp8q::positions_of", mutates_args=())
def positions_of(rows: torch.Tensor, x: torch.Tensor, width: int) -> torch.Tensor:
    """`rows` [batch, seq, width] unchanged, with batch and seq told by `x` [batch, seq, ...].

    Rows that were cut and joined have sizes that TensorRT does not find to be equal to those of `x`, so that it could
    not tell how many heads they are.
    """
    return rows.reshape(x.shape[0], x.shape[1], width).clone()


@positions_of.register_fake
def _(rows: torch.Tensor, x: torch.Tensor, width: int) -> torch.Tensor:
    return rows.new_empty((x.shape[0], x.shape[1], width))


@torch.library.custom_op("fp8q::at_indices", mutates_args=())
def at_indices(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Gather positions of each row of `x` [batch, seq, width], [batch, count, width]; `indices` int64 [batch, count], 0
    for the first position of the call.
    """
    return x.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))


@at_indices.register_fake
def _(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*indices.shape, x.shape[-1]))


@torch.library.custom_op("fp8q::layer", mutates_args=())
def layer(hidden: torch.Tensor, index: int) -> torch.Tensor:
    """Return `hidden` unchanged: the placeholder of layer `index`, which is not traced."""
    return hidden.clone()


@layer.register_fake
def _(hidden: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("fp8q::expert_begins", mutates_args=())
def expert_begins(
    total: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, members: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mark the begin of an expert that was traced for all `members`. Returns `total` [tokens, width] unchanged, and the
    expert's own column [tokens] of `shares` [tokens, experts]; `chosen` bool [experts].
    """
    return total.clone(), shares[:, members[0]].clone()


@expert_begins.register_fake
def _(
    total: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, members: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(total), shares.new_empty(shares.shape[:1])


@torch.library.custom_op("fp8q::expert_ends", mutates_args=())
def expert_ends(total: torch.Tensor) -> torch.Tensor:
    """Mark the end of an expert; return `total` unchanged, with the expert's output added."""
    return total.clone()


@expert_ends.register_fake
def _(total: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(total)


def mark(
    operator: tuple[str, str], inputs: Sequence[str], outputs: Sequence[str], **attributes: onnx.defs.OpSchema.AttrType
) -> "Op":
    """Describe a custom operator for onnxscript, with type variables for its inputs and outputs."""
    from onnxscript.values import Op, Opset

    domain, name = operator
    schema = onnx.defs.OpSchema
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    described = schema(
        name,
        domain,
        1,
        inputs=[schema.FormalParameter(f"input_{at}", kind) for at, kind in enumerate(inputs)],
        outputs=[schema.FormalParameter(f"output_{at}", kind) for at, kind in enumerate(outputs)],
        type_constraints=[(kind, floats, "") for kind in dict.fromkeys(inputs) if len(kind) == 1],
        attributes=[schema.Attribute(key, kind) for key, kind in attributes.items()],
    )
    return Op(Opset(domain, 1), name, described)


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """The ONNX form of the operators, for `torch.onnx.export(custom_translation_table=…)`."""
    return {**_of_codes(), **_of_positions(), **_of_marks(), **cached_attention.onnx_forms()}


# what is inside of these functions is traced by onnxscript, whose values have no public type


def _of_codes() -> dict[Callable[..., object], Callable[..., object]]:
    from onnxscript import opset23 as op

    def onnx_quantize(x, scale, code, axis=0):  # type: ignore[no-untyped-def]
        return op.QuantizeLinear(x, scale, output_dtype=int(code), **({"axis": axis} if axis else {}))

    def onnx_dequantize(codes, scale, dtype, axis=0):  # type: ignore[no-untyped-def]
        return op.DequantizeLinear(codes, scale, axis=axis, output_dtype=int(dtype))

    def onnx_halves(x, axis):  # type: ignore[no-untyped-def]
        return op.Split(x, num_outputs=2, axis=axis)

    return {
        torch.ops.fp8q.quantize.default: onnx_quantize,
        torch.ops.fp8q.dequantize.default: onnx_dequantize,
        torch.ops.fp8q.halves.default: onnx_halves,
    }


def _of_positions() -> dict[Callable[..., object], Callable[..., object]]:
    from onnxscript import opset23 as op

    sized = mark(SIZED, ("T", "tensor(int64)"), "T")

    def ints(*values: int) -> Any:
        return op.Constant(value_ints=[*values])

    def onnx_last_positions(x, count):  # type: ignore[no-untyped-def]
        return op.Slice(x, ints(-count), ints(END), ints(1))

    def onnx_first_positions(x, count):  # type: ignore[no-untyped-def]
        return op.Slice(x, ints(0), ints(-count), ints(1))

    def onnx_part_behind(rows, x):  # type: ignore[no-untyped-def]
        seq = op.Shape(x, start=1, end=2)
        axis = ints(1)
        return (
            op.Slice(rows, ints(0), seq, axis),
            op.Slice(rows, seq, ints(END), axis),
        )

    def onnx_positions_of(rows, x, width):  # type: ignore[no-untyped-def]
        return sized(rows, op.Concat(op.Shape(x, start=0, end=2), ints(width), axis=0))

    def onnx_at_indices(x, indices):  # type: ignore[no-untyped-def]
        return op.GatherND(x, op.Unsqueeze(indices, ints(-1)), batch_dims=1)

    return {
        torch.ops.fp8q.last_positions.default: onnx_last_positions,
        torch.ops.fp8q.first_positions.default: onnx_first_positions,
        torch.ops.fp8q.part_behind.default: onnx_part_behind,
        torch.ops.fp8q.positions_of.default: onnx_positions_of,
        torch.ops.fp8q.at_indices.default: onnx_at_indices,
    }


def _of_marks() -> dict[Callable[..., object], Callable[..., object]]:
    number = onnx.defs.OpSchema.AttrType
    skipped = mark(SKIPPED, "T", "T", index=number.INT)
    begins = mark(EXPERT_BEGINS, ("T", "S", "tensor(bool)"), "TS", members=number.INTS)
    ends = mark(EXPERT_ENDS, "T", "T")

    def onnx_layer(hidden, index):  # type: ignore[no-untyped-def]
        return skipped(hidden, index=index)

    def onnx_expert_begins(total, shares, chosen, members):  # type: ignore[no-untyped-def]
        return begins(total, shares, chosen, members=members)

    def onnx_expert_ends(total):  # type: ignore[no-untyped-def]
        return ends(total)

    return {
        torch.ops.fp8q.layer.default: onnx_layer,
        torch.ops.fp8q.expert_begins.default: onnx_expert_begins,
        torch.ops.fp8q.expert_ends.default: onnx_expert_ends,
    }
