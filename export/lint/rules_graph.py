"""Rules F3xx: the file, its operators, and the interface that DESIGN's section "The ONNX graph" fixes."""

import re
from collections import Counter

from onnx import IR_VERSION, AttributeProto, TensorProto, ValueInfoProto, helper
from onnx import __version__ as onnx_version

from .. import names
from .indexed import Indexed
from .rules import Broken, Promise, promise_rule, rule
from .rules_codes import scales, type_name
from .rules_products import activation_of, quantize_of, weight_of
from .schemas import STANDARD, schema_of

#: FP8 entered QuantizeLinear and DequantizeLinear with opset 19 and IR version 9; in opset 24 ONNX Runtime's CPU
#: provider lacks Q/DQ on BF16.
FIRST_OPSET, LAST_OPSET, FIRST_IR = 19, 23, 9
#: The last that TensorRT-RTX (1.7.1) was seen to build in FP8.
LAST_BUILT = 24
#: Input -> its dimensions. Each layer has a key and a value of `PAST` dimensions, and answers with one of `NEW`.
INPUTS = {
    "input_ids": ("batch", "seq"),
    "attention_mask": ("batch", "capacity + seq"),
    "position_ids": ("batch", "seq"),
}
LOGITS = ("batch", "seq", int)
PAST = ("batch", int, "capacity", int)
NEW = ("batch", int, "seq", int)
WRITE_AGAIN = "export the graph again"


@rule("F301", "opset")
def opset(graph: Indexed) -> Broken:
    """The opset has FP8, and the runtimes have the opset: TensorRT parses one that it does not know as if it did."""
    if graph.opset < FIRST_OPSET:
        yield "", f"opset {graph.opset} has no FP8; export with opset {LAST_OPSET}"
    if graph.opset > LAST_BUILT:
        yield (
            "",
            (
                f"opset {graph.opset} is newer than {LAST_BUILT}, the last that TensorRT-RTX was seen to build in FP8; "
                f"export with opset {LAST_OPSET}"
            ),
        )


@rule("F302", "ir-version", "warning")
def ir_version(graph: Indexed) -> Broken:
    """The IR version is at least the one that came with the opset (and 9, which brought FP8), and a known one: a strict
    reader refuses the file otherwise.
    """
    version, needed = (
        graph.model.ir_version,
        max(FIRST_IR, helper.OP_SET_ID_VERSION_MAP.get(("ai.onnx", graph.opset), FIRST_IR)),
    )
    if version < needed:
        yield (
            "",
            (
                f"IR version {version} is older than opset {graph.opset}, which came with {needed}; write IR version "
                f"{needed}"
            ),
        )
    if version > IR_VERSION:
        yield (
            "",
            (
                f"IR version {version} is newer than {IR_VERSION}, the newest that onnx {onnx_version} knows; write IR "
                f"version {needed}"
            ),
        )


@rule("F303", "standard-operators")
def standard_operators(graph: Indexed) -> Broken:
    """Every operator is of the standard domain and its opset: no custom operator, no plugin, no function of the
    file.
    """
    for function in graph.model.functions:
        yield "", f"defines the function {function.domain}.{function.name}; inline it"
    for node in graph.nodes:
        if node.domain not in STANDARD:
            yield node.name, f"{node.domain}.{node.op_type} is no standard operator; express it in standard ones"
        elif schema_of(node.op_type, graph.opset) is None:
            yield node.name, f"{node.op_type} is no operator of opset {graph.opset}; express it in standard ones"


@rule("F304", "node-names")
def node_names(graph: Indexed) -> Broken:
    """No two nodes bear the same name: an engine says what became of a node by its name."""
    for name, count in Counter(node.name for node in graph.nodes if node.name).items():
        if count > 1:
            yield name, f"{count} nodes bear this name; give each its own"


