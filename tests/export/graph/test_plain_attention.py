"""A graph whose Attention nodes are plain GEMMs and a softmax gives the same answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from fp8q.core.run import Run
from fp8q.export.graph.plain_attention import write_plain_attention

BATCH, SEQ, SLOTS, SIZE = 2, 3, 7, 8


def attention(path: Path, heads: int, key_heads: int, mask: Sequence[int | str] | None = None, **more: Any) -> Path:
    """Write a graph of one Attention node, with fp8q's own names of dimensions."""
    shapes: dict[str, tuple[int, Sequence[int | str]]] = {
        "query": (TensorProto.FLOAT, ["batch", heads, "seq", SIZE]),
        "key": (TensorProto.FLOAT, ["batch", key_heads, "slots", SIZE]),
        "value": (TensorProto.FLOAT, ["batch", key_heads, "slots", SIZE]),
        "allowed": (TensorProto.BOOL, mask or ["batch", 1, "seq", "slots"]),
    }
    inputs = [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()]
    answers = helper.make_tensor_value_info("answers", TensorProto.FLOAT, ["batch", heads, "seq", SIZE])
    node = helper.make_node("Attention", [*shapes], ["answers"], "attention", scale=0.25, **more)
    graph = helper.make_graph([node], "attention", inputs, [answers])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
    return path


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load_model(path, load_external_data=False).graph.node]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 1), (4, 2), (4, 4), (1, 1)])
def test_answers_are_those_of_the_attention_node(tmp_path: Path, heads: int, key_heads: int) -> None:
    path, plain = attention(tmp_path / "attention.onnx", heads, key_heads), tmp_path / "plain.onnx"
    assert write_plain_attention(path, plain) == 1
    assert "Attention" not in operators(plain)
    onnx.checker.check_model(plain, full_check=True)
    random = np.random.default_rng(0)
    allowed = random.random((BATCH, 1, SEQ, SLOTS)) < 0.5
    allowed[..., 0] = True
    feeds = {
        "query": random.standard_normal((BATCH, heads, SEQ, SIZE)).astype(np.float32),
        "key": random.standard_normal((BATCH, key_heads, SLOTS, SIZE)).astype(np.float32),
        "value": random.standard_normal((BATCH, key_heads, SLOTS, SIZE)).astype(np.float32),
        "allowed": allowed,
    }
    expected = np.asarray(next(iter(ReferenceEvaluator(onnx.load_model(path)).run(None, feeds))))
    found = np.asarray(onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"]).run(None, feeds)[0])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_of_fp8q_s_graphs_stays(tmp_path: Path) -> None:
    plain = tmp_path / "plain.onnx"
    for name, path in {
        "capped": attention(tmp_path / "capped.onnx", 4, 2, softcap=30.0),
        "causal": attention(tmp_path / "causal.onnx", 4, 2, is_causal=1),
        "a mask for each head": attention(tmp_path / "masks.onnx", 4, 2, mask=["batch", 4, "seq", "slots"]),
    }.items():
        assert write_plain_attention(path, plain) == 0, name
        assert not plain.exists(), name


def test_a_run_s_graph_answers_alike(demo_run: Run) -> None:
    """The export of the demo, four layers of grouped queries, on a prompt of two rows."""
    path = demo_run.onnx_fp32
    plain = path.with_name("plain.onnx")  # its external data lie there
    try:
        assert write_plain_attention(path, plain) == operators(path).count("Attention") == 4
        expected, found = (prompt_logits(file) for file in (path, plain))
    finally:
        plain.unlink(missing_ok=True)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def prompt_logits(path: Path) -> np.ndarray:
    """Logits of a prompt of two rows of five tokens, the second with one less, without any past."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(5, 200, (2, 5))
    tokens = {
        "input_ids": ids,
        "attention_mask": np.array([[1] * 5, [0, *[1] * 4]]),
        "logits_indices": np.full((2, 1), 4),
    }
    tokens["position_ids"] = np.maximum(tokens["attention_mask"].cumsum(1) - 1, 0)
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in tokens.items()}
    for entry in session.get_inputs():
        if entry.name.startswith("past_key_values."):
            none = np.zeros((0, *entry.shape[1:]), np.uint8)
            values[entry.name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(none, TensorProto.FLOAT8E4M3FN)
    logits: np.ndarray = session.run_with_ort_values(["logits"], values)[0].numpy()
    return logits
