"""Small configurations of every causal language model that transformers has, two layers of width 128 each.

Whatever a configuration calls its width, layers and heads is set; the rest is as its class has it, but where a class
needs more than that to be small. `kind_of` says what kind of model each is: of what fp8q is for, the dense decoders
and the mixtures of experts, the shares are counted.
"""

from typing import Any, Literal

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

Kind = Literal["dense", "mixture", "recurrent", "encoder", "sees or hears", "other"]

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
#: The same of latent attention, whose heads have these sizes.
LATENT = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": HEADS,
}  # fmt: skip
#: What a class needs besides.
FURTHER: dict[str, dict[str, Any]] = {
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
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[configuration], "_is_stateful", False):
        return "recurrent"
    if default.is_encoder_decoder or default.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "encoder"
    if default.get_text_config() is not default:
        return "sees or hears"
    if name == "Dots1Config":
        return "mixture"  # its own default has no experts
    experts = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config"}
    return "mixture" if any(getattr(default, field, None) for field in experts) and name != "DogeConfig" else "dense"


def sizes(name: str) -> dict[str, Any]:
    """Field -> value of a small configuration of the class `name`."""
    default = getattr(transformers, name)().to_dict()
    found = {field: value for field, value in SIZES.items() if isinstance(default.get(field), int)}
    if "kv_lora_rank" in default:
        found = {field: value for field, value in found.items() if field != "head_dim"} | LATENT
    return found | FURTHER.get(name, {})
