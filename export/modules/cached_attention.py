"""Attention of one new token a row over a cache that each kernel reads where it lies.

The past of a tensor is an input of three dimensions, [batch · kv_heads · blocks, 64, size]: blocks of 64 slots, in
memory exactly [batch, kv_heads, capacity, size]. The GEMM of keys and queries has the keys on its left,

    scores [blocks, 64, rows] = keys [blocks, 64, size] · queries [blocks, size, rows]

and that of weights and values the values on its right, so that neither is transposed. TensorRT-RTX 1.7 makes one kernel
of each (`__myl_CastMulCastFc`) that reads FP8 codes itself and dequantizes inside: a byte a value of the cache, and
nothing of it is written. Three things keep it from doing so, all found by building. A GEMM over a dynamic number of
slots is padded, which copies keys and values: hence blocks. Queries that are a view of another tensor, and a
DequantizeLinear whose scale is 1, are copied in front of the GEMM: hence the power of two of the softmax's scale is
multiplied behind the Reshape, in FP32, where it is exact, and codes with a scale for each head are dequantized by
`HALF`, the rest of the scale being applied to the result. A BF16 cache is read by the GEMM itself.

The queries of a row are repeated for each block, which costs nothing for one token and much for a prompt. So a prompt
keeps the fused attention, over past and new keys together (`attention`), and both ways stand in the graph: the number
of rows of each follows from the number of tokens, `prompt = min(seq - 1, 1)` and `step = 1 - prompt`, and is zero in
the other's calls. With profiles of two tokens or more and of one the builder folds the dead way out of each program. An
If around both does not build: FP8 inputs must be dequantized outside of it.

Scores are FP32 where keys are codes, as in the fused kernels. Of a BF16 cache they are rounded to BF16 once, as
transformers' eager attention does: an FP32 GEMM of it would be of a copy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
import onnx_ir as ir
import torch

from ..onnx_file.names import BLOCK

#: The scale that codes with a scale for each head are dequantized by: any power of two but 1.
HALF = 0.5
LOWEST = torch.finfo(torch.float32).min
FLOAT = int(onnx.TensorProto.FLOAT)


def split_scale(scale: float) -> tuple[float, float]:
    """Split the softmax's scale into a power of two other than 1, and the factor of 1 to 2 (of 2 to 4) that is left."""
    power = math.floor(math.log2(scale))
    power = power or -1
    return 2.0**power, scale / 2.0**power


def capacity_of(mask: torch.Tensor, tokens: torch.Tensor) -> int:
    """The slots of the past, of a call with this `mask` [batch, capacity + seq] and these `tokens` [batch, seq]."""
    return mask.shape[1] - tokens.shape[1]


