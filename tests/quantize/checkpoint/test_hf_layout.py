"""What compressed-tensors has a place for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from fp8q.calibrate.model.gemms import attention_modules
from fp8q.quantize.checkpoint.hf_layout import HfLayout, has_place

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1} | HEADS


@pytest.mark.parametrize(
    ("config", "fields", "known"),
    [
        ("LlamaConfig", {}, True),
        ("GPTNeoXConfig", {}, False),
        ("MiniCPM3Config", LATENT, False),
        ("YoutuConfig", LATENT, False),
    ],
)
def test_scales_of_a_cache_have_a_place_where_it_is_of_heads(config: str, fields: dict[str, int], known: bool) -> None:
    """vLLM, and transformers from 5.23 on, cache the latents of latent attention."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | fields))
    (attention,) = attention_modules(model).values()
    assert has_place(model.get_submodule(attention)) == known


@pytest.mark.parametrize(
    ("architecture", "servers"),
    [
        ("GptOssForCausalLM", "no server is known to read them"),
        ("GraniteMoeHybridForCausalLM", "vLLM reads them"),  # tried: benchmarks/published_classes.py
    ],
)
def test_who_reads_experts_that_transformers_wants_in_stacks_is_said(architecture: str, servers: str) -> None:
    layout: Any = SimpleNamespace(behind=(), experts=frozenset({"a"}), unread=True)
    reason, _ = HfLayout.unread_experts(layout, architecture) or ("", "")
    assert reason.startswith(f"transformers reads the experts of {architecture} from tensors that hold all of a layer")
    assert reason.endswith(servers)
