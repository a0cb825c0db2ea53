"""Small random mixtures of experts, with the demo's tokenizer: for the folders of tests that go through them."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

DEMO = Path(__file__).parent.parent / "examples" / "demo" / "checkpoint"
SMALL = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN = {"num_experts": 4, "moe_intermediate_size": 32}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", QWEN | {"shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("Qwen3MoeConfig", QWEN | {"head_dim": 16}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4}),
}
#: Nemotron 3's kind: a state, experts without a gate, attention, and a plain block.
WITHOUT_GATE: tuple[str, dict[str, Any]] = (
    "NemotronHConfig",
    {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "head_dim": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
)
#: MiniMax-M3's kind: limits on gate and up.
WITH_OWN_GATE: tuple[str, dict[str, Any]] = (
    "MiniMaxM3VLTextConfig",
    {"num_local_experts": 4, "head_dim": 16, "dense_intermediate_size": 96, "shared_intermediate_size": 48},
)
#: gpt_oss's kind: gate and up take turns in a stack that holds weights [in, out], with biases, limits and sinks.
ALTERNATING: tuple[str, dict[str, Any]] = (
    "GptOssConfig",
    {"num_local_experts": 4, "head_dim": 16, "sliding_window": 24, "swiglu_limit": 2.0, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    }},
)  # fmt: skip
#: Llama 4's kind: the router scales what an expert reads, stacks hold weights [in, out], a shared expert, and a layer
#: without experts.
SCALED_INPUTS: tuple[str, dict[str, Any]] = (
    "Llama4TextConfig",
    {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 3,
        "moe_layers": [0, 2],
        "attention_chunk_size": 24,
        "no_rope_layers": [1, 1, 0],
    },
)
#: Mixtures whose checkpoints may hold a layer for multi-token prediction: the class, its fields, and how the names of
#: such a layer's tensors begin.
DRAFTING: dict[str, tuple[str, dict[str, Any], str]] = {
    "glm4_moe": (
        "Glm4MoeConfig",
        {"n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "first_k_dense_replace": 1,
         "num_nextn_predict_layers": 1},
        "model.layers.2.",
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "sliding_window": 32,
         "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"], "n_group": 1,
         "topk_group": 1},
        "mtp.layers.0.",
    ),
}  # fmt: skip


def random_mixture(path: Path, name: str, save_original_format: bool = True) -> Path:
    """A checkpoint of `MIXTURES[name]` in BF16, its norms around 1, under the names that files had before transformers
    5, or with all experts of a layer in one tensor.
    """
    return random_of(path, *MIXTURES[name], save_original_format)


def random_drafting(path: Path, name: str, drafts: bool = True) -> Path:
    """A checkpoint of `DRAFTING[name]`, with a layer for multi-token prediction, experts in it, unless `drafts` is
    False; transformers has no such module, so its tensors are added by hand.
    """
    config, fields, start = DRAFTING[name]
    random_of(path, config, fields)
    if not drafts:
        return path
    file = path / "model.safetensors"
    tensors = load_file(file)
    last = {key: tensor for key, tensor in tensors.items() if key.startswith("model.layers.1.")}
    layer = {
        start + key.removeprefix("model.layers.1."): torch.randn_like(tensor) * 0.1 for key, tensor in last.items()
    }
    outer = "mtp." if start.startswith("mtp.") else start
    hidden = SMALL["hidden_size"]
    assert hidden is not None
    layer |= {
        f"{outer}eh_proj.weight": torch.randn(hidden, 2 * hidden).bfloat16() * 0.1,
        f"{outer}enorm.weight": torch.ones(hidden).bfloat16(),
        f"{outer}hnorm.weight": torch.ones(hidden).bfloat16(),
    }
    save_file(tensors | layer, file, {"format": "pt"})
    return path


def random_ernie(path: Path) -> Path:
    """A dense checkpoint of ERNIE 4.5's class with a layer for multi-token prediction, in modules of its own."""
    fields = {"moe_layer_start_index": 8, "moe_layer_end_index": 8, "num_nextn_predict_layers": 1}
    random_of(path, "Ernie4_5_MoeConfig", fields | {"head_dim": 16})
    file = path / "model.safetensors"
    tensors = load_file(file)
    hidden = SMALL["hidden_size"]
    assert hidden is not None
    layer = {
        key.replace("model.layers.1.", "model.mtp_block.0."): tensor.clone()
        for key, tensor in tensors.items()
        if key.startswith("model.layers.1.")
    } | {
        "model.mtp_linear_proj.0.weight": torch.randn(hidden, 2 * hidden).bfloat16() * 0.1,
        "model.mtp_emb_norm.0.weight": torch.ones(hidden).bfloat16(),
        "model.mtp_hidden_norm.0.weight": torch.ones(hidden).bfloat16(),
    }
    save_file(tensors | layer, file, {"format": "pt"})
    return path


def random_of(path: Path, config: str, fields: dict[str, Any], save_original_format: bool = True) -> Path:
    """A checkpoint of that configuration of transformers, `SMALL` but for `fields`."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.1)
    torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path, save_original_format=save_original_format)
    for file in DEMO.glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    return path


def starve(tensors: dict[str, torch.Tensor]) -> None:
    """Let the first layer of a mixture of Qwen's names never choose expert 2: what its router reads has a channel that
    is positive in all tokens, and counts against that expert alone.
    """
    first, router = "model.layers.0", "model.layers.0.mlp.gate.weight"
    tensors["model.embed_tokens.weight"][:, 0] = 5.0
    tensors[f"{first}.self_attn.o_proj.weight"].zero_()
    tensors[router][:, 0] = 0.0
    tensors[router][2] = 0.0
    tensors[router][2, 0] = -100.0
