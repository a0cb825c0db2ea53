"""Small random mixtures of experts, with the demo's tokenizer: for the folders of tests that go through them."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
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


def random_mixture(path: Path, name: str, save_original_format: bool = True) -> Path:
    """A checkpoint of `MIXTURES[name]` in BF16, its norms around 1, under the names that files had before transformers
    5, or with all experts of a layer in one tensor.
    """
    config, fields = MIXTURES[name]
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
