"""A Hugging Face decoder as one plain ONNX graph of standard operators, with its weights left in their files.

The model is made on the meta device, so memory does not grow with the weights, and traced by
`torch.onnx.export(dynamo=True)`. Three parts of it are replaced: linear layers by layers on FP8 codes, attention by one
that makes its mask from positions, and the cache by a buffer of fixed capacity of which only the new keys and values
are outputs. The position of a slot is the number of filled slots before it. Batches are padded on the left: a padded
token is masked and has a position that the row has in the call, so that it sees a token and is a number; its keys and
values may be appended or not.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...calibrate.model.classes import nested
from ...calibrate.model.expert_modules import experts_of
from ...calibrate.model.gemms import attention_modules, output_channel_axis
from ...options import BF16
from ...quantize.codes.encoding import CODE
from ...quantize.codes.formats import TWO_TERMS
from ...quantize.reference.linear import replace_linears
from ...quantize.scales.scheme import Scheme
from . import operators
from .attention import (
    GraphCache,
    GraphCall,
    GraphLayer,
    Keys,
    PlainCache,
    QuantizedCache,
    StepAttention,
    as_sequences,
    attending,
    attention,
    weights_of,
)
from .cached_attention import capacity_of, of_prompt
from .replaced_attention import alibi_slopes, bias, fix_frequencies
from .replaced_attention import replace as replace_attention
from .traced_experts import GraphExperts, groups_by_expert

ATTENTION = "fp8q"
#: With branches of experts in more layers, or parallel to attention (`_parallel`), TensorRT-RTX 1.7 finds no kernel for
#: ONNX's Attention any more (12 were built, 16 not). It still makes the same kernel of two matmuls and a softmax, but
#: the plan does not show the scale that the kernel quantizes its result by.
MIXED_LAYERS = 12


@dataclass(frozen=True)
class GraphPlan:
    """The parts of a model that run in FP8.

    `groups`: first module -> quantized modules that share its input. `cache`: the cached tensors on codes,
    `<attention>.k` or `.v`; `cache_heads`: those among them with a scale for each head -> the number of heads. `dtype`:
    the compute type of everything else. `code`: the type of the codes, INT8 for a baseline. `schemes`: module
    -> its scheme; one that is absent has one code a value, and a scale for each output channel.
    `attention`: codes for each query or probability, 0 for attention without codes. `adapter`: the name of the adapter
    beside the GEMMs. `asked_logits`: the graph has an input that says which positions' logits it gives, and gives no
    others.
    """

    groups: Mapping[str, list[str]]
    cache: Collection[str]
    dtype: torch.dtype
    code: torch.dtype = CODE
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    cache_heads: Mapping[str, int] = field(default_factory=dict)
    attention: int = 0
    adapter: str | None = None
    asked_logits: bool = True

    def scheme(self, module: str) -> Scheme:
        """The scheme of a quantized module."""
        return self.schemes.get(module, Scheme())


class QuantizedInput(nn.Module):
    """The input of a group of modules: all of them receive one tensor, which is quantized once.

    In two `terms` it has twice the rows along `axis` (`FirstTerm`), or with a `tail` more positions
    (`FirstTermOfTail`). Its GEMM is FP32 then, so that the sum of both terms is rounded once (docs/two-terms.md).
    """

    def __init__(self, plan: GraphPlan, terms: int = 1, axis: int = 0, tail: int | None = None):
        super().__init__()
        self.code = plan.code
        self.terms = terms
        self.axis = axis
        self.tail = tail
        self.dtype = plan.dtype if terms == 1 else torch.float32
        self.register_buffer("scale", torch.empty((), dtype=torch.float32, device="meta"))
        in_two = FirstTerm(axis) if tail is None else FirstTermOfTail(tail)
        self.first = in_two if terms == 2 else None
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self.rows: torch.Tensor | None = None

    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize `x`, to the type of the GEMM; `rows` is `x` as the GEMM has its rows."""
        if self._last is None or self._last[0] is not x:
            self.rows = x if self.tail is None else as_sequences(x)
            terms = self.rows if self.first is None else self.first(self.rows, self.scale)
            self._last = (x, rounded(terms, self.scale, self.code, self.dtype))
        return self._last[1]

    def halves(self) -> "Halves | HalvesOfTail | None":
        """The module that adds both terms of a GEMM; None for one term."""
        if self.first is None:
            return None
        if self.tail is None:
            return Halves(self.axis)
        return HalvesOfTail(self.tail)


