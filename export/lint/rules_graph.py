"""Rules F3xx: the file and its operators; those of the interface are in `rules_interface`."""

from collections import Counter

from onnx import IR_VERSION, GraphProto, helper
from onnx import __version__ as onnx_version

from ...core.findings import Broken
from ..onnx_file.indexed import Indexed, branches, has_body, made_in
from ..onnx_file.schemas import STANDARD, schema_of
from .rules import rule
from .rules_codes import distinct_scales

#: FP8 entered QuantizeLinear and DequantizeLinear with opset 19 and IR version 9; in opset 24 ONNX Runtime's CPU
#: provider lacks Q/DQ on BF16.
FIRST_OPSET = 19
LAST_OPSET = 23
FIRST_IR = 9
#: The last that TensorRT-RTX (1.7.1) was seen to build in FP8.
LAST_BUILT = 24
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
    version = graph.model.ir_version
    needed = max(FIRST_IR, helper.OP_SET_ID_VERSION_MAP.get(("ai.onnx", graph.opset), FIRST_IR))
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


@rule("F311", "unnamed-dimension", "warning", foreign=True)
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
    """Products are in the graph itself or in the branches of an If, in which every value has a name of its own: what
    lies in the body of a Loop or Scan is not looked at by these rules.
    """
    looked_at = len(graph.graphs) > 1
    for node in graph.nodes:
        if has_body(node) and not (looked_at and branches(node)):
            remedy = "give each value in it a name of its own" if branches(node) else "take its GEMMs out"
            yield node.name, f"{node.op_type} has a body, which is not checked; {remedy}"


@rule("F313", "value-made")
def value_made(graph: Indexed) -> Broken:
    """Every value is made before it is read, and every output is made: a file that lost a part of its graph still reads
    as one.
    """
    made = {
        *graph.inputs,
        *(tensor.values.name for tensor in graph.model.graph.sparse_initializer),
    }
    yield from _made_before_read(graph, graph.model.graph, made)
    for name in graph.outputs:
        if name not in made:
            yield "", f"nothing makes the output {name}; {WRITE_AGAIN}"


def _made_before_read(graph: Indexed, part: GraphProto, made: set[str]) -> Broken:
    """Check the nodes of the graph or of a branch in order; `made`, the values that exist by then, is extended."""
    made.update(tensor.name for tensor in part.initializer)
    for node in part.node:
        for name in node.input:
            if name and name not in made:
                yield (
                    node.name,
                    (
                        f"reads {name}, which {'is made only later' if name in graph.producers else 'nothing makes'}; "
                        f"{WRITE_AGAIN}"
                    ),
                )
        for branch in branches(node) if len(graph.graphs) > 1 else ():
            yield from _made_before_read(graph, branch, made)
            for value in branch.output:
                if value.name not in made:
                    yield node.name, f"nothing makes {value.name}, with which its branch ends; {WRITE_AGAIN}"
            made.difference_update(made_in(branch))
        made.update(node.output)


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
    for name, node in distinct_scales(graph).items():
        if name in offered and name in graph.initializers:
            yield node.name, f"scale {name} is an input too, which may replace it; take it off the graph's inputs"
