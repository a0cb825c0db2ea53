"""Attention in the graph: ONNX's operator, named after its module, where TensorRT-RTX has a kernel for it; plain
products and a softmax where not.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fp8q.export.graph.modules import GraphPlan
from fp8q.export.graph.trace import trace
from fp8q.export.names import module_of, product_of


@pytest.mark.parametrize(
    ("heads", "size", "fused"),
    [(4, 8, False), (4, 16, True), (4, 256, True), (4, 264, False), (2, 64, False)],
    ids=lambda value: str(value).lower(),
)
def test_attention_is_fused_where_there_is_a_kernel(heads: int, size: int, fused: bool, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads,
        head_dim=size,
    )
    torch.nn.Module.to(AutoModelForCausalLM.from_config(config), torch.bfloat16).save_pretrained(tmp_path)
    graph = trace(tmp_path, GraphPlan({}, "", torch.bfloat16)).graph
    assert [node.name for node in graph if node.op_type == "Attention"] == (
        ["model.layers.0.self_attn.attention"] if fused else []
    )
    assert sum(node.op_type == "Softmax" for node in graph) == (not fused)
    plain = [node.name for node in graph if node.op_type == "MatMul" and "attention_" in (node.name or "")]
    assert plain == (
        [] if fused else ["model.layers.0.self_attn.attention_scores", "model.layers.0.self_attn.attention_values"]
    )


def test_an_attention_is_read_back_to_its_module() -> None:
    assert module_of("model.layers.0.self_attn.attention") == "model.layers.0.self_attn"


def test_the_two_products_of_an_attention_are_told_apart_where_products_are_listed() -> None:
    for node, listed in (
        ("a.q_proj.matmul", "a.q_proj"),
        ("a.attention_scores", "a.attention_scores"),
        ("node_matmul", "node_matmul"),
    ):
        assert product_of(node) == listed
