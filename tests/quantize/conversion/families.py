"""Small configurations of a dozen families, one layer each, and the headers that their files have.

Of each a line says why it is among them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8q.core.headers import StoredTensor
from fp8q.quantize.conversion.model_class import class_model

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TWO_SIDES = {
    "vocab_size": 256, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
MOE = SMALL | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    # a head that is tied by a field of the whole model
    "LlamaForCausalLM": SMALL | {"model_type": "llama", "tie_word_embeddings": True},
    # the table is called `shared`, and buckets of positions `relative_attention_bias`
    "T5ForConditionalGeneration": {
        "model_type": "t5", "vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4,
    },
    "BartForConditionalGeneration": TWO_SIDES | {"model_type": "bart"},
    # tied heads that no file names: proj_out, decoder, cls.predictions.decoder
    "WhisperForConditionalGeneration": TWO_SIDES | {
        "model_type": "whisper", "num_mel_bins": 16, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1,
    },
    "ModernBertDecoderForCausalLM": SMALL | {"model_type": "modernbert-decoder", "cls_token_id": 2, "sep_token_id": 3},
    "BertLMHeadModel": SMALL | {"model_type": "bert", "is_decoder": True},
    "RoFormerForCausalLM": SMALL | {"model_type": "roformer", "is_decoder": True, "embedding_size": 32},
    # the table is called `w`
    "CTRLLMHeadModel": {
        "model_type": "ctrl", "vocab_size": 256, "n_embd": 64, "dff": 96, "n_layer": 1, "n_head": 4, "n_positions": 64,
    },
    # projections of embeddings that are narrower than the model
    "OPTForCausalLM": SMALL | {"model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 96},
    # stacks of experts: read whole alone; stored [experts, in, out]; cut and turned, as transformers wants it
    "GraniteMoeForCausalLM": MOE | {"model_type": "granitemoe"},
    "GptOssForCausalLM": MOE | {"model_type": "gpt_oss"},
    "Llama4ForCausalLM": MOE | {"model_type": "llama4_text", "intermediate_size_mlp": 96},
    # experts in one matrix without `.weight`, and attention inside a module called a norm
    "DbrxForCausalLM": {
        "model_type": "dbrx", "vocab_size": 256, "d_model": 64, "n_heads": 4, "n_layers": 1,
        "attn_config": {"rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4},
    },
    "Qwen3MoeForCausalLM": MOE | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 48},
    "RwkvForCausalLM": {
        "model_type": "rwkv", "vocab_size": 256, "hidden_size": 64, "attention_hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1,
    },
}  # fmt: skip


def configuration(family: str) -> dict[str, Any]:
    """The config.json of a family."""
    return FAMILIES[family] | {"architectures": [family]}


def family_headers(family: str) -> dict[str, StoredTensor]:
    """The headers of a family's file under the class's own names, without what is tied."""
    model = class_model(configuration(family), [(1,)] * 500)
    return headers(
        {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if name not in model.all_tied_weights_keys
        }
    )


def headers(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, StoredTensor]:
    """Headers of tensors of these shapes."""
    return {name: StoredTensor(Path("model.safetensors"), dtype, shape, 0, 0) for name, shape in shapes.items()}