class InputAsItIs(nn.Module):
    """The input of a group of modules of which the weights alone are codes."""

    def __init__(self, plan: GraphPlan):
        super().__init__()
        self.dtype = plan.dtype
        self.tail = None
        self.rows = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` unchanged."""
        return x

    def halves(self) -> None:
        """There is nothing to add."""


def rounded(x: torch.Tensor, scale: torch.Tensor, code: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Quantize and dequantize `x`."""
    values: torch.Tensor = operators.dequantize(operators.quantize(x, scale, code), scale, dtype)
    return values


def second_term(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sixteen times the error of the first term of `x`, whose codes are the second term; exact in the type of `x`."""
    return (x - rounded(x, scale, CODE, x.dtype)) * TWO_TERMS.divisor


class FirstTerm(nn.Module):
    """Put the second term behind `x` along `axis`."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Make [2 batch, …, width] of `x` [batch, …, width], or twice as much of another axis."""
        return torch.cat([x, second_term(x, scale)], dim=self.axis)


class FirstTermOfTail(nn.Module):
    """Put the second term of the last `length` positions of a call behind all positions."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Make [batch, seq + tail, width] of `x` [batch, seq, width]; the tail has `length` positions, or seq where the
        call has fewer.
        """
        return torch.cat([x, second_term(operators.last_positions(x, self.length), scale)], dim=1)


class Halves(nn.Module):
    """Add the halves of a GEMM in two terms: the first, and a sixteenth of the second, behind each other along
    `axis`.
    """

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, sums: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """`sums` float32 [2 batch, …, out] to [batch, …, out]."""
        first, second = operators.halves(sums, self.axis)
        both: torch.Tensor = first + second * (1 / TWO_TERMS.divisor)
        return both


class HalvesOfTail(nn.Module):
    """Add a sixteenth of the GEMM of a tail's second terms to that of the last `length` positions."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, sums: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`sums` float32 [batch, seq + tail, out] of `x` [batch, seq, in] to [batch, seq, out]."""
        first, second = operators.part_behind(sums, x)
        tail = operators.last_positions(first, self.length) + second * (1 / TWO_TERMS.divisor)
        rows = torch.cat([operators.first_positions(first, self.length), tail], dim=1)
        both: torch.Tensor = operators.positions_of(rows, x, sums.shape[-1])
        return both


class GraphLinear(nn.Module):
    """A linear layer of the graph: DequantizeLinear(weight) -> Transpose -> MatMul -> Add of the bias, if any.

    The weight of a Conv1D needs no Transpose. With two terms the halves are added behind the MatMul. A layer with a
    tail takes tokens [batch · seq, in], which some models make of their sequences, as [batch, seq, in] again.
    """

    def __init__(
        self, linear: nn.Linear | Conv1D, quantized: QuantizedInput | InputAsItIs, first: bool, plan: GraphPlan,
        one_scale: bool = False,
    ):  # fmt: skip
        """Replace `linear`, whose group shares `quantized`; the `first` of the group gives it its name. `one_scale`:
        its weight has one.
        """
        super().__init__()
        self.dtype = plan.dtype
        self.axis = output_channel_axis(linear)
        self.halves = quantized.halves()
        self.tail = quantized.tail
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=plan.code, device="meta"))
        scales = () if one_scale else (linear.weight.shape[self.axis],)
        self.register_buffer("weight_scale", torch.empty(scales, dtype=torch.float32, device="meta"))
        self.bias = linear.bias
        self.quantized = [quantized]  # in a list, so that only the first registers it
        if first:
            self.input = quantized

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x` [..., in] to [..., out]."""
        (quantized,) = self.quantized
        weight = operators.dequantize(self.weight, self.weight_scale, quantized.dtype, self.axis)
        y = torch.matmul(quantized(x), weight if self.axis else weight.t())
        if self.halves is None:
            return y if self.bias is None else y + self.bias
        total: torch.Tensor = self.halves(y, quantized.rows)
        total = (total if self.bias is None else total + self.bias.float()).to(self.dtype)
        if total.dim() > x.dim():
            return total.flatten(0, -2)
        return total


class Graph(nn.Module):
    """The module that is traced: its inputs and outputs are those of the ONNX graph, in order."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        #: Layer index -> its attention, of the layers that are traced.
        self.attention = attention_modules(model)
        self.slopes = alibi_slopes(model)
        #: Whether the model itself is told of positions: with ALiBi alone they are its attention's.
        self.positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [batch, seq, vocabulary], and the new keys and values of every layer.

        With `logits_indices` int64 [batch, scored] the logits are those of these positions of the call alone, [batch,
        scored, vocabulary].
        """
        layers = {
            i: GraphLayer(self.model.get_submodule(self.attention[i]), pair)
            for i, pair in zip(sorted(self.attention), past, strict=True)
        }
        cache = GraphCache(layers)
        inputs = text_input(self.model, input_ids) | ({"position_ids": position_ids} if self.positions else {})
        call = self.call(attention_mask, position_ids, [*layers.values()])
        if self.slopes:  # positions are its attention's alone, and nothing tells the exporter how many there are
            for axis in (0, 1):
                torch._check(position_ids.shape[axis] == input_ids.shape[axis])
        with attending(call), at_positions(self.model, logits_indices):
            logits = self.model(**inputs, past_key_values=cache, use_cache=True).logits
        return (logits, *(new for layer in layers.values() for new in layer.new))

    def call(self, mask: torch.Tensor, positions: torch.Tensor, layers: Collection[GraphLayer]) -> GraphCall:
        """The keys of a call with this `mask` [batch, capacity + seq] of tokens at `positions` [batch, seq]."""
        capacity = capacity_of(mask, positions)
        filled = mask[:, :capacity]
        past = Keys(filled.cumsum(1) - 1, filled)  # so a slot that is not filled has no position of its own

        slots, seen = (of_prompt(part, positions, 1) for part in (past.positions, filled))
        every, keys = (torch.cat([part, positions], dim=1) for part in (past.positions, slots))
        of_every, of_prompt_keys = (bias(self.model, self.slopes, part) for part in (every, keys))
        prompt = Keys(keys, torch.cat([seen, mask[:, capacity:]], dim=1), of_prompt_keys)
        return GraphCall(positions, mask, past, of_every, prompt, layers)


@contextmanager
def at_positions(model: PreTrainedModel, indices: torch.Tensor | None) -> Iterator[None]:
    """Make the output head of `model` read only these positions of its input [batch, seq, width]; `indices` int64
    [batch, scored], None for all.

    The head is found as transformers finds it, and gathered in front of: `logits_to_keep` of transformers' models takes
    one list of positions for all rows, and not every model has it. Raises RuntimeError where the block calls no head.
    """
    if indices is None:
        yield
        return
    head = model.get_output_embeddings()
    called: list[nn.Module] = []

    def gather(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        called.append(module)
        return (operators.at_indices(inputs[0], indices), *inputs[1:])

    with head.register_forward_pre_hook(gather) if head is not None else nullcontext():
        yield
    if not called:
        raise RuntimeError("its output head is no module that it calls, which `--logits all` needs not")


def text_input(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of `model` for these tokens: embeddings for a model that would look for images among token ids."""
    if nested(model.config):
        return {"inputs_embeds": model.get_input_embeddings()(input_ids)}
    return {"input_ids": input_ids}


