"""Attention in the graph: ONNX's operator, named after its module, where TensorRT-RTX has a kernel for it; plain
GEMMs and a softmax where not.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from fp8q.export.graph.trace import trace
from fp8q.export.modules.attention import Scoring, plain_attention
from fp8q.export.modules.graph_model import GraphPlan, QuantizedAttention
from fp8q.export.onnx_file.names import gemm_name, module_of
from fp8q.quantize.reference.attention import attention_on_codes


@pytest.mark.parametrize(
    ("heads", "size", "fused"),
    [
        (4, 16, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(4, 8, False), (4, 256, True), (4, 264, False), (2, 64, False)]
        ),
    ],
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
    graph = trace(tmp_path, GraphPlan({}, (), torch.bfloat16)).graph
    assert [node.name for node in graph if node.op_type == "Attention"] == (
        ["model.layers.0.self_attn.attention"] if fused else []
    )
    assert sum(node.op_type == "Softmax" for node in graph) == (not fused)
    plain = [node.name for node in graph if node.op_type == "MatMul" and "attention_" in (node.name or "")]
    assert plain == (
        [] if fused else ["model.layers.0.self_attn.attention_scores", "model.layers.0.self_attn.attention_values"]
    )


def softmax(scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(np.where(allowed, scores, -np.inf))
    shares: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return shares


def test_capped_logits_are_capped_before_they_are_masked() -> None:
    """Masked and then capped, a hidden key would have the logit -0.5, and a third of a weight."""
    query, key, value = (torch.randn(1, heads, 3, 16, generator=torch.manual_seed(3)) for heads in (4, 2, 2))
    allowed = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    k, v = (np.repeat(x.double().numpy(), 2, 1) for x in (key, value))
    scores = query.double().numpy() @ k.swapaxes(2, 3) * 0.25
    expected = softmax(np.tanh(scores / 0.5) * 0.5, allowed.numpy()) @ v
    np.testing.assert_allclose(plain_attention(query, key, value, Scoring(allowed, 0.25, 0.5)), expected, atol=1e-6)
    assert np.abs(softmax(scores, allowed.numpy()) @ v - expected).max() > 0.1


def test_attention_in_fp8_caps_its_logits_as_the_reference_does() -> None:
    """The same codes, and so the same numbers but for the order of sums."""
    query, key, value = (torch.randn(1, heads, 3, 16, generator=torch.manual_seed(3)) for heads in (4, 2, 2))
    allowed = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    module = QuantizedAttention(GraphPlan({}, (), torch.float32, attention=1))
    scales = {part: torch.tensor(2.0**power) for part, power in (("q", -6), ("k", -6), ("v", -6), ("p", -8))}
    for part, scale in scales.items():
        module.get_submodule(part).scale = scale
    reference = torch.nn.Module()
    object.__setattr__(reference, "fp8q_scales", scales)
    object.__setattr__(reference, "fp8q_two_terms", False)
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected, _ = attention_on_codes(reference, query, key, value, added, 0.25, softcap=0.5)
    found = module(query, key, value, allowed, 0.25, 0.5).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(module(query, key, value, allowed, 0.25).transpose(1, 2), expected, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["Attention", "plain GEMMs"])
def test_gemma_2s_attention_is_plain_products(operator: str, tmp_path: Path) -> None:
    """TensorRT-RTX does not parse `softcap`; without caps there is the operator."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_logit_softcapping=None if operator == "Attention" else 50.0,
    )  # fmt: skip
    torch.nn.Module.to(AutoModelForCausalLM.from_config(config), torch.bfloat16).save_pretrained(tmp_path)
    operators = [node.op_type for node in trace(tmp_path, GraphPlan({}, (), torch.bfloat16)).graph]
    assert ("Attention" in operators) == (operator == "Attention")
    # of the logits of the model, and of attention: a prompt's, and a step's of the slots and of the token itself
    assert operators.count("Tanh") == (1 if operator == "Attention" else 1 + 3)


def test_an_attention_is_read_back_to_its_module() -> None:
    assert module_of("model.layers.0.self_attn.attention") == "model.layers.0.self_attn"


def test_the_two_products_of_an_attention_are_told_apart_where_products_are_listed() -> None:
    for node, listed in (
        ("a.q_proj.matmul", "a.q_proj"),
        ("a.attention_scores", "a.attention_scores"),
        ("node_matmul", "node_matmul"),
    ):
        assert gemm_name(node) == listed
