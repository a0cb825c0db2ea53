"""The demo in two families that have a layer for multi-token prediction (MTP), which is trained here.

    glm4_moe      GLM-4.5's names: `model.layers.4.*` behind the last layer, 3
    ernie4_5_moe  ERNIE 4.5's: `model.mtp_block.0.*`, `model.mtp_linear_proj.0`

No small checkpoint with such a layer is published, and drafts of random numbers are never accepted. The demo's weights
are exact in both families. vLLM's class of GLM-4.5 wants a mixture of experts in the model and in the layer that
drafts: the MLP's rows are dealt out, a quarter to each of two experts, which every token takes with a weight of one
half under a factor of two, and a half to the shared experts. ERNIE rotates neighbouring numbers of a head, where the
demo rotates halves: rows of queries and keys change places. `make` holds the logits against the demo's.

Of position t the layer computes head(norm(decoder(proj([norm(embedding of token t + 1), norm(hidden state t)])))), the
embedding being zero at position 0 and ERNIE leaving out the norm before the head (DeepSeek-V3, arXiv 2412.19437,
section 2.2; vLLM 0.32, `glm4_moe_mtp.py` and `ernie_mtp.py`). It is trained on the demo's calibration text to give the
model's own distribution of token t + 2; embedding, head and model are frozen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from models import DEMO
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

Tensors = dict[str, torch.Tensor]
CHECKPOINT, FILE = DEMO / "checkpoint", "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
GLM, ERNIE = "glm4_moe", "ernie4_5_moe"
#: Experts that tokens are routed to, and shared ones; each has a quarter of the MLP.
ROUTED, SHARED = 2, 2
#: Tokens of a window and windows of a step in training, and the largest learning rate.
WINDOW, BATCH, LEARNING_RATE = 128, 8, 3e-3
#: The largest difference of the logits from the demo's, in FP32; the logits themselves are up to 19.
LOGITS_APART = 1e-4


class DraftLayer(nn.Module):
    """A layer that drafts token t + 2 of `demo` from hidden state t and the embedding of token t + 1."""

    def __init__(self, demo: LlamaForCausalLM, normed: bool):
        """Begin with the demo's third layer, and half of the sum of both inputs; `normed`: with a norm at the end."""
        super().__init__()
        width, eps = demo.config.hidden_size, demo.config.rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.norm = (LlamaRMSNorm(width, eps) for _ in range(3))
        self.joined = nn.Linear(2 * width, width, bias=False)
        self.block = LlamaDecoderLayer(demo.config, 0)
        self.block.load_state_dict(demo.model.layers[2].state_dict())
        self.norm.load_state_dict(demo.model.norm.state_dict())
        self.normed = normed
        with torch.no_grad():
            self.joined.weight.copy_(torch.cat([torch.eye(width), torch.eye(width)], 1) / 2)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, demo: LlamaForCausalLM) -> torch.Tensor:
        """Return logits [batch, positions, vocabulary] from the hidden states and the embeddings of the next tokens,
        both [batch, positions, width].
        """
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
        joined = self.joined(torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1))
        positions = torch.arange(hidden.shape[1])[None]
        rotation = demo.model.rotary_emb(joined, positions)
        out = self.block(joined, position_embeddings=rotation, position_ids=positions)
        logits: torch.Tensor = demo.lm_head(self.norm(out) if self.normed else out)
        return logits


def trained(demo: LlamaForCausalLM, ids: torch.Tensor, normed: bool, steps: int) -> DraftLayer:
    """Train a layer for so many steps on the tokens `ids` [tokens]."""
    torch.manual_seed(0)
    layer = DraftLayer(demo, normed)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - WINDOW, (BATCH,)).tolist()
        windows = torch.stack([ids[start : start + WINDOW] for start in starts])
        with torch.no_grad():
            hidden = demo.model(windows).last_hidden_state
            wanted = demo.lm_head(hidden[:, 1:]).softmax(-1)
            embedded = demo.model.embed_tokens(windows[:, 1:])
        loss = -(wanted * layer(hidden[:, :-1], embedded, demo).log_softmax(-1)).sum(-1).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return layer


def dealt_out(start: str, tensors: Tensors) -> Tensors:
    """The tensors of a decoder layer, whose names begin with `start`, with the MLP as a mixture of experts."""
    made = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for part, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weight = tensors[f"{start}mlp.{part}.weight"]
        size = weight.shape[axis] // (ROUTED + SHARED)
        *experts, shared = weight.split([*[size] * ROUTED, size * SHARED], axis)
        for number, expert in enumerate(experts):
            made[f"{start}mlp.experts.{number}.{part}.weight"] = expert.contiguous()
        made[f"{start}mlp.shared_experts.{part}.weight"] = shared.contiguous()
    width = tensors[f"{start}input_layernorm.weight"].shape[0]
    made[f"{start}mlp.gate.weight"] = torch.zeros(ROUTED, width, dtype=torch.bfloat16)
    made[f"{start}mlp.gate.e_score_correction_bias"] = torch.zeros(ROUTED)
    return made