@promise_rule("F305", "module-names")
def module_names(graph: Indexed, promise: Promise) -> Broken:
    """Nodes are named after their module (`names`): `M.matmul`, `M.bias_add`, `M.weight.dequantize`, and
    `G.input.quantize` after the first of a group.

    A name that says something else than what the node is would make every later tool, and the proof, speak of the wrong
    module.
    """
    for node in graph.nodes:
        module = names.module_of(node.name) or ""
        if node.name == names.matmul(module) and node.op_type not in ("MatMul", "Gemm"):
            yield node.name, f"bears a product's name and is {node.op_type}; rename it"
        if node.name == names.bias_add(module) and not (
            node.op_type == "Add" and any(_made_by(graph, value, names.matmul(module)) for value in node.input)
        ):
            yield node.name, f"bears the name of a bias, and does not add to {names.matmul(module)}; rename it"
    for product in graph.products:
        module = names.module_of(product.node.name) or ""
        weight, activation = weight_of(graph, product), activation_of(graph, product)
        if (
            module not in promise.input_scales
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
        first, quantize = names.module_of(activation.dequantize.name) or "", quantize_of(graph, activation)
        if first not in promise.input_scales or activation.dequantize.name != names.input_dequantize(first):
            yield (
                activation.dequantize.name,
                f"dequantizes the input of {module}; name it after the first module that reads it",
            )
        elif quantize is not None and quantize.name != names.input_quantize(first):
            yield quantize.name, f"quantizes the input of {module}; name it {names.input_quantize(first)}"


def _made_by(graph: Indexed, value: str, node: str) -> bool:
    return value in graph.producers and graph.producers[value].name == node


@promise_rule("F306", "interface")
def interface(graph: Indexed, promise: Promise) -> Broken:
    """Inputs and outputs are those of the contract: three of int64, a past key and value a layer, logits, a new key and
    value a layer of the past's type.
    """
    for name in INPUTS:
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
    known = {*INPUTS, "logits", *pasts, *pasts.values()}
    for name in [*graph.inputs, *graph.outputs]:
        if name not in known:
            yield "", f"{name} is no input or output of the contract; run `fp8q export` again"


def _kind(value: ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type


@promise_rule("F307", "dynamic-axes")
def dynamic_axes(graph: Indexed, promise: Promise) -> Broken:
    """Batch, seq and capacity are dynamic, under these names, and all else is static: profiles and serving find the
    sizes by the names.
    """
    for name, value in [*graph.inputs.items(), *graph.outputs.items()]:
        past = re.fullmatch(r"(past|new)_key_values\.\d+\.(key|value)", name)
        wanted: tuple[object, ...] | None = (
            (PAST if past[1] == "past" else NEW) if past else LOGITS if name == "logits" else INPUTS.get(name)
        )
        found = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if wanted is None or (past and past[1] == "new" and _holds_past(found)):
            continue
        if len(found) != len(wanted) or not all(
            isinstance(size, int) and size > 0 if want is int else size == want for size, want in zip(found, wanted)
        ):
            text = ", ".join("size" if want is int else str(want) for want in wanted)
            yield "", f"{name} is [{', '.join(map(str, found))}]; give it the contract's [{text}]"


@promise_rule("F308", "new-keys-alone")
def new_keys_alone(graph: Indexed, promise: Promise) -> Broken:
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


def _holds_past(dims: list[str | int]) -> bool:
    return len(dims) == len(NEW) and "capacity" in str(dims[2])


@rule("F309", "unnamed-node", "warning")
def unnamed_node(graph: Indexed) -> Broken:
    """Every node has a name: what is found in the graph, or in its engine, cannot be told of one that has none."""
    nodes = [node.name for node in graph.nodes]
    if count := nodes.count(""):
        yield "", f"nodes have no name ({count} of {len(nodes)}); name them"


@rule("F310", "unused-domain", "warning")
def unused_domain(graph: Indexed) -> Broken:
    """The file asks for the standard domain alone: a reader may refuse a domain that it does not know, used or not."""
    used = {node.domain for node in graph.nodes}
    for entry in graph.model.opset_import:
        if entry.domain not in (*STANDARD, *used):
            yield "", f"imports the domain {entry.domain} and uses nothing of it; drop the import"


@rule("F311", "unnamed-dimension", "warning", "foreign")
def unnamed_dimension(graph: Indexed) -> Broken:
    """Every dynamic dimension of an input has a name: two of one name are one size, and profiles find their ranges by
    the names.
    """
    for name, value in graph.inputs.items():
        kind = value.type.tensor_type
        if not kind.HasField("shape"):
            yield "", f"the input {name} has no shape; state its rank, and name its dynamic dimensions"
            continue
        if unnamed := [
            axis for axis, dim in enumerate(kind.shape.dim) if not dim.dim_param and not dim.HasField("dim_value")
        ]:
            yield (
                "",
                (
                    f"the input {name} has a dynamic dimension without a name (axis {unnamed[0]}); name it, such as "
                    "batch "
                    "or seq"
                ),
            )


@rule("F312", "body", "warning")
def body(graph: Indexed) -> Broken:
    """The products are in the graph itself: what lies in the body of an If, Loop or Scan is not looked at by these
    rules.
    """
    for node in graph.nodes:
        if any(entry.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for entry in node.attribute):
            yield node.name, f"{node.op_type} has a body, which is not checked; take its products out"


@rule("F313", "value-made")
def value_made(graph: Indexed) -> Broken:
    """Every value is made before it is read, and every output is made: a file that lost a part of its graph still reads
    as one.
    """
    made = {
        *graph.inputs,
        *(tensor.name for tensor in graph.model.graph.initializer),
        *(tensor.values.name for tensor in graph.model.graph.sparse_initializer),
    }
    for node in graph.nodes:
        for name in node.input:
            if name and name not in made:
                yield (
                    node.name,
                    (
                        f"reads {name}, which {'is made only later' if name in graph.producers else 'nothing makes'}; "
                        f"{WRITE_AGAIN}"
                    ),
                )
        made.update(node.output)
    for name in graph.outputs:
        if name not in made:
            yield "", f"nothing makes the output {name}; {WRITE_AGAIN}"


@rule("F315", "made-once")
def made_once(graph: Indexed) -> Broken:
    """No value is made twice, as an input, a tensor or a node's output: which of them is meant, each reader decides for
    itself.
    """
    stored = [tensor.name for tensor in graph.model.graph.initializer]
    outputs = [name for node in graph.nodes for name in node.output if name]
    for name, count in Counter([*graph.inputs, *stored, *outputs]).items():
        if count > 1:
            yield "", f"{name} is made {count} times; {WRITE_AGAIN}"


@rule("F316", "newer-opset", "warning")
def newer_opset(graph: Indexed) -> Broken:
    """The opset is one that ONNX Runtime runs in FP8 as well: in opset 24, which TensorRT-RTX builds, its CPU provider
    lacks Q/DQ on BF16.
    """
    if LAST_OPSET < graph.opset <= LAST_BUILT:
        yield (
            "",
            (
                f"opset {graph.opset} is newer than {LAST_OPSET}, the last that ONNX Runtime and TensorRT-RTX both "
                "run in "
                f"FP8; export with opset {LAST_OPSET}"
            ),
        )


@rule("F317", "constant-input", "warning")
def constant_input(graph: Indexed) -> Broken:
    """No scale is an input of the graph too: whoever runs it may give another number, so that not every runtime takes
    it for a constant.
    """
    offered = {value.name for value in graph.model.graph.input}
    for name, node in scales(graph).items():
        if name in offered and name in graph.initializers:
            yield node.name, f"scale {name} is an input too, which may replace it; take it off the graph's inputs"
