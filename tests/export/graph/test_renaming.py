"""What the graph's nodes, values and constants are called, and that it follows from shapes alone: one trace of a Llama
of a layer in FP32, whose norms are all ones.
"""

import re

import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fp8q.export.graph.renaming import SCOPES, name_nodes, read_sizes_first
from fp8q.export.graph.trace import trace
from fp8q.export.modules.graph_model import GraphPlan


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> ir.Graph:
    folder = tmp_path_factory.mktemp("named")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    torch.nn.Module.to(AutoModelForCausalLM.from_config(config), torch.bfloat16).save_pretrained(folder)
    return trace(folder, GraphPlan({}, (), torch.float32)).graph


def test_equal_tensors_of_a_checkpoint_stay_apart(graph: ir.Graph) -> None:
    norms = [name for name in graph.initializers if name.endswith("norm.weight")]
    assert norms == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]


def test_equal_constants_are_one(graph: ir.Graph) -> None:
    constants = [
        value.const_value
        for value in graph.initializers.values()
        if value.const_value is not None and not isinstance(value.const_value, ir.ExternalTensor)
    ]
    distinct = [(tensor.dtype, tuple(tensor.shape), tensor.tobytes()) for tensor in constants]
    assert len(distinct) > 5
    assert len(set(distinct)) == len(distinct)


def test_a_node_is_named_after_its_module_and_its_place_in_it(graph: ir.Graph) -> None:
    mlp = [node.name for node in graph if ".mlp." in (node.name or "")]
    assert mlp == [
        "model.layers.0.mlp.gate_proj.weight.cast",
        "model.layers.0.mlp.gate_proj.Transpose_1",
        "model.layers.0.mlp.gate_proj.matmul",
        "model.layers.0.mlp.act_fn.Sigmoid_1",
        "model.layers.0.mlp.act_fn.Mul_1",
        "model.layers.0.mlp.up_proj.weight.cast",
        "model.layers.0.mlp.up_proj.Transpose_1",
        "model.layers.0.mlp.up_proj.matmul",
        "model.layers.0.mlp.Mul_1",
        "model.layers.0.mlp.down_proj.weight.cast",
        "model.layers.0.mlp.down_proj.Transpose_1",
        "model.layers.0.mlp.down_proj.matmul",
    ]
    assert [node.outputs[0].name for node in graph if node.name in mlp[1:3]] == [f"{name}.output" for name in mlp[1:3]]


def test_a_constant_is_named_after_its_first_reader(graph: ir.Graph) -> None:
    found: dict[str | None, str] = {}
    for node in graph:
        for index, value in enumerate(node.inputs):
            if value is not None and value.is_initializer():
                found.setdefault(value.name, f"{node.name}.constant_{index}")
    constants = {name: reader for name, reader in found.items() if name and ".constant_" in name}
    assert len(constants) > 5
    assert {name for name, reader in constants.items() if name != reader} == set()


def test_initializers_stand_in_the_order_of_reading(graph: ir.Graph) -> None:
    read = dict.fromkeys(
        value.name for node in graph for value in node.inputs if value is not None and value.is_initializer()
    )
    assert [*graph.initializers] == [*read]


def test_no_name_counts_over_the_whole_graph_and_no_note_of_the_exporter_remains(graph: ir.Graph) -> None:
    names = [
        name for node in graph for name in (node.name, *(value.name for value in node.outputs)) if name is not None
    ]
    assert [name for name in names if re.match(r"(node|val)_", name)] == []
    assert len(set(names)) == len(names)
    assert [value.name for value in graph.initializers.values() if value.metadata_props] == []


def test_a_size_is_read_from_the_first_input_that_has_it() -> None:
    model = onnx.parser.parse_model("""<ir_version: 11, opset_import: ["" : 23]>
        sizes (int64[batch, seq] input_ids, float[batch, 2, capacity, 8] past_0, float[batch, 2, capacity, 8] past_2)
        => (int64[1] rows, int64[1] slots, int64[4] all) {
          rows = Shape <start = 0, end = 1> (past_2)
          slots = Shape <start = 2, end = 3> (past_2)
          all = Shape(past_2)
        }""")
    converted = ir.from_proto(model)
    read_sizes_first(converted)
    sources = [
        (node.inputs[0].name, node.attributes.get_int("start", 0))
        for node in converted.graph
        if node.inputs[0] is not None
    ]
    assert sources == [("input_ids", 0), ("past_0", 2), ("past_2", 0)]


def test_what_a_router_adds_to_its_scores_is_no_bias_of_its_product() -> None:
    """DeepSeek's routers add to the sigmoid of their logits; a linear layer's bias is added to the GEMM itself."""
    model = ir.from_onnx_text("""<ir_version: 11, opset_import: ["" : 23]>
        router (float[2, 1] x) => (float[2, 2] corrected, float[2, 2] biased)
        <float[1, 2] weight = {1.0, 2.0}, float[2] correction = {3.0, 4.0}, float[2] bias = {5.0, 6.0}> {
          logits = MatMul(x, weight)
          scores = Sigmoid(logits)
          corrected = Add(scores, correction)
          biased = Add(logits, bias)
        }""")
    model.graph.initializers["weight"].name = "model.layers.0.gate.weight"
    for node in model.graph:
        node.metadata_props[SCOPES] = str(["", "model.layers.0.gate", "matmul"])
    name_nodes(model)
    product, _, corrected, biased = model.graph
    assert product.name == "layers.0.gate.matmul"
    assert biased.name == "layers.0.gate.bias_add"
    assert corrected.name != biased.name
