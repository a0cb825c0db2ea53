"""Name the nodes, values and constants of the graph after the Hugging Face modules that made them.

A name consists of the module and a number within the module, never a count over the whole graph. So the names of two
layers of one kind differ by the layer index alone, one layer can be copied from another (`layer_copies`), and a reader
of a name knows the module.
"""

import ast
import re
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from ..onnx_file import names

SCOPES = "pkg.torch.onnx.name_scopes"


def name_interface(model: ir.Model, layers: Iterable[int]) -> None:
    """Name inputs, outputs and dynamic dimensions.

    1. `past_key_values.N.key|value` and `new_key_values.N.key|value` of `layers`, in the order of tracing. 2. An input
    behind the past says which logits are asked for: it becomes `logits_indices`, and lies in front of the past. 3. The
    exporter's symbols become batch, seq, capacity, blocks (of the capacity) and scored in every shape, in sums and
    GEMMs too.
    """
    inputs = model.graph.inputs
    outputs = model.graph.outputs
    parts = [f"{layer}.{part}" for layer in layers for part in ("key", "value")]
    past = inputs[3 : 3 + len(parts)]
    asked = inputs[3 + len(parts) :]
    for value, part in zip(past, parts, strict=True):
        value.name = f"past_key_values.{part}"
    for value, name in zip(outputs, ["logits", *(f"new_key_values.{part}" for part in parts)], strict=True):
        value.name = name
    sizes = [(inputs[0], 0, "batch"), (inputs[0], 1, "seq"), (inputs[1], 1, _LENGTH)]
    for value, new in zip(past, outputs[1:], strict=True):
        if value.shape is not None and len(value.shape) == len(new.shape or ()):
            sizes.append((value, 2, "capacity"))
        else:
            sizes.append((value, 0, f"{new.shape[1] if new.shape is not None else None}*batch*blocks"))
    for value in asked:
        value.name = names.LOGITS_INDICES
        sizes += [(value, 0, "batch"), (value, 1, "scored")]
    symbols = {str(value.shape[axis]): name for value, axis, name in sizes if value.shape is not None}
    for value in values_of(model):
        if value.shape is not None:
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else _renamed(str(dim), symbols) for dim in value.shape]
            )
    scored = "scored" if asked else "seq"
    outputs[0].shape = ir.Shape(["batch", scored, outputs[0].shape[2] if outputs[0].shape else None])
    inputs[:] = [*inputs[:3], *asked, *past]