def neighbours(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Put the two numbers of a head that are rotated together, half a head apart in `weight`'s rows, side by side."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape).contiguous()


def glm_config(shared: Mapping[str, Any]) -> PretrainedConfig:
    """GLM-4.5's configuration of the demo: the last layer and the one that drafts are mixtures of experts."""
    layers, intermediate = int(shared["num_hidden_layers"]), int(shared["intermediate_size"])
    return Glm4MoeConfig(
        **shared, tie_word_embeddings=False, attention_bias=False, use_qk_norm=False, n_group=1, topk_group=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        first_k_dense_replace=layers - 1, n_routed_experts=ROUTED, n_shared_experts=SHARED, norm_topk_prob=True,
        num_experts_per_tok=ROUTED, routed_scaling_factor=float(ROUTED),
        moe_intermediate_size=intermediate // (ROUTED + SHARED), architectures=["Glm4MoeForCausalLM"],
    )  # fmt: skip


def glm_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """The demo's tensors under GLM-4.5's names."""
    last = f"model.layers.{config.num_hidden_layers - 1}."
    dense = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    mixture = dealt_out(last, {name: tensor for name, tensor in tensors.items() if name.startswith(last)})
    return dense | mixture | {"lm_head.weight": tensors[EMBEDDING].clone()}


def glm_draft(layer: DraftLayer, tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """The tensors of the layer that drafts under GLM-4.5's names."""
    start = f"model.layers.{config.num_hidden_layers}."
    named = {
        "eh_proj.weight": layer.joined.weight, "enorm.weight": layer.embedding_norm.weight,
        "hnorm.weight": layer.hidden_norm.weight, "shared_head.norm.weight": layer.norm.weight,
        "shared_head.head.weight": tensors[EMBEDDING], "embed_tokens.weight": tensors[EMBEDDING],
        **layer.block.state_dict(),
    }  # fmt: skip
    return dealt_out(start, {f"{start}{name}": tensor for name, tensor in named.items()})


def ernie_config(shared: Mapping[str, Any]) -> PretrainedConfig:
    """ERNIE 4.5's configuration of the demo, in which no layer is a mixture of experts."""
    none = int(shared["num_hidden_layers"]) + 1
    return Ernie4_5_MoeConfig(
        **shared, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        moe_layer_start_index=none, moe_layer_end_index=none, moe_num_experts=ROUTED, moe_k=ROUTED,
        architectures=["Ernie4_5_MoeForCausalLM"],
    )  # fmt: skip


def ernie_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """The demo's tensors, with the rows of queries and keys as ERNIE 4.5 rotates them."""
    return {
        name: neighbours(tensor, config.head_dim) if name.endswith(("q_proj.weight", "k_proj.weight")) else tensor
        for name, tensor in tensors.items()
    }


def ernie_draft(layer: DraftLayer, *_: object) -> Tensors:
    """The tensors of the layer that drafts under ERNIE 4.5's names; vLLM rotates halves in its block."""
    block = {f"model.mtp_block.0.{name}": tensor for name, tensor in layer.block.state_dict().items()}
    return block | {
        "model.mtp_linear_proj.0.weight": layer.joined.weight,
        "model.mtp_emb_norm.0.weight": layer.embedding_norm.weight,
        "model.mtp_hidden_norm.0.weight": layer.hidden_norm.weight,
    }


@dataclass(frozen=True)
class Family:
    """A family of models: its configuration of the demo, and the names of its tensors."""

    config: Any
    tensors: Any
    draft: Any
    normed: bool


FAMILIES = {
    GLM: Family(glm_config, glm_tensors, glm_draft, normed=True),
    ERNIE: Family(ernie_config, ernie_tensors, ernie_draft, normed=False),
}
#: The fields of the demo's config.json that both families have.
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def text_ids(name: str) -> torch.Tensor:
    """The tokens of a text of the demo, `calibration.txt` or `evaluation.txt`."""
    text = (DEMO / name).read_text(encoding="utf-8")
    return torch.tensor(AutoTokenizer.from_pretrained(CHECKPOINT)(text, verbose=False)["input_ids"])


def make(name: str, folder: Path, steps: int) -> Path:
    """Write the demo as the family `name` with a layer that was trained for so many steps; RuntimeError where its
    logits are not the demo's.
    """
    family, llama = FAMILIES[name], AutoConfig.from_pretrained(CHECKPOINT)
    config = family.config(
        {field: getattr(llama, field) for field in FIELDS} | {"num_nextn_predict_layers": 1, "dtype": "bfloat16"}
    )
    demo = LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).requires_grad_(requires_grad=False)
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copyfile(CHECKPOINT / file, folder / file)
    config.save_pretrained(folder)
    tensors = family.tensors(load_file(CHECKPOINT / FILE), config)
    save_file(tensors, folder / FILE, {"format": "pt"})
    ids = text_ids("calibration.txt")
    with torch.inference_mode():
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        apart = (other(ids[None, :256]).logits - demo(ids[None, :256]).logits).abs().max().item()
    if apart > LOGITS_APART:
        raise RuntimeError(f"{name}: logits differ from the demo's by {apart}")
    draft = family.draft(trained(demo, ids, family.normed, steps), tensors, config)
    bf16 = {key: tensor.detach().clone() for key, tensor in draft.items()}
    bf16 = {key: tensor if "e_score" in key else tensor.to(torch.bfloat16) for key, tensor in bf16.items()}
    save_file(tensors | bf16, folder / FILE, {"format": "pt"})
    return folder
