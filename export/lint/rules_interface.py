"""Rules F305 to F308, F318 and F319: names, inputs and outputs as `modules.graph_model` traces them."""

import re

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto

from ...core.findings import Broken
from ..onnx_file import names
from ..onnx_file.constants import Numbers
from ..onnx_file.indexed import Indexed
from ..onnx_file.tensors import Array, attribute, type_name
from ..onnx_file.weight_scales import weight_of
from .rules import Expectation, expectation_rule
from .rules_gemms import activation_of, quantize_of
from .rules_terms import end_of

#: Input -> its dimensions. Each layer has a key and a value of the past, in blocks (`past_in_blocks`) or, in older
#: graphs, of `PAST` dimensions, and answers with one of `NEW`.
INPUTS = {
    "input_ids": ("batch", "seq"),
    "attention_mask": ("batch", "capacity + seq"),
    "position_ids": ("batch", "seq"),
}
LOGITS = ("batch", "seq", int)
#: The input of a graph that gives the logits of these positions alone, and its logits.
ASKED = {names.LOGITS_INDICES: ("batch", "scored")}
ASKED_LOGITS = ("batch", "scored", int)
PAST = ("batch", int, "capacity", int)
#: What lies between a step's GEMM and the scales of its heads, and between these and their constant.
MOVES = ("Reshape", "Transpose", "Cast", "ReduceSum", "Unsqueeze")
NEW = ("batch", int, "seq", int)
#: The axis of the heads in keys and values.
HEADS = 1


def past_in_blocks(heads: int | str) -> tuple[object, ...]:
    """The dimensions of the past of a tensor with so many heads: blocks of slots, which a decode step reads where they
    lie.
    """
    return (f"{heads}*batch*blocks", names.BLOCK, int)


@expectation_rule("F305", "module-names")
def module_names(graph: Indexed, expected: Expectation) -> Broken:
    """Nodes are named after their module (`names`): `M.matmul`, `M.bias_add`, `M.weight.dequantize`, and
    `G.input.quantize` after the first of a group.

    A name that says something else than what the node is would make every later tool, and the proof, speak of the wrong
    module.
    """
    ends = {gemm.node.name: end_of(graph, gemm) for gemm in graph.gemms}
    for node in graph.nodes:
        module = names.module_of(node.name) or ""
        if node.name == names.matmul(module) and node.op_type not in ("MatMul", "Gemm"):
            yield node.name, f"bears a GEMM's name and is {node.op_type}; rename it"
        if node.name == names.bias_add(module):
            last = ends.get(names.matmul(module))
            if node.op_type != "Add" or last is None or last.output[0] not in node.input:
                added = names.matmul(module) if last is None else last.name
                yield node.name, f"bears the name of a bias, and does not add to {added}; rename it"
    for gemm in graph.gemms:
        module = names.module_of(gemm.node.name) or ""
        weight = weight_of(graph, gemm)
        activation = activation_of(graph, gemm)
        if (
            module not in expected.input_scales
            or weight is None
            or activation is None
            or weight.dequantize is None
            or activation.dequantize is None
        ):
            continue
        if weight.dequantize.name != names.weight_dequantize(module):
            yield (
                weight.dequantize.name,
                f"dequantizes the weight of {module}; name it {names.weight_dequantize(module)}",
            )
        first = names.module_of(activation.dequantize.name) or ""
        quantize = quantize_of(graph, activation)
        if first not in expected.input_scales or activation.dequantize.name != names.input_pair(first).dequantize:
            yield (
                activation.dequantize.name,
                f"dequantizes the input of {module}; name it after the first module that reads it",
            )
        elif quantize is not None and quantize.name != names.input_pair(first).quantize:
            yield quantize.name, f"quantizes the input of {module}; name it {names.input_pair(first).quantize}"


