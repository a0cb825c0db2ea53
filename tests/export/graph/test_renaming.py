"""What the graph's nodes, values and constants are called, and that it follows from shapes alone: one trace of a Llama
of a layer in FP32, whose norms are all ones.
"""

import re

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
    told = [(tensor.dtype, tuple(tensor.shape), tensor.tobytes()) for tensor in constants]
    assert len(told) > 5
    assert len(set(told)) == len(told)


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
    shapes: dict[str, list[str | int]] = {
        "input_ids": ["batch", "seq"],
        "past_key_values.0.key": ["batch", 2, "capacity", 8],
    }
    shapes["past_key_values.2.key"] = shapes["past_key_values.0.key"]
    inputs = [ir.Value(name=name, shape=ir.Shape(shape)) for name, shape in shapes.items()]
    nodes = [ir.node("Shape", [inputs[2]], {"start": axis, "end": axis + 1}) for axis in (0, 2)]
    nodes.append(ir.node("Shape", [inputs[2]]))
    graph = ir.Graph(inputs, [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 23})
    read_sizes_first(ir.Model(graph, ir_version=11))
    found = [(node.inputs[0].name, node.attributes.get_int("start", 0)) for node in graph if node.inputs[0] is not None]
    assert found == [("input_ids", 0), ("past_key_values.0.key", 2), ("past_key_values.2.key", 0)]


def test_what_a_router_adds_to_its_scores_is_no_bias_of_its_product() -> None:
    """DeepSeek's routers add to the sigmoid of their logits; a linear layer's bias is added to the product itself."""
    scopes = {SCOPES: str(["", "model.layers.0.gate", "matmul"])}
    given = [ir.Value(name=name) for name in ("x", "model.layers.0.gate.weight", "correction", "bias")]
    product = ir.node("MatMul", given[:2], metadata_props=scopes)
    scores = ir.node("Sigmoid", [product.outputs[0]], metadata_props=scopes)
    corrected = ir.node("Add", [scores.outputs[0], given[2]], metadata_props=scopes)
    biased = ir.node("Add", [product.outputs[0], given[3]], metadata_props=scopes)
    graph = ir.Graph(
        [given[0]], [corrected.outputs[0], biased.outputs[0]], nodes=[product, scores, corrected, biased],
        initializers=given[1:], opset_imports={"": 23},
    )  # fmt: skip
    name_nodes(ir.Model(graph, ir_version=11))
    assert product.name == "layers.0.gate.matmul"
    assert biased.name == "layers.0.gate.bias_add"
    assert corrected.name != biased.name
