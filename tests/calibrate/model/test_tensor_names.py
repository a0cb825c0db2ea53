"""Names under which checkpoints hold their tensors: whatever transformers loads is found, and nothing else is called
renamed.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PreTrainedConfig
from transformers.models.exaone_moe.configuration_exaone_moe import ExaoneMoeConfig
from transformers.models.hrm_text.configuration_hrm_text import HrmTextConfig

from fp8q.calibrate.checkpoint.weights import Weights
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.errors import InputError
from fp8q.stages.shared.sources import gemms_of


@pytest.fixture
def saved(tmp_path: Path, demo_checkpoint: Path) -> Callable[..., Path]:
    """`saved(config)`: a random checkpoint as save_pretrained writes it."""

    def save(config: PreTrainedConfig) -> Path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
        shutil.copyfile(demo_checkpoint / "tokenizer.json", tmp_path / "model" / "tokenizer.json")
        return tmp_path / "model"

    return save


def assert_found(source: Source) -> None:
    """Every tensor of the loaded model is the stored one of the name that `stored` gives, bit for bit."""
    weights, model = Weights(source.weight_files), load_model(source, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.tensor(source.stored(name)), parameter), name


def test_tensors_under_their_own_names_and_tied_ones_are_not_renamed(demo_checkpoint: Path) -> None:
    source = open_source(str(demo_checkpoint))
    assert (source.renamed, source.stored("model.norm.weight")) == ({}, "model.norm.weight")
    assert_found(source)


def test_the_head_of_gpt_neox_is_stored_as_embed_out(saved: Callable[..., Path]) -> None:
    config = GPTNeoXConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    source = open_source(str(saved(config)))
    assert source.renamed == {"lm_head.weight": "embed_out.weight"}
    assert_found(source)
    assert gemms_of(source).head == "lm_head"


def test_the_gpt2_files_of_2019_have_no_prefix_and_hold_masks_that_nobody_loads(saved: Callable[..., Path]) -> None:
    path = saved(GPT2Config(vocab_size=2048, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(
        tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, path / "model.safetensors", metadata={"format": "pt"}
    )
    source = open_source(str(path))
    assert source.stored("transformer.h.1.mlp.c_fc.weight") == "h.1.mlp.c_fc.weight"
    assert_found(source)
    assert len(gemms_of(source).names) == 2 * 4 + 1


def test_what_transformers_cuts_out_of_a_stored_tensor_is_refused_by_name(saved: Callable[..., Path]) -> None:
    """HRM stores gate and up as one, queries, keys, values and their gate as one."""
    path = saved(
        HrmTextConfig(vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    )
    with pytest.raises(InputError) as refused:
        gemms_of(open_source(str(path)))
    assert str(refused.value) == (
        f"{path}: HrmTextForCausalLM stores no model.L_module.layers.0.self_attn.q_proj.weight, which transformers "
        "makes of other tensors when it loads them, so that its codes have no place; give a checkpoint that stores it, "
        "or use `fp8q convert`"
    )


def test_a_bias_that_transformers_keeps_in_fp32_is_found_under_its_stored_name(saved: Callable[..., Path]) -> None:
    """EXAONE's routers add a bias to their scores, in FP32 whatever the model is in; it is stored beside the router."""
    config = ExaoneMoeConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1,
        sliding_window=8, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    source = open_source(str(saved(config)))
    assert source.stored("model.layers.1.mlp.gate.e_score_correction_bias") == (
        "model.layers.1.mlp.e_score_correction_bias"
    )
