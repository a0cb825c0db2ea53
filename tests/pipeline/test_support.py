"""What the graph cannot do of an architecture is said by name, before any work: each of these was once exported wrong
in silence, or failed late.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from fp8q.calibrate.model.gemms import attention_modules
from fp8q.calibrate.model.source import open_source
from fp8q.export.modules import support
from fp8q.export.modules.support import seen_in_a_pass
from fp8q.stages.shared.sources import gemms_of

GROUPED = {"num_key_value_heads": 2, "pad_token_id": 0}
LATENT = {
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
GEMMA = GROUPED | {"head_dim": 32, "sliding_window": 8}
DECODER = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 192,
    "decoder_ffn_dim": 192,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
}


MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "fields", "reason"),
    [
        ("DogeConfig", GROUPED, "computes an attention mask of its own (DogeAttention)"),
        (
            "Gemma3TextConfig",
            GEMMA | {"use_bidirectional_attention": True},
            "attends to later tokens too (Gemma3Attention.is_causal is False)",
        ),
        (
            "Gemma4TextConfig",
            GEMMA | {"global_head_dim": 64, "vocab_size_per_layer_input": 2048, "hidden_size_per_layer_input": 16},
            (
                "writes keys of 2 heads of 64 in model.layers.1.self_attn, and not 2 of 32 as its config.json has it "
                "for "
                "all"
            ),
        ),
        ("BartConfig", DECODER, "counts positions from its cache (its forward takes no position_ids)"),
        ("RobertaConfig", {"is_decoder": True, "pad_token_id": 1}, "counts positions from its padding token on"),
        (
            "DiffLlamaConfig",
            GROUPED,
            "has a differential attention (TensorRT-RTX 1.7.1's builder ends in a segmentation fault on it)",
        ),
        (
            "Qwen3MoeConfig",
            GROUPED | MIXTURE | {"num_experts": 129},
            (
                "has 258 experts in its layers, each a branch of the graph, and engines of more than 256 are not worth "
                "building"
            ),
        ),
    ],
    ids=["mask", "bidirectional", "head sizes", "positions", "padding", "crash", "experts"],
)
def test_what_the_graph_cannot_do_is_told_before_any_work(
    config: str, fields: dict[str, Any], reason: str, random_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = random_checkpoint(tmp_path / "model", config, fields)
    source = open_source(str(path))
    assert gemms_of(source).no_graph == f"{source.architecture} {reason}"


def test_a_keyword_that_the_graphs_attention_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "KEYWORDS", support.KEYWORDS - {"softcap"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Gemma2Config(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16)
        )
    model.eval()
    before = model.config._attn_implementation
    assert (
        seen_in_a_pass(model, attention_modules(model), ((4, 16), (4, 16)))
        == "hands its attention softcap (Gemma2Attention; the graph's would ignore it)"
    )
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("LlamaConfig", GROUPED),
        ("MistralConfig", GROUPED | {"sliding_window": 8}),
        ("Qwen2Config", GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("Qwen3Config", GROUPED | {"head_dim": 48}),
        ("GemmaConfig", GROUPED | {"head_dim": 96}),
        ("GPT2Config", {"n_inner": 192}),
        ("OPTConfig", {"ffn_dim": 192, "word_embed_proj_dim": 128, "pad_token_id": 0}),
        ("GPTNeoXConfig", {}),
        ("Phi3Config", GROUPED | {"sliding_window": 8}),
        ("Gemma2Config", GEMMA),
        ("YoutuConfig", LATENT),
        ("GPTBigCodeConfig", {"n_inner": 192}),
        ("ModernBertDecoderConfig", {"pad_token_id": 0, "intermediate_size": 192}),
        ("BertGenerationConfig", {"is_decoder": True, "pad_token_id": 0}),
        ("Qwen3MoeConfig", GROUPED | MIXTURE | {"num_experts": 128}),
    ],
)
def test_what_it_can_do_is_not(
    config: str, fields: dict[str, Any], random_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The verified architectures, each with the window, the head size or the number of KV heads that marks it, and two
    others; of ModernBERT's decoder `get_decoder` gives the head.
    """
    products = gemms_of(open_source(str(random_checkpoint(tmp_path / "model", config, fields))))
    assert products.no_graph is None
    assert products.head in ("lm_head", "lm_head.decoder", "decoder")
    assert len(products.names) > 8
