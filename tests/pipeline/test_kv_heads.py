"""A scale for each head of the cache (`--kv-scale head`) in architectures that differ in what their cache is: in ONNX
Runtime as in the reference.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from fp8q import api
from fp8q.calibrate.measure.statistics import load_record
from fp8q.core.run_files import GRAPH_FP32
from fp8q.export.graph.trace import graph_plan, trace
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from tests.noise import check_codes

pytestmark = pytest.mark.slow

#: Name -> class, fields, the heads of keys, and the file that has the scales where loaders have no place for them.
CASES: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "windows, two query heads to a key head": (
        "MistralConfig", {"num_key_value_heads": 2, "sliding_window": 4}, 2, None,
    ),
    "one key head": ("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0}, 1, None),
    "learned positions": ("OPTConfig", {"ffn_dim": 192, "word_embed_proj_dim": 128}, 4, None),
    "Conv1D, keys and values of one GEMM": ("GPT2Config", {"n_inner": 192}, 4, "kv_cache.safetensors"),
    "experts": ("MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}, 2, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime_rounds_each_head_as_the_reference(
    name: str, random_checkpoint: Callable[..., Path], demo_texts: Any, without_graphs: Any, tmp_path: Path,
    exact_logits: Callable[..., np.ndarray],
) -> None:  # fmt: skip
    config, fields, heads, file = CASES[name]
    model = random_checkpoint(tmp_path / "model", config, fields | {"num_hidden_layers": 1})
    text = tmp_path / "calibration.txt"
    text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=8, seq_len=64, kv_cache="fp8", kv_scale="head")
    with without_graphs():
        run = api.calibrate(str(model), str(text), tmp_path / "run", options=options)
    scales = load_scales(run)
    assert [len(scale.heads or ()) for scale in scales.kv_cache.values()] == [heads, heads]
    assert (run.model / "kv_cache.safetensors").is_file() == (file is not None)
    plan = replace(graph_plan(load_record(run), scales, "bf16"), dtype=torch.float32)
    ir.save(trace(run.model, plan), run.model / GRAPH_FP32)
    ids = load_tokens(run, run.calibration)[0, :24].reshape(2, 12)
    expected = exact_logits(run, ids)
    batch = OnnxRuntimeSession(run.model / GRAPH_FP32).open_batch(2, 16)
    batch.reserve(12, 16, 2)
    steps = np.stack([np.stack(batch.decode(ids[:, at], np.full(2, at)).rows([0, 1])) for at in range(12)], 1)
    check_codes(run, ids, steps, expected)
