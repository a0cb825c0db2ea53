"""Files of a run whose record was made to agree with their damage are named by whoever opens them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from fp8q.core.errors import InputError
from fp8q.core.files import RESTORE, reading
from fp8q.quantize.reference.fp8_model import load_reference, open_codes
from fp8q.quantize.weights.code_sources import LearnedCodes

SHARD = "model-00001-of-00001.safetensors"
REASON = "Error while deserializing header: header too large"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with a header that cannot be."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    config.quantization_config = {"quant_method": "compressed-tensors"}
    config.save_pretrained(tmp_path)
    (tmp_path / SHARD).write_bytes(b"\xff" * 64)
    index = {"weight_map": {"model.norm.weight": SHARD}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return tmp_path


def test_a_checkpoint_with_a_damaged_header_is_named_however_it_is_opened(model: Path) -> None:
    for open_it in (open_codes, load_reference):
        with pytest.raises(InputError) as refused:
            open_it(model, "exact", torch.float32)
        what = "the checkpoint that `fp8q calibrate` writes"
        assert str(refused.value) == f"{model}: does not read as {what} ({REASON}); {RESTORE}"


@pytest.mark.parametrize("value", [["silu"], float("nan")])
def test_a_field_that_transformers_refuses_is_a_damaged_checkpoint(value: object, model: Path) -> None:
    """huggingface_hub's own class of errors for such a field is none of Python's."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": value}), encoding="utf-8")
    for open_it in (open_codes, load_reference):
        with pytest.raises(InputError) as refused:
            open_it(model, "exact", torch.float32)
        assert "expected str, got" in str(refused.value)
        assert str(refused.value).endswith(f"; {RESTORE}")


def test_learned_codes_with_a_damaged_header_are_named(model: Path) -> None:
    with pytest.raises(InputError) as refused:
        LearnedCodes(model / SHARD)
    assert str(refused.value) == f"{model / SHARD}: does not read as learned codes ({REASON}); {RESTORE}"


def test_a_gpu_without_memory_is_no_damage(model: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), reading(model, "weights"):
        raise torch.OutOfMemoryError("CUDA out of memory")
