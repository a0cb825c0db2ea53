"""What FP8 is compared with, as weights: the source's own bytes in BF16, and INT8 codes that can be checked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fp8q.calibrate.model.source import Source, open_source
from fp8q.core.reporter import SILENT
from fp8q.quantize.checkpoint.baselines import write_bf16
from fp8q.quantize.codes.encoding import encode_int8
from fp8q.quantize.codes.formats import INT8
from fp8q.quantize.weights.channels import QuantizedWeight, quantize_weight

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def tiny(path: Path, demo_checkpoint: Path, dtype: torch.dtype, **save: Any) -> Source:
    torch.manual_seed(0)
    torch.nn.Module.to(LlamaForCausalLM(LlamaConfig(**TINY)), dtype).save_pretrained(path, **save)
    (path / "tokenizer.json").write_bytes((demo_checkpoint / "tokenizer.json").read_bytes())
    return open_source(str(path))


def test_int8_has_128_magnitudes_and_ties_go_to_the_even_code() -> None:
    assert (INT8.max, len(INT8.grid), INT8.midpoints[:3].tolist()) == (127.0, 128, [0.5, 1.5, 2.5])
    x = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, 63.4, 100.0, -100.0])
    assert encode_int8(x, torch.tensor(0.5)).tolist() == [0, 2, 2, 0, -2, 127, 127, -128]


def test_an_int8_weight_has_a_scale_of_amax_over_127_per_output_channel() -> None:
    weight = torch.tensor([[127.0, -63.5, 1.0], [0.5, -1.0, 0.0]]).to(torch.bfloat16)
    quantized = quantize_weight(weight, "amax", format=INT8)
    assert isinstance(quantized, QuantizedWeight)
    assert quantized.codes.dtype == torch.int8
    assert quantized.scale.tolist() == [1.0, 0.0079345703125]  # 1/127 = 0.007874, rounded up to BF16 as every scale is
    assert quantized.codes.tolist() == [[127, -64, 1], [63, -126, 0]]


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "4KB"}], ids=["one file", "shards and an index"])
def test_bf16_weights_are_the_sources_own_bytes_in_files_of_their_own(
    tmp_path: Path, demo_checkpoint: Path, shards: dict[str, str]
) -> None:
    source = tiny(tmp_path / "source", demo_checkpoint, torch.bfloat16, **shards)
    assert (len(source.weight_files) > 1) == bool(shards)
    write_bf16(source, tmp_path / "bf16", SILENT)
    for file in source.weight_files:
        written = tmp_path / "bf16" / file.name
        assert written.read_bytes() == file.read_bytes()
        assert written.stat().st_nlink == 1  # ONNX's checker refuses external data with several links
    assert (tmp_path / "bf16" / "model.safetensors.index.json").is_file() == bool(shards)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "bf16").config.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_in_another_type_are_cast_to_bf16(tmp_path: Path, demo_checkpoint: Path, dtype: torch.dtype) -> None:
    source = tiny(tmp_path / "source", demo_checkpoint, dtype)
    write_bf16(source, tmp_path / "bf16", SILENT)
    written, stored = (load_file(next(path.glob("*.safetensors"))) for path in (tmp_path / "bf16", source.path))
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert written[name].dtype == torch.bfloat16
        assert written[name].equal(tensor.to(torch.bfloat16))
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_positions_are_written_by_one_name_and_mean_the_same_to_transformers(
    tmp_path: Path, demo_checkpoint: Path
) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=48)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_bytes((demo_checkpoint / "tokenizer.json").read_bytes())
    write_bf16(open_source(str(tmp_path / "source")), tmp_path / "bf16", SILENT)
    written = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert (written["n_positions"], written["max_position_embeddings"]) == (48, 48)
    assert AutoConfig.from_pretrained(tmp_path / "bf16").n_positions == 48
