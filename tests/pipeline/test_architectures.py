"""Architectures and options other than the demo's, through calibration and export: ONNX Runtime against the exact reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from fp8q import api
from fp8q.options import KvCache
from fp8q.quantize.reference import load_reference
from fp8q.serve.sessions import OnnxRuntimeSession
from fp8q.stages.corpora import load_tokens

CASES = [
    pytest.param("llama", "off", "fp16", id="llama, tied head, cache in the compute type, graph in FP16"),
    pytest.param("qwen2", "fp8", "bf16", id="qwen2, q/k/v biases"),
    pytest.param("opt", "fp8", "bf16", id="opt, as many KV heads as heads, learned positions"),
    pytest.param("gemma", "off", "bf16", id="gemma, scaled embeddings, wide heads"),
]


@pytest.mark.parametrize(("name", "kv_cache", "dtype"), CASES)
def test_the_graph_says_what_the_reference_says(
    name: str, kv_cache: KvCache, dtype: Literal["bf16", "fp16"], shared_checkpoint: Callable[[str], Path], shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    options = api.CalibrateOptions(kv_cache=kv_cache, samples=8, seq_len=128)
    data = str(shared_data("python-calibration.txt"))
    run = api.calibrate(str(shared_checkpoint(name)), data, tmp_path / "run", options=options, export_options=api.ExportOptions(dtype))
    ids = load_tokens(run, run.evaluation)[: 4 * 64].reshape(4, 64)
    reference = load_reference(run.model, "exact", torch.float32)
    with torch.inference_mode():
        expected = reference.model(input_ids=torch.from_numpy(ids), past_key_values=reference.new_cache(), use_cache=True).logits.numpy()
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(64), ids.shape))
    logits, _ = OnnxRuntimeSession(run.onnx_fp32).forward(ids, np.ones_like(ids), positions)
    difference = np.abs(logits - expected).max(-1)
    assert difference[:, 0].min() < 1e-4  # before the first differing code
    log_p, log_q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (expected, logits))
    assert float((log_p.exp() * (log_p - log_q)).sum(-1).mean()) < 2e-3
