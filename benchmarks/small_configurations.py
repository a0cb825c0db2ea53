"""Small configurations of transformers' causal language models, two layers of width 128 each.

`sizes` sets the fields for width, layers and heads of any configuration, whatever the class calls them, and leaves the
others at their defaults; `kind_of` sorts the models. `CONFIGURATIONS` sets further fields: other rotary frequencies,
other heads, and language models inside models of images. A name there is a class, or a class, a hyphen and a variant.
"""

from typing import Any, Literal

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from fp8q.calibrate.model.caches import attention_indices

Kind = Literal["dense", "mixture", "hybrid", "recurrent", "encoder", "sees or hears", "other"]

WIDTH, INNER, LAYERS, HEADS, WINDOW, POSITIONS = 128, 192, 2, 4, 12, 128
#: What configurations call the same things.
SIZES: dict[str, int] = {
    "vocab_size": 2048,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    "num_key_value_heads": 2,
    "head_dim": 32,
    **dict.fromkeys(("sliding_window", "window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    "expert_ffn_hidden_size": 64,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), 0),
    "eos_token_id": 1,
    "rotary_dim": 8,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 2048,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
}
#: Sizes of the heads of latent attention.
LATENT_SIZES = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": HEADS,
}  # fmt: skip
#: Of a hybrid: a recurrence, and attention; sizes of Mamba's heads and of gated delta nets.
MIXED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
#: What a class needs besides.
FURTHER: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": MIXED,
    "BambaConfig": MAMBA | {"attn_layer_indices": [1]},
    "FalconH1Config": MAMBA | {"mamba_d_ssm": 256},
    "GraniteMoeHybridConfig": MAMBA | MIXED,
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearConfig": MIXED | {"num_experts": 4, "num_experts_per_token": 2},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Lfm3Config": {"layer_types": ["conv", "full_attention"]},
    "NemotronHConfig": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
    },
    "OlmoHybridConfig": MIXED,
    "Qwen3NextConfig": MIXED | DELTA_NET,
    "Qwen3_5MoeTextConfig": MIXED | DELTA_NET,
    "Qwen3_5TextConfig": MIXED | DELTA_NET,
    "Qwen4ExpTextConfig": MIXED,
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ZambaConfig": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
    "Zamba2Config": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Dots1Config": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "Gemma3nTextConfig": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "Gemma4TextConfig": {"layer_types": ["sliding_attention", "full_attention"]},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "HunYuanMoEV1Config": {"head_dim": 32},
    "MinistralConfig": {"head_dim": 32},
}
#: Trained for something else than the next of the tokens before it, or a part of another model.
OTHER = {
    "BertGenerationConfig", "BltConfig", "CpmAntConfig", "Gemma4AssistantConfig", "Gemma4UnifiedAssistantConfig",
    "ReformerConfig", "TrOCRConfig", "XLMConfig", "XLNetConfig",
}  # fmt: skip
SEES_OR_HEARS = {"GitConfig", "MusicgenConfig", "MusicgenMelodyConfig", "MoshiConfig", "Phi4MultimodalConfig"}


def every() -> list[str]:
    """The names of the configurations of all that transformers calls causal language models, each once."""
    return sorted({CONFIG_MAPPING[model_type].__name__ for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})


def kind_of(name: str) -> Kind:
    """What kind of model has the configuration `name`."""
    if name in OTHER:
        return "other"
    if name in SEES_OR_HEARS:
        return "sees or hears"
    configuration = getattr(transformers, name)
    default: PreTrainedConfig = configuration()
    if default.get_text_config() is not default:
        return "sees or hears"
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[configuration]  # whose module registers its kinds of caches
    attending = attention_indices(default)
    if attending is not None or getattr(kind, "_is_stateful", False):
        # the defaults of two have no attention
        return "hybrid" if attending or name in ("BambaConfig", "GraniteMoeHybridConfig") else "recurrent"
    if default.is_encoder_decoder or default.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "encoder"
    if name == "Dots1Config":
        return "mixture"  # its own default has no experts
    experts = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config"}
    return "mixture" if any(getattr(default, field, None) for field in experts) and name != "DogeConfig" else "dense"


def sizes(name: str) -> dict[str, Any]:
    """Field -> value of a small configuration of the class `name`."""
    default = getattr(transformers, name)().to_dict()
    found = {field: value for field, value in SIZES.items() if isinstance(default.get(field), int)}
    if "kv_lora_rank" in default:
        found = {field: value for field, value in found.items() if field != "head_dim"} | LATENT_SIZES
    return found | FURTHER.get(name, {})


SMALL = {
    "vocab_size": 2048, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": POSITIONS,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
GROUPED_32 = GROUPED | {"head_dim": 32}
WINDOWED = GROUPED | {"sliding_window": WINDOW}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 32}
GPT = {"vocab_size": 2048, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}
#: Language models inside models of images; Qwen's have positions of three sections.
INSIDE = GROUPED_32 | {"bos_token_id": 0, "eos_token_id": 1}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
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
    "Qwen3_5Config": {
        "text_config": INSIDE | MIXED | DELTA_NET | {"rope_parameters": SECTIONS},
        "vision_config": QWEN_TOWER,
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
#: Rotary frequencies stretched in three ways.
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
#: Latent attention; mixtures of experts with dense layers only.
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
        GROUPED_32,
    ),
    # caps that are felt: by default they are far beyond what random weights give
    **dict.fromkeys(("Gemma2Config", "VaultGemmaConfig"), GROUPED_32 | WINDOWED | CAPPED),
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
    **IMAGE_MODELS,
    **STRETCHED,
    "BloomConfig": {"vocab_size": 2048, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "MptConfig": {"vocab_size": 2048, "d_model": 128, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
}