@torch.library.custom_op("fp8q::heads_of_blocks", mutates_args=())
def heads_of_blocks(past: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """View the past [batch · heads · blocks, 64, size] as [batch, heads, capacity, size]; `sizes`: heads and size."""
    heads, size = sizes
    return past.reshape(tokens.shape[0], heads, capacity_of(mask, tokens), size).clone()


@heads_of_blocks.register_fake
def _(past: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    heads, size = sizes
    return past.new_empty((tokens.shape[0], heads, capacity_of(mask, tokens), size))


@torch.library.custom_op("fp8q::of_prompt", mutates_args=())
def of_prompt(x: torch.Tensor, tokens: torch.Tensor, axis: int) -> torch.Tensor:
    """`x` along `axis` where the call has several `tokens` [batch, seq], and nothing of it where it has one."""
    return x.narrow(axis, 0, x.shape[axis] * min(tokens.shape[1] - 1, 1)).clone()


@of_prompt.register_fake
def _(x: torch.Tensor, tokens: torch.Tensor, axis: int) -> torch.Tensor:
    size = x.shape[axis] * torch.sym_min(tokens.shape[1] - 1, 1)
    return x.new_empty((*x.shape[:axis], size, *x.shape[axis + 1 :]))


@dataclass(frozen=True)
class StepTensors:
    """The tensors of a step: torch's, or values of the ONNX graph.

    `query` [batch, heads, seq, size]; `key` and `value` [batch, kv_heads, seq, size] are the new ones, `past_key` and
    `past_value` [batch · kv_heads · blocks, 64, size] the past: values, or codes with `key_scale` and `value_scale`
    float32 [kv_heads]. `allowed` bool [batch, capacity]: the slots that the token sees, which also sees itself. `mask`
    [batch, capacity + seq] and `tokens` [batch, seq] are inputs of the call, for their sizes. `bias` float32 [batch,
    heads, 1, capacity + seq], of the scores.
    """

    query: Any
    key: Any
    value: Any
    past_key: Any
    past_value: Any
    allowed: Any
    mask: Any
    tokens: Any
    bias: Any = None
    key_scale: Any = None
    value_scale: Any = None

    def packed(self) -> tuple[list[torch.Tensor], list[int]]:
        """The tensors that there are, and which of the last three are among them: what an operator of torch takes."""
        optional = [self.bias, self.key_scale, self.value_scale]
        always = [
            self.query, self.key, self.value, self.past_key, self.past_value, self.allowed, self.mask, self.tokens,
        ]  # fmt: skip
        return [*always, *(tensor for tensor in optional if tensor is not None)], [
            int(tensor is not None) for tensor in optional
        ]

    @classmethod
    def unpacked(cls, tensors: Sequence[Any], there: Sequence[int]) -> "StepTensors":
        """Undo `packed`."""
        count = len(tensors) - sum(there)
        rest = iter(tensors[count:])
        bias, key_scale, value_scale = (next(rest) if present else None for present in there)
        return replace(cls(*tensors[:count]), bias=bias, key_scale=key_scale, value_scale=value_scale)


@dataclass(frozen=True)
class StepForm:
    """The constants of a step: numbers of heads, sizes of keys and of values, the softmax's `scale`, the cap of scores,
    and the type of the values' GEMM and of the result.
    """

    heads: int
    kv_heads: int
    size: int
    value_size: int
    scale: float
    softcap: float | None
    dtype: Any

    @property
    def group(self) -> int:
        """The number of query heads of a key head."""
        return self.heads // self.kv_heads


@torch.library.custom_op("fp8q::cached_attention", mutates_args=())
def cached_attention(
    prompt: torch.Tensor, tensors: list[torch.Tensor], sizes: list[int], numbers: list[float], dtype: torch.dtype
) -> torch.Tensor:
    """The attention of a call: `prompt` where it has several tokens, and otherwise that of its one token a row.

    `prompt` [batch, heads, seq, size] is what attention over past and new keys together gave. `tensors` and the last
    three `sizes`: `StepTensors.packed`; the first four sizes, the `numbers` (scale, and cap where there is one) and
    `dtype`: `StepForm`.
    """
    step = StepTensors.unpacked(tensors, sizes[4:])
    form = _form(sizes, numbers, dtype)
    if step.query.shape[2] != 1:
        return prompt.clone()
    keys = _past_and_new(step.past_key, step.key, step.key_scale, step.allowed).repeat_interleave(form.group, 1)
    values = _past_and_new(step.past_value, step.value, step.value_scale, step.allowed).repeat_interleave(form.group, 1)
    scores = step.query.float() @ keys.transpose(-1, -2) * form.scale
    scores = scores if step.bias is None else scores + step.bias
    scores = scores if form.softcap is None else (scores / form.softcap).tanh() * form.softcap
    sees = torch.cat([step.allowed, step.allowed.new_ones((step.allowed.shape[0], 1))], 1)
    output: torch.Tensor = scores.masked_fill(~sees[:, None, None], LOWEST).softmax(-1) @ values
    return output.to(dtype)


def _form(sizes: Sequence[int], numbers: Sequence[float], dtype: Any) -> StepForm:
    heads, kv_heads, size, value_size = sizes[:4]
    return StepForm(heads, kv_heads, size, value_size, numbers[0], numbers[1] if numbers[1:] else None, dtype)


def _past_and_new(
    past: torch.Tensor, new: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """Keys or values [batch, kv_heads, capacity + 1, size] in FP32."""
    values = past.float().reshape(slots.shape[0], new.shape[1], slots.shape[1], past.shape[-1])
    return torch.cat([values if scale is None else values * scale[:, None, None], new.float()], 2)


@cached_attention.register_fake
def _(prompt: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(prompt)


def attend(prompt: torch.Tensor, step: StepTensors, form: StepForm) -> torch.Tensor:
    """The attention of a call, as `cached_attention` has it."""
    tensors, there = step.packed()
    sizes = [form.heads, form.kv_heads, form.size, form.value_size, *there]
    numbers = [form.scale] if form.softcap is None else [form.scale, form.softcap]
    output: torch.Tensor = cached_attention(prompt, tensors, sizes, numbers, form.dtype)
    return output


def onnx_forms() -> dict[Callable[..., object], Callable[..., object]]:
    """The ONNX form of these operators, for `torch.onnx.export(custom_translation_table=…)`."""
    from onnxscript import opset23 as op

    made = OnnxOperations(op)

    def onnx_heads_of_blocks(past, mask, tokens, sizes):  # type: ignore[no-untyped-def]
        return made.reshaped(past, op.Shape(tokens, start=0, end=1), sizes[0], made.capacity(mask, tokens), sizes[1])

    def onnx_of_prompt(x, tokens, axis):  # type: ignore[no-untyped-def]
        size = op.Mul(op.Shape(x, start=axis, end=axis + 1), made.several(tokens))
        return op.Slice(x, made.ints(0), size, made.ints(axis))

    def onnx_cached_attention(prompt, tensors, sizes, numbers, dtype):  # type: ignore[no-untyped-def]
        step = StepTensors.unpacked(tensors, sizes[4:])
        return OnnxStep(made, step, _form(sizes, numbers, dtype)).joined(prompt)

    return {
        torch.ops.fp8q.heads_of_blocks.default: onnx_heads_of_blocks,
        torch.ops.fp8q.of_prompt.default: onnx_of_prompt,
        torch.ops.fp8q.cached_attention.default: onnx_cached_attention,
    }


class OnnxOperations:
    """Operations of ONNX on sizes, in `op`, an opset of onnxscript, whose values have no public type."""

    def __init__(self, op: Any):
        self.op = op

    def ints(self, *values: int) -> Any:
        """A constant int64 [values]."""
        return self.op.Constant(value_ints=[*values])

    def number(self, x: float) -> Any:
        """A constant float32 []."""
        return self.op.Constant(value_float=x)

    def sizes(self, *parts: Any) -> Any:
        """A shape of these sizes, each a number or a value int64 [1]."""
        return self.op.Concat(*(self.ints(part) if isinstance(part, int) else part for part in parts), axis=0)

    def reshaped(self, x: Any, *shape: Any) -> Any:
        """Reshape `x`, in which a size may be 0."""
        return self.op.Reshape(x, self.sizes(*shape), allowzero=1)

    def capacity(self, mask: Any, tokens: Any) -> Any:
        """The slots of the past: `capacity_of`."""
        return self.op.Sub(self.op.Shape(mask, start=1, end=2), self.op.Shape(tokens, start=1, end=2))

    def several(self, tokens: Any) -> Any:
        """1 where a call has several tokens, 0 where it has one."""
        return self.op.Min(self.op.Sub(self.op.Shape(tokens, start=1, end=2), self.ints(1)), self.ints(1))


class OnnxStep:
    """The nodes of a step, which has no rows where a call has several tokens."""

    def __init__(self, made: OnnxOperations, step: StepTensors, form: StepForm):
        self.made = made
        self.op = made.op
        self.step_in = step
        self.form = form
        op = made.op
        several = made.several(step.tokens)
        self.batch, self.seq = (op.Shape(step.tokens, start=axis, end=axis + 1) for axis in (0, 1))
        self.capacity = made.capacity(step.mask, step.tokens)
        self.blocks = op.Div(self.capacity, made.ints(BLOCK))
        #: Tokens of a step, 1 or 0; query heads of a key head; blocks of all rows and heads.
        self.tokens = op.Sub(made.ints(1), several)
        self.rows = op.Mul(made.ints(form.group), self.tokens)
        self.count = op.Mul(op.Mul(self.batch, made.ints(form.kv_heads)), self.blocks)
        self.of_prompt = op.Mul(self.seq, several)
        self.power, self.left = split_scale(form.scale)

    def joined(self, prompt: Any) -> Any:
        """The result [batch, heads, seq, size] of a step, or `prompt`."""
        op = self.op
        made = self.made
        form = self.form
        grouped_queries = made.reshaped(self.first(self.step_in.query), self.batch, form.kv_heads, self.rows, form.size)
        scores = op.Where(
            made.reshaped(self.step_in.allowed, self.batch, 1, self.blocks, 1, BLOCK),
            self.scores(grouped_queries),
            made.number(LOWEST),
        )
        attended = self.attended(scores, op.Unsqueeze(self.new_token_scores(grouped_queries), made.ints(2)))
        of_step = made.reshaped(op.Cast(attended, to=form.dtype), self.batch, form.heads, self.tokens, form.value_size)
        return op.Concat(of_step, op.Slice(prompt, made.ints(0), self.of_prompt, made.ints(2)), axis=2)

    def first(self, x: Any) -> Any:
        """The tokens of a step, of `x` [batch, heads, seq, size]."""
        return self.op.Slice(x, self.made.ints(0), self.tokens, self.made.ints(2))

    def in_fp32(self, x: Any) -> Any:
        """`x` in FP32."""
        return self.op.Cast(x, to=FLOAT)

    def past(self, part: Any, scale: Any, dtype: int) -> Any:
        """The past for a GEMM: codes with scales of heads are dequantized by `HALF`."""
        if scale is None:
            return part
        return self.op.DequantizeLinear(part, self.made.number(HALF), output_dtype=dtype)

    def by_head(self, x: Any, scale: Any) -> Any:
        """`x` [batch, kv_heads, …] of five axes, times the rest of each head's scale."""
        if scale is None:
            return x
        heads = self.op.Reshape(scale, self.made.ints(1, self.form.kv_heads, 1, 1, 1))
        return self.op.Mul(x, self.op.Mul(heads, self.made.number(1 / HALF)))

    def scores(self, grouped_queries: Any) -> Any:
        """The scores of the slots, float32 [batch, kv_heads, blocks, rows, 64], before they are masked."""
        op = self.op
        made = self.made
        form = self.form
        step = self.step_in
        takes_fp32 = step.key_scale is not None or step.past_key.dtype == ir.DataType.FLOAT
        dtype = FLOAT if takes_fp32 else form.dtype
        # the same again for each block: scaled behind the Reshape, so that the GEMM reads no view
        expanded = op.Expand(
            op.Unsqueeze(op.Transpose(grouped_queries, perm=[0, 1, 3, 2]), made.ints(2)),
            made.sizes(self.batch, form.kv_heads, self.blocks, form.size, self.rows),
        )
        queries = op.Mul(
            self.in_fp32(made.reshaped(expanded, self.count, form.size, self.rows)), made.number(self.power)
        )
        raw_scores = op.MatMul(self.past(step.past_key, step.key_scale, dtype), op.Cast(queries, to=dtype))
        by_block = made.reshaped(raw_scores, self.batch, form.kv_heads, self.blocks, BLOCK, self.rows)
        scores = self.in_fp32(op.Transpose(by_block, perm=[0, 1, 2, 4, 3]))
        scores = self.rest_of_scale(self.by_head(scores, step.key_scale))
        if step.bias is not None:
            of_past = op.Slice(step.bias, made.ints(0), self.capacity, made.ints(3))
            of_past = made.reshaped(of_past, self.batch, form.kv_heads, form.group, self.blocks, BLOCK)
            of_past = op.Transpose(of_past, perm=[0, 1, 3, 2, 4])
            scores = op.Add(scores, op.Slice(of_past, made.ints(0), self.rows, made.ints(3)))
        return self.capped(scores)

    def new_token_scores(self, grouped_queries: Any) -> Any:
        """The score of the token itself, float32 [batch, kv_heads, rows, 1]."""
        op = self.op
        made = self.made
        form = self.form
        step = self.step_in
        scaled = op.Mul(self.in_fp32(grouped_queries), made.number(self.power))
        scores = op.ReduceSum(op.Mul(scaled, self.in_fp32(self.first(step.key))), made.ints(3), keepdims=1)
        scores = self.rest_of_scale(scores)
        if step.bias is not None:
            bias = op.Slice(step.bias, self.capacity, op.Add(self.capacity, made.ints(1)), made.ints(3))
            bias = made.reshaped(bias, self.batch, form.kv_heads, form.group, 1)
            scores = op.Add(scores, op.Slice(bias, made.ints(0), self.rows, made.ints(2)))
        return self.capped(scores)

    def rest_of_scale(self, x: Any) -> Any:
        """`x` times what the power of two leaves of the softmax's scale."""
        if self.left == 1:
            return x
        return self.op.Mul(x, self.made.number(self.left))

    def capped(self, x: Any) -> Any:
        """Scores within the cap."""
        if self.form.softcap is None:
            return x
        cap = self.made.number(self.form.softcap)
        return self.op.Mul(self.op.Tanh(self.op.Div(x, cap)), cap)

    def attended(self, scores: Any, new_token: Any) -> Any:
        """The mean of the values by the softmax of the `scores` of slots and of `new_token` [batch, kv_heads, 1,
        rows, 1], float32 [batch, kv_heads, 1, rows, size].
        """
        op = self.op
        made = self.made
        form = self.form
        step = self.step_in
        # of each block first: there may be no block, and a maximum of nothing is an error
        of_blocks = op.ReduceMax(scores, made.ints(4), keepdims=1)
        most = op.ReduceMax(op.Concat(of_blocks, new_token, axis=2), made.ints(2), keepdims=1)
        weights, new_token_weight = (op.Exp(op.Sub(part, most)) for part in (scores, new_token))
        total = op.Add(op.ReduceSum(weights, made.ints(2, 4), keepdims=1), new_token_weight)
        by_block = made.reshaped(op.Cast(weights, to=form.dtype), self.count, self.rows, BLOCK)
        parts = op.MatMul(by_block, self.past(step.past_value, step.value_scale, form.dtype))
        parts = made.reshaped(parts, self.batch, form.kv_heads, self.blocks, self.rows, form.value_size)
        summed = self.by_head(op.ReduceSum(self.in_fp32(parts), made.ints(2), keepdims=1), step.value_scale)
        new_token_value = op.Unsqueeze(self.in_fp32(self.first(step.value)), made.ints(2))
        return op.Div(op.Add(summed, op.Mul(new_token_weight, new_token_value)), total)
