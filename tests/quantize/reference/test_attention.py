"""Attention on codes, where the model is."""

from pathlib import Path

import torch
from gpu.waits import host_waits
from safetensors.torch import save_file
from transformers import LlamaConfig

from fp8q.calibrate.model.skeleton import empty
from fp8q.quantize.reference.attention import attend_in_codes, attention_on_codes


def test_scales_are_where_the_model_is_and_no_call_uploads_them(tmp_path: Path) -> None:
    """The model is on the meta device, which stands for a GPU."""
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model, path = empty(config, torch.float32), tmp_path / "scales"
    names = [f"model.layers.0.self_attn.attention.{part}_scale" for part in "qkvp"]
    save_file({name: torch.tensor([0.5]) for name in names}, path, metadata={"format": "pt", "terms": "2"})
    attend_in_codes(model, path)
    query, mask = torch.empty(1, 2, 6, 16, device="meta"), torch.empty(1, 1, 6, 6, device="meta")
    with host_waits() as counted:
        found, _ = attention_on_codes(model.get_submodule("model.layers.0.self_attn"), query, query, query, mask)
    assert found.shape == (1, 6, 2, 16)
    assert (counted.waits, counted.to_device) == (0, 0)