@expectation_rule("F306", "interface")
def interface(graph: Indexed, expected: Expectation) -> Broken:
    """Inputs and outputs are those of the contract: three of int64, and a fourth where logits are asked for; a past
    key and value a layer, logits, a new key and value a layer of the past's type.
    """
    for name in _token_inputs(graph):
        if name not in graph.inputs:
            yield "", f"there is no input {name}; run `fp8q export` again"
        elif _kind(graph.inputs[name]) != TensorProto.INT64:
            yield "", f"the input {name} is {type_name(_kind(graph.inputs[name]))}; make it INT64"
    if "logits" not in graph.outputs:
        yield "", "there is no output logits; run `fp8q export` again"
    layers = range(sum(name.startswith("past_key_values.") for name in graph.inputs) // 2)
    pasts = {
        f"past_key_values.{layer}.{part}": f"new_key_values.{layer}.{part}"
        for layer in layers
        for part in ("key", "value")
    }
    if not pasts:
        yield "", "there is no input past_key_values.0.key; run `fp8q export` again"
    for past, new in pasts.items():
        if past not in graph.inputs or new not in graph.outputs:
            yield (
                "",
                (
                    f"there is no {'input ' + past if past not in graph.inputs else 'output ' + new}; run `fp8q "
                    "export` "
                    "again"
                ),
            )
        elif _kind(graph.inputs[past]) != _kind(graph.outputs[new]):
            kinds = [type_name(_kind(value)) for value in (graph.outputs[new], graph.inputs[past])]
            yield (
                "",
                (
                    f"the output {new} is {kinds[0]} and the input {past} is {kinds[1]}; the new ones become the past, "
                    "make them one type"
                ),
            )
    known = {*_token_inputs(graph), "logits", *pasts, *pasts.values()}
    for name in [*graph.inputs, *graph.outputs]:
        if name not in known:
            yield "", f"{name} is no input or output of the contract; run `fp8q export` again"


@expectation_rule("F318", "cache-scale")
def cache_scale(graph: Indexed, expected: Expectation) -> Broken:
    """Keys and values are quantized, and dequantized, by the scales in `scales.json`: one for a layer, or one for each
    head along the axis of the heads. A decode step applies those of heads to its GEMMs, and not to the past.
    """
    nodes = {node.name: node for node in graph.nodes}
    for tensor, run_scales in expected.cache.items():
        owner = tensor.rsplit(".", 1)
        step = names.cache_dequantize_step(*owner) if run_scales is not None and run_scales.size == 1 else ""
        for name in (*names.cache_pair(*owner), names.cache_dequantize_past(*owner), step):
            scale = graph.constant(nodes[name].input[1]) if name in nodes else None
            if run_scales is None or scale is None:  # a node that is not there is F306's, by the type of its codes
                continue
            if scale.size != run_scales.size or (scale.ravel() != run_scales.ravel()).any():
                yield (
                    name,
                    f"scales are {_listed(scale)}, and scales.json has {_listed(run_scales)}; run `fp8q export` again",
                )
            elif run_scales.size > 1 and attribute(nodes[name], "axis", 1) != HEADS:
                yield (
                    name,
                    f"has a scale for each index of axis {attribute(nodes[name], 'axis', 1)}; heads are axis {HEADS}",
                )
        gemm = nodes.get(names.step_gemm(owner[0], "scores" if owner[1] == "k" else "values"))
        if gemm is not None and run_scales is not None and run_scales.size > 1:
            applied = step_scales(graph, gemm, gemm.input[0 if owner[1] == "k" else 1])
            if applied is None or not np.array_equal(applied.ravel(), run_scales.ravel()):
                listed = "none" if applied is None else _listed(applied)
                yield (
                    gemm.name,
                    f"applies the scales {listed}, and scales.json has {_listed(run_scales)}; run `fp8q export` again",
                )


def step_scales(graph: Indexed, gemm: NodeProto, past: str) -> Numbers | None:
    """The scale of each head that a step applies: the one that its `past` is dequantized by, times the factors by which
    the result of its GEMM is multiplied first; None where there are none.
    """
    dequantize = graph.producers.get(past)
    one = graph.constant(dequantize.input[1]) if dequantize is not None and len(dequantize.input) > 1 else None
    value = gemm.output[0]
    while len(readers := graph.readers.get(value, [])) == 1:
        reader, side = readers[0]
        if reader.op_type == "Mul":
            factors = _product(graph, reader.input[1 - side])
            if one is None or factors is None:
                return None
            return one * factors
        if reader.op_type not in MOVES:
            return None
        value = reader.output[0]
    return None


def _product(graph: Indexed, value: str) -> Numbers | None:
    """The values of a constant, through products of constants and what moves them; None where it is computed."""
    if (constant := graph.constant(value)) is not None:
        return constant
    node = graph.producers.get(value)
    if node is not None and node.op_type == "Mul":
        first, second = (_product(graph, name) for name in node.input)
        if first is None or second is None:
            return None
        return first * second
    if node is not None and node.op_type in MOVES:
        return _product(graph, node.input[0])
    return None


def _listed(scale: Array) -> str:
    """Format the first numbers of a scale, and the number of the others."""
    more = f" and {scale.size - 3} more" if scale.size > 3 else ""
    return ", ".join(f"{number:.9g}" for number in scale.ravel()[:3]) + more


def _token_inputs(graph: Indexed) -> dict[str, tuple[str, str]]:
    """The inputs other than the KV cache, with their dimensions."""
    if names.LOGITS_INDICES in graph.inputs:
        return INPUTS | ASKED
    return INPUTS


def _kind(value: ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type


@expectation_rule("F307", "dynamic-axes")
def dynamic_axes(graph: Indexed, expected: Expectation) -> Broken:
    """Batch, seq, capacity and its blocks are dynamic, and scored where logits are asked for, under these names, and
    all else is static: profiles and serving find the sizes by the names.
    """
    tokens = _token_inputs(graph)
    logits = ASKED_LOGITS if names.LOGITS_INDICES in tokens else LOGITS
    for name, value in [*graph.inputs.items(), *graph.outputs.items()]:
        past = re.fullmatch(r"(past|new)_key_values\.\d+\.(key|value)", name)
        sizes = _sizes(value)
        wanted: tuple[object, ...] | None = logits if name == "logits" else tokens.get(name)
        if past:
            new = graph.outputs.get(re.sub("^past_", "new_", name))
            wanted = NEW if past[1] == "new" else PAST if len(sizes) == len(PAST) else _past_of(new)
        if wanted is None or (past and past[1] == "new" and _holds_past(sizes)):
            continue
        if len(sizes) != len(wanted) or not all(
            isinstance(size, int) and size > 0 if want is int else size == want for size, want in zip(sizes, wanted)
        ):
            text = ", ".join("size" if want is int else str(want) for want in wanted)
            yield "", f"{name} is [{', '.join(map(str, sizes))}]; give it the contract's [{text}]"


def _sizes(value: ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _past_of(new: ValueInfoProto | None) -> tuple[object, ...] | None:
    """The dimensions of the past in blocks, whose heads the output `new` tells; None without it, which F306 says."""
    if new is None:
        return None
    sizes = _sizes(new)
    return past_in_blocks(sizes[HEADS] if len(sizes) == len(NEW) else "heads")


@expectation_rule("F308", "new-keys-alone")
def new_keys_alone(graph: Indexed, expected: Expectation) -> Broken:
    """Only this step's keys and values leave the graph: with the past among them, each step would copy the whole
    cache.
    """
    for name, value in graph.outputs.items():
        if name.startswith("new_key_values.") and _holds_past(
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        ):
            yield (
                "",
                f"the output {name} has the past in it (its length is capacity + seq); give out the new ones alone",
            )


@expectation_rule("F319", "copied-cache", "warning")
def copied_cache(graph: Indexed, expected: Expectation) -> Broken:
    """The past is an input in blocks of slots, which a decode step reads where it lies. Graphs of before have one of
    [batch, heads, capacity, size], to which a step appends the new keys and values: its engine reads the whole cache
    and writes a copy of it in the compute type, five bytes an element of an FP8 cache where one is enough.
    """
    pasts = [name for name in graph.inputs if name.startswith("past_key_values.")]
    if copied := [name for name in pasts if len(_sizes(graph.inputs[name])) == len(PAST)]:
        form = f"{copied[0]} is [batch, heads, capacity, size], and each decode step copies the whole cache"
        yield "", f"{form}; run `fp8q export` again for one in blocks, which a step reads once"


def _holds_past(dims: list[str | int]) -> bool:
    return len(dims) == len(NEW) and "capacity" in str(dims[2])
