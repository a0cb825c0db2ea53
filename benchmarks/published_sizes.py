"""Sizes of the small models of `published_classes` beside those of `convert_classes`, so that vLLM's CPU build runs as
many of them as it can.
"""

from collections.abc import Mapping
from typing import Any

VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
TOKENS = dict.fromkeys(VOCABULARIES, 2048)
#: vLLM's attention takes no heads of 16 on a CPU.
HEADS = {"head_dim": 32, "global_head_dim": 32}
#: Of latent attention, whose heads have sizes of their own, and where sections of rotary frequencies fit no other.
LATENT = {"head_dim": 16}
#: What its kernels of GatedDeltaNet take on a CPU.
GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
#: One layer without experts, as published ones begin, and one with them.
MIXTURE = {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"]}
#: Sizes of classes that want others.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3_5ForConditionalGeneration": {"head_dim": 128, **GATED},  # of the sections that its small configuration has
    "Qwen3_5MoeForConditionalGeneration": {"head_dim": 256, **GATED},
    "Llama4ForCausalLM": {**HEADS, "num_experts_per_tok": 1},  # whose inputs the router scales
    "Llama4ForConditionalGeneration": {**HEADS, "num_experts_per_tok": 1},
    "Mistral4ForCausalLM": {"head_dim": 48},
    "Dots3NoteForConditionalGeneration": {"head_dim": 48},
    "Ernie4_5_VLMoeForConditionalGeneration": LATENT,
    "Kimi_K25ForConditionalGeneration": {**LATENT, **MIXTURE},
    "KimiLinearForCausalLM": LATENT,
    "GlmMoeDsaForCausalLM": {**LATENT, **MIXTURE},
    "BailingHybridForCausalLM": {**LATENT, **MIXTURE, "num_expert_group": 1, "num_experts_per_token": 2},
    "NemotronHForCausalLM": {
        **HEADS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_shared_expert_intermediate_size": 64,
    },
    "DeepseekV4ForCausalLM": {**HEADS, "mlp_layer_types": ["hash_moe", "moe"]},
    "Gemma4ForConditionalGeneration/mixtures": {
        **HEADS,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}
#: What vLLM reads of a published config.json, and transformers writes by another name or not at all.
ALSO_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "Lfm2ForCausalLM": {"conv_dim": 128, "block_dim": 128},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
}


def class_of(name: str) -> str:
    """The class of a model that a name of `OTHERS` stands for: some are published in two forms of one class."""
    return name.partition("/")[0]


def text_sizes(name: str) -> Mapping[str, Any]:
    """The sizes of the text model that `name` stands for."""
    return {**TOKENS, **OTHERS.get(name, HEADS)}