def read_sizes_first(model: ir.Model) -> None:
    """Read each dynamic dimension from the first input that has it.

    Any input with this dimension would do, and the exporter's choice depends on the number of layers.
    """
    first: dict[str, tuple[ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            first.setdefault(str(dim), (value, axis))
    for node in model.graph:
        source = node.inputs[0] if node.op_type == "Shape" else None
        if source is None or not source.is_graph_input() or source.shape is None:
            continue
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", len(source.shape))
        if end - start == 1:
            node_source, axis = first[str(source.shape[start])]
            node.replace_input_with(0, node_source)
            node.attributes.update({"start": ir.AttrInt64("start", axis), "end": ir.AttrInt64("end", axis + 1)})


_LENGTH = "length"


def _renamed(dimension: str, symbols: Mapping[str, str]) -> str:
    """Write a dimension, a sum or product of the exporter's symbols, in the graph's; the length of a mask is capacity +
    seq.
    """
    words = re.sub(r"\w+", lambda match: symbols.get(match[0], match[0]), dimension)
    words = re.sub(rf"\({_LENGTH} - seq\)|{_LENGTH} - seq", "capacity", words)
    if words in (_LENGTH, "seq + capacity", "capacity + seq"):
        return "capacity + seq"
    return words.replace(_LENGTH, "(capacity + seq)")


def values_of(model: ir.Model) -> list[ir.Value]:
    """The inputs of the graph, its initializers, and the outputs of its nodes."""
    initializers = model.graph.initializers.values()
    return [*model.graph.inputs, *initializers, *(output for node in model.graph for output in node.outputs)]


def name_nodes(model: ir.Model, attention: Iterable[str] = ()) -> None:
    """Name every GEMM, QuantizeLinear and DequantizeLinear after its Hugging Face module, by the exporter's scopes.

    1. In a `GraphLinear`: the DequantizeLinear of its weight, its MatMul, the Add of its bias. 2. In its `input`: Q and
    DQ of the activation. 3. In `fp8q_k` and `fp8q_v` of a layer: Q, DQ of the new and DQ of the past. 4. A linear layer
    in BF16 or FP16: its MatMul and Add. 5. In `fp8q_attention` of a layer: both GEMMs, Q and DQ. 6. The Attention of
    an attention module. 7. The two GEMMs of a module of `attention` without an Attention.
    """
    scopes = {node: _scope(node) for node in model.graph}
    matrices = {
        name.removeprefix("model.").removesuffix(".weight")
        for name in model.graph.initializers
        if name.endswith(".weight")
    }
    linear = {scope for node, scope in scopes.items() if node.op_type in ("MatMul", "Gemm")} & matrices
    for node, scope in scopes.items():
        if name := _node_name(node, scope, scope in linear):
            node.name = name
    for module in attention:
        matmuls = [node for node, scope in scopes.items() if scope == module and node.op_type == "MatMul"]
        if len(matmuls) == len(names.ATTENTION_GEMMS):
            for node, gemm in zip(matmuls, names.ATTENTION_GEMMS, strict=True):
                node.name = names.attention_gemm(module, gemm)
        step = [(node, node.op_type) for node, scope in scopes.items() if scope == f"{module}.fp8q_step"]
        of_step = [node for node, kind in step if kind == "MatMul"]
        for node, gemm in zip(of_step, names.ATTENTION_GEMMS, strict=bool(of_step)):
            node.name = names.step_gemm(module, gemm)
        for node in (node for node, kind in step if kind == "DequantizeLinear"):  # of codes with scales for each head
            read = next(iter(node.outputs[0].uses())).node.name
            node.name = names.cache_dequantize_step(module, "k" if read == names.step_gemm(module, "scores") else "v")


_CACHE_PART = re.compile(r"(?P<owner>.+)\.fp8q_(?P<part>[kv])\.(?P<of>past|step)")


def _scope(node: ir.Node) -> str:
    """The Hugging Face module whose forward pass made `node`; empty where it is not known."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    scope = str(scopes[-2]).removeprefix("model.") if len(scopes) > 1 else ""
    return "" if scope.startswith("_") else scope


def _node_name(node: ir.Node, scope: str, linear: bool) -> str | None:
    owner, _, last = scope.rpartition(".")
    if node.op_type == "Attention" and scope:
        return names.attention_node(scope)
    if ".fp8q_attention." in scope:
        return _attention_node_name(node, *scope.split(".fp8q_attention."))
    if last == "input":
        return _among(node, names.input_pair(owner))
    if last == "first" and owner.endswith(".input"):
        return _among(node, names.first_pair(owner.removesuffix(".input")))
    if last == "halves":
        return _among(node, names.two_term_nodes(owner))
    if last in ("fp8q_k", "fp8q_v"):
        part = last[-1]
        return _among(node, names.cache_pair(owner, part))
    if node.op_type == "DequantizeLinear" and (cache := _CACHE_PART.fullmatch(scope)):
        name = names.cache_dequantize_past if cache["of"] == "past" else names.cache_dequantize_step
        return name(cache["owner"], cache["part"])
    if linear:
        stored = any(value is not None and value.is_initializer() for value in node.inputs)  # a bias on its way to FP32
        kinds = {
            "MatMul": names.matmul(scope),
            "Gemm": names.matmul(scope),
            "Add": names.bias_add(scope) if _adds_to_gemm(node) else None,
            "DequantizeLinear": names.weight_dequantize(scope),
            "Cast": None if stored else names.narrow(scope),
        }
        return kinds.get(node.op_type)
    return None


def _adds_to_gemm(node: ir.Node) -> bool:
    """Tell whether one operand of an addition is a GEMM: routers also add, but to scores behind an activation."""
    maker = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return maker is not None and maker.op_type in ("MatMul", "Gemm", "Mul", "Add", "Cast")


def _attention_node_name(node: ir.Node, module: str, inside: str) -> str | None:
    """Name a node inside the `fp8q_attention` of a module: in q, k, v or p, in a GEMM, or in the two terms of one of
    these.
    """
    part, _, of_two = inside.partition(".")
    if part in names.ATTENTION_GEMMS:
        return names.attention_gemm(module, part)
    if part.endswith("_halves"):
        return _among(node, names.attention_halves(module, part.removesuffix("_halves")))
    return _among(node, (names.attention_first_pair if of_two else names.attention_pair)(module, part))


def _among(node: ir.Node, called: names.Pair | names.TwoTermNodes) -> str | None:
    """Choose the node's name by its operator."""
    operators = ("QuantizeLinear", "DequantizeLinear") if isinstance(called, names.Pair) else ("Split", "Add")
    return dict(zip(operators, called, strict=True)).get(node.op_type)


def name_the_rest(model: ir.Model, stored: Collection[str]) -> None:
    """Name all nodes and values without a name, after the module M that made them (without a prefix where none did).

    1. A node that `name_nodes` left: `M.Reshape_2` is the second such Reshape of M. A node of a pass belongs to the
    module of the node in front of it. 2. An output of a node: `<node>.output`, numbered where there are several;
    outputs of the graph keep their names. 3. A constant: `<node>.constant_1`, after its first reader and its place
    among that node's inputs. `stored` names the initializers that have a name already; a Cast of one is named after it.
    """
    counts: dict[str, int] = {}
    named = set(stored)
    module = ""
    for node in model.graph:
        module = _scope(node) if SCOPES in node.metadata_props else module
        source = node.inputs[0].name if node.op_type == "Cast" and node.inputs[0] is not None else None
        if source in stored and node.name == f"{source}.cast":
            continue
        if names.module_of(node.name or "") is None:
            kind = ".".join(filter(None, (module, node.op_type)))
            counts[kind] = counts.get(kind, 0) + 1
            node.name = f"{kind}_{counts[kind]}"
        for index, value in enumerate(node.inputs):
            if value is not None and value.is_initializer() and value.name not in named:
                value.name = f"{node.name}.constant_{index}"
                named.add(value.name)
        for index, value in enumerate(node.outputs):
            if not value.is_graph_output():
                value.name = f"{node.name}.output" + (f"_{index}" if len(node.outputs) > 1 else "")
