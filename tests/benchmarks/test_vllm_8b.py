"""The checkpoints that vLLM is timed on: each form loads, and is the same model."""

import json
from pathlib import Path

import pytest
import torch
import vllm_8b
from gpu.llama import Shape
from transformers import AutoModelForCausalLM

SHAPE = Shape(layers=2, width=64, inner=96, heads=4, kv_heads=2, head_size=16, vocabulary=128)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("forms")
    (shards := folder / "shards").mkdir()
    vllm_8b.write_shards(SHAPE, shards, {"bf16", "codes"})
    return {name: vllm_8b.write_form(name, SHAPE, shards, folder) for name in vllm_8b.FORMS}


@torch.no_grad()
def test_every_form_is_the_bf16_model_but_for_the_rounding_of_its_inputs(forms: dict[str, Path]) -> None:
    ids = torch.arange(48)[None]
    original = AutoModelForCausalLM.from_pretrained(forms["bf16"])(ids).logits.float()
    for name in ("one code", "dynamic", "weights alone"):
        logits = AutoModelForCausalLM.from_pretrained(forms[name])(ids).logits.float()
        error = (logits - original).square().mean().sqrt() / original.square().mean().sqrt()
        assert error < (0.02 if name == "weights alone" else 0.1), name


def test_two_codes_and_tails_name_every_gemm_of_the_same_files(forms: dict[str, Path]) -> None:
    names = [name for name, _, _ in vllm_8b.modules(SHAPE)]
    two, tail = (json.loads((forms[name] / "config.json").read_text("utf-8")) for name in ("two codes", "tail of 64"))
    assert two["fp8q"] == {"two_terms": names}
    assert tail["fp8q"] == {"two_terms": names, "tails": dict.fromkeys(names, 64)}
    assert len(names) == 14
    index = json.loads((forms["two codes"] / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    assert {f"{name}.{part}" for name in names for part in ("weight", "weight_scale", "input_scale")} <= index.keys()
    assert "model.layers.0.mlp.down_proj.input_scale" not in json.dumps(
        json.loads((forms["dynamic"] / "model.safetensors.index.json").read_text("utf-8"))
    )