class MatMul(nn.Module):
    """A GEMM as a module, so that its node gets a name."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply `a` [..., n, k] by `b` [..., k, m]."""
        return torch.matmul(a, b)


class QuantizedAttention(nn.Module):
    """Attention as two GEMMs of codes and a softmax in FP32.

    Query heads that share a key head are one matrix, so keys and values are not repeated. The two terms of queries and
    probabilities lie along its rows, for the same reason.
    """

    def __init__(self, plan: GraphPlan):
        super().__init__()
        self.dtype = plan.dtype
        self.q, self.p = (QuantizedInput(plan, plan.attention, axis=2) for _ in "qp")
        inside = replace(plan, dtype=self.q.dtype)
        self.k, self.v = (QuantizedInput(inside) for _ in "kv")
        self.scores = MatMul()
        self.values = MatMul()
        self.scores_halves, self.values_halves = self.q.halves(), self.p.halves()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attend `query` [batch, heads, seq, size] to `key` and `value` [batch, kv_heads, length, size]; `allowed`
        [batch, 1, seq, length].
        """
        batch, heads, seq, size = query.shape
        kv_heads, length = key.shape[1:3]
        grouped = query.reshape(batch, kv_heads, heads // kv_heads * seq, size)
        raw_scores = self.scores(self.q(grouped), self.k(key).transpose(-1, -2))
        if self.scores_halves is not None:
            raw_scores = self.scores_halves(raw_scores)
        scores = raw_scores.float().reshape(batch, heads, seq, length) * scale
        weights = weights_of(scores, allowed, softcap).reshape((*grouped.shape[:3], length))
        output: torch.Tensor = self.values(self.p(weights), self.v(value))
        if self.values_halves is not None:
            output = self.values_halves(output).to(self.dtype)
        return output.reshape(batch, heads, seq, value.shape[-1])


def _parallel(model: PreTrainedModel, attention: str) -> bool:
    """Tell whether a layer's experts and its attention read the same normed tensor, as in Cohere's models."""
    layer = model.get_submodule(attention.rpartition(".")[0])
    return sum("norm" in type(child).__name__.lower() for child in layer.children()) < 2


def prepare_graph(model: PreTrainedModel, plan: GraphPlan) -> Graph:
    """Replace layers, attention and cache of `model` by the graph's; `model` is on the meta device and changed in
    place.
    """
    AttentionInterface.register(ATTENTION, attention)
    fix_frequencies(model)
    replace_attention(model, ATTENTION)
    layers: dict[str, nn.Module] = {}
    places = experts_of(model)
    for members in groups_by_expert(places, plan.groups):
        form = plan.scheme(members[0]).input
        quantized = InputAsItIs(plan) if form == BF16 else QuantizedInput(plan, form.terms, tail=form.tail)
        for name in members:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear | Conv1D), f"{name} is no linear layer"
            in_one = plan.scheme(name).weights == "tensor"
            layers[name] = GraphLinear(linear, quantized, name == members[0], plan, in_one)
    replace_linears(model, layers)
    for name, experts in places.items():
        model.set_submodule(name, GraphExperts(experts))
    for name in attention_modules(model).values():
        module = model.get_submodule(name)
        if plan.attention:
            module.fp8q_attention = QuantizedAttention(plan)
        vars(module)["fp8q_plain"] = len(places) > MIXED_LAYERS or (bool(places) and _parallel(model, name))
        module.fp8q_k, module.fp8q_v = (
            QuantizedCache(plan.dtype, plan.cache_heads.get(f"{name}.{part}"), torch.float32 if part == "k" else None)
            if f"{name}.{part}" in plan.cache
            else PlainCache()
            for part in "kv"
        )
        module.fp8q_step = StepAttention(plan.dtype)
    return Graph(model.eval())
