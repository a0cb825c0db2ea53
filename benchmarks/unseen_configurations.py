"""What `unseen_architectures.py` tries: transformers' configurations, two layers of width 128 each."""

from typing import Any

SMALL = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 32}
WINDOWED = GROUPED | {"sliding_window": 12}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 32}
GPT = {"vocab_size": 2048, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}
#: Language models inside models that see; Qwen's have positions of three sections.
INSIDE = HEADS | {"bos_token_id": 0, "eos_token_id": 1}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
SEEING: dict[str, dict[str, Any]] = {
    "Gemma3Config": {
        "text_config": INSIDE | {"sliding_window": 12},
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": 2047,
    },
    "Qwen2VLConfig": {
        "text_config": INSIDE | {"rope_parameters": SECTIONS},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 128, "num_heads": 2},
    },
    "Qwen2_5_VLConfig": {"text_config": INSIDE | {"rope_parameters": SECTIONS}, "vision_config": QWEN_TOWER},
    "Qwen3VLConfig": {
        "text_config": INSIDE | {"rope_parameters": SECTIONS},
        "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    },
    "Mistral3Config": {
        "text_config": INSIDE | {"model_type": "mistral"},
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
    },
    "LlavaConfig": {
        "text_config": INSIDE | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
    },
    "InternVLConfig": {
        "text_config": INSIDE | {"model_type": "qwen2"},
        "vision_config": TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
    },
    "Idefics3Config": {
        "text_config": INSIDE | {"model_type": "llama"},
        "vision_config": TOWER,
        "pad_token_id": 0,
        "image_token_id": 2047,
    },
    "PaliGemmaConfig": {
        "text_config": INSIDE | {"model_type": "gemma"},
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "projection_dim": 128},
        "projection_dim": 128,
    },
}
#: A configuration, and after a hyphen what is different about it: how rotary frequencies are stretched.
STRETCHED: dict[str, dict[str, Any]] = {
    "LlamaConfig-yarn": GROUPED
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "LlamaConfig-dynamic": GROUPED | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "Phi3Config-longrope": GROUPED
    | {
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1 + 0.1 * index for index in range(16)],
            "long_factor": [2 + index for index in range(16)],
        },
    },
}
#: Latent attention; of the mixtures of experts as many dense layers as there are.
LATENT = SMALL | {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}  # fmt: skip
DENSE = {"first_k_dense_replace": 2, "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "ApertusConfig",
            "ArceeConfig",
            "CohereConfig",
            "Exaone4Config",
            "GraniteConfig",
            "NanoChatConfig",
            "NemotronConfig",
            "OlmoConfig",
        ),
        GROUPED,
    ),
    **dict.fromkeys(("Olmo2Config", "SmolLM3Config", "StableLmConfig", "DogeConfig", "DiffLlamaConfig"), GROUPED),
    **dict.fromkeys(
        (
            "Ernie4_5Config",
            "GlmConfig",
            "Glm4Config",
            "HeliumConfig",
            "HunYuanDenseV1Config",
            "SeedOssConfig",
        ),
        HEADS,
    ),
    # caps that are felt: by default they are far beyond what random weights give
    **dict.fromkeys(("Gemma2Config", "VaultGemmaConfig"), HEADS | WINDOWED | CAPPED),
    **dict.fromkeys(("Olmo3Config", "Cohere2Config", "Starcoder2Config", "MistralConfig"), WINDOWED),
    **dict.fromkeys(("PhiConfig", "PersimmonConfig", "FalconConfig", "GPTNeoXConfig", "GPTNeoXJapaneseConfig"), SMALL),
    "Qwen3Config": GROUPED | {"head_dim": 48},
    "Phi3Config": GROUPED,
    **dict.fromkeys(("GPTJConfig", "CodeGenConfig"), GPT | {"rotary_dim": 8}),
    "GPTBigCodeConfig": GPT | {"n_inner": 192},
    # heads not a power of two; one key head; key heads shared; rotary embedding and ALiBi
    "BloomConfig-6": {"vocab_size": 2048, "hidden_size": 192, "n_layer": 2, "n_head": 6},
    "FalconConfig-alibi": SMALL | {"alibi": True, "multi_query": False},
    "FalconConfig-new": SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2},
    **dict.fromkeys(("YoutuConfig", "MiniCPM3Config"), LATENT),
    "DeepseekV2Config": LATENT | DENSE | {"mlp_layer_types": ["dense", "dense"]},
    "DeepseekV3Config": LATENT | DENSE | {"n_group": 1, "topk_group": 1},
    **SEEING,
    **STRETCHED,
    "BloomConfig": {"vocab_size": 2048, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "MptConfig": {"vocab_size": 2048, "d_model": 128, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
}
